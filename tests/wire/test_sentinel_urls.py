"""URLs that name Sentinels, as redis-py and Celery take them."""

import pytest
from celery import Celery
from redis.sentinel import SentinelManagedSSLConnection

from services.requests.client import MAX_CONNECTIONS, PrimaryPool
from services.requests.client import connect as connect_async
from shared.process.errors import StartupError
from shared.process.settings import StageSettings
from shared.wire.job_queue import make_queue
from shared.wire.sentinel import parse_sentinel_url
from shared.wire.transport import connect

URL = "redis+sentinel://me:p%40ss@one:1001,two,[::1]:1003/main/3"


def test_a_url_taken_apart() -> None:
    found = parse_sentinel_url(URL + "?sentinel_password=s3&health_check_interval=5")
    assert found.addresses == (("one", 1001), ("two", 26379), ("::1", 1003))
    assert (found.service, found.has_tls) == ("main", False)
    assert found.options == {"username": "me", "password": "p@ss", "db": 3, "health_check_interval": 5}
    assert found.own_options == {"password": "s3", "socket_timeout": 1.0, "socket_connect_timeout": 1.0}
    assert parse_sentinel_url("redis+sentinel://one/main").options == {}


def test_with_tls_the_sentinels_are_asked_with_tls_too() -> None:
    url = "rediss+sentinel://:secret@one:1001/main/0?ssl_ca_certs=/ca.pem"
    found = parse_sentinel_url(url)
    assert found.has_tls and found.own_options["ssl"] and found.own_options["ssl_ca_certs"] == "/ca.pem"
    pool = connect(url).connection_pool
    assert pool.connection_class is SentinelManagedSSLConnection and pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
    assert make_queue(url).conf.broker_use_ssl == {"ssl_cert_reqs": "required", "ssl_ca_certs": "/ca.pem"}
    assert make_queue("rediss+sentinel://one/main").conf.broker_use_ssl == {"ssl_cert_reqs": "required"}


def test_clients_of_asyncio_wait_for_one_of_so_many_connections() -> None:
    pool = connect_async(StageSettings(redis_url=URL)).connection_pool
    assert isinstance(pool, PrimaryPool) and (pool.service_name, pool.max_connections) == ("main", MAX_CONNECTIONS)
    assert [each.connection_pool.connection_kwargs["host"] for each in pool.sentinel_manager.sentinels] == ["one", "two", "::1"]


def test_options_of_the_url_come_before_our_own() -> None:
    url = "redis+sentinel://one/main/0?socket_timeout=3&max_connections=7"
    assert connect(url).connection_pool.connection_kwargs["socket_timeout"] == 3
    assert connect_async(StageSettings(redis_url=url)).connection_pool.max_connections == 7


def test_celery_asks_the_same_sentinels() -> None:
    queue: Celery = make_queue(URL + "?sentinel_password=s3")
    assert queue.conf.broker_url == "sentinel://me:p%40ss@one:1001/3;sentinel://me:p%40ss@two:26379/3;sentinel://me:p%40ss@[::1]:1003/3"
    options = queue.conf.broker_transport_options
    assert options["master_name"] == "main" and options["sentinel_kwargs"]["password"] == "s3" and options["global_keyprefix"]


@pytest.mark.parametrize("url", ["redis+sentinel://one:1001", "redis+sentinel:///main/0", "redis+sentinel://one:x/main/0", "redis+sentinel://one/main/x"])
def test_one_that_says_too_little_is_one_line(url: str) -> None:
    with pytest.raises(StartupError, match="PENSTOCK_REDIS_URL is not a Redis URL"):
        connect(url)
