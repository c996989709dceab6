"""Deaths: how many workers have begun lately and neither live nor have left in good order. So a
worker that dies again and again is seen from outside."""

import time
import uuid
from contextlib import suppress

import redis

from shared.wire.registry import look
from shared.wire.streams import upkeep_key
from shared.wire.transport import Transport

WINDOW_S = 600.0
MOST = 1000  # that are looked at
KEY = upkeep_key("workers")  # a sorted set of workers by when they began


class Deaths:
    def __init__(self, transport: Transport, replica_id: str) -> None:
        self.transport = transport
        self.replica_id = replica_id
        self._member = f"{replica_id}/{uuid.uuid4().hex}"
        self._found = 0
        self._began_at = time.monotonic()

    @property
    def num_recent(self) -> int:
        """The number of recent deaths, as of when this worker began."""
        return self._found if time.monotonic() - self._began_at < WINDOW_S else 0

    def enter(self) -> None:
        """Note that this worker begins."""
        # this is to tell an operator, and worth no worker
        with suppress(redis.RedisError, OSError):
            self._found = self._enter()

    def leave(self) -> None:
        """Note that this worker ends in good order."""
        with suppress(redis.RedisError, OSError):
            self.transport.client.zrem(KEY, self._member)

    def _enter(self) -> int:
        """Returns how many have died."""
        live, now = look(self.transport.client).ids("jobs") - {self.replica_id}, time.time()
        with self.transport.client.pipeline(transaction=False) as pipe:
            pipe.zadd(KEY, {self._member: now})
            pipe.zremrangebyscore(KEY, "-inf", now - WINDOW_S)
            pipe.expire(KEY, int(WINDOW_S))
            pipe.zrange(KEY, -MOST, -1)
            *_, members = pipe.execute()
        holders = [member.decode(errors="replace").rpartition("/")[0] for member in members if member != self._member.encode()]
        return sum(holder not in live for holder in holders)
