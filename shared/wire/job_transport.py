"""Celery's connections, made as all others are: to any URL that the stages take.

kombu has transports of its own for a server and for Sentinels, with URLs of their own, and none for
a cluster.
"""

from typing import Any

from kombu.transport import redis as kombu_redis

from shared.wire.cells import ClusterConnection
from shared.wire.transport import pool_of

URL = "penstock_redis_url"  # among Celery's options of a transport
SOCKET_TIMEOUT_S = 10  # beyond kombu's blocking reads, of a second


class JobChannel(kombu_redis.Channel):  # type: ignore[misc]
    def _get_pool(self, asynchronous: bool = False) -> Any:
        options = self.connection.client.transport_options
        pool: Any = pool_of(options[URL], SOCKET_TIMEOUT_S, ClusterConnection)
        if asynchronous:
            channel = self

            class Watched(pool.connection_class):  # type: ignore[misc]
                """Leaves Celery's poller as it hangs up."""

                def disconnect(self, *arguments: Any, **named: Any) -> None:
                    super().disconnect(*arguments, **named)
                    if channel._registered:
                        channel._on_connection_disconnect(self)

            pool.connection_class = Watched
        return pool


class JobTransport(kombu_redis.Transport):  # type: ignore[misc]
    Channel = JobChannel
