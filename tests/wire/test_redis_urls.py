"""URLs that name Sentinels, or the nodes of a cluster."""

import pytest
from celery import Celery
from redis import SSLConnection
from redis.sentinel import SentinelManagedConnection

from services.requests.store.client import MAX_CONNECTIONS, PrimaryPool
from services.requests.store.client import connect as connect_async
from shared.process.errors import StartupError
from shared.process.stage_settings import StageSettings
from shared.wire.job_queue import make_queue
from shared.wire.job_transport import URL as JOBS_URL
from shared.wire.job_transport import JobTransport
from shared.wire.redis_urls import DiscoveryUrl, parse_named
from shared.wire.transport import connect

WRONG = [
    "redis+sentinel://one:1001",
    "redis+sentinel:///main/0",
    "redis+sentinel://one:x/main/0",
    "redis+sentinel://one/main/x",
    "redis+cluster://one",
    "redis+cluster://one/Big",
    "redis+cluster://one/a/0",
    "redis+cluster:///a",
    "redis+cluster://one/{a}",
]
URL = "redis+sentinel://me:p%40ss@one:1001,two,[::1]:1003/main/3"


def parsed(url: str) -> DiscoveryUrl:
    found = parse_named(url)
    assert found is not None
    return found


def test_a_url_taken_apart() -> None:
    found = parsed(URL + "?sentinel_password=s3&health_check_interval=5")
    assert found.addresses == (("one", 1001), ("two", 26379), ("::1", 1003))
    assert (found.service, found.has_tls) == ("main", False)
    assert found.options == {"username": "me", "password": "p@ss", "db": 3, "health_check_interval": 5}
    assert found.own_options == {"password": "s3", "socket_timeout": 1.0, "socket_connect_timeout": 1.0}
    assert parsed("redis+sentinel://one/main").options == {}


def test_with_tls_the_sentinels_are_asked_with_tls_too() -> None:
    url = "rediss+sentinel://:secret@one:1001/main/0?ssl_ca_certs=/ca.pem"
    found = parsed(url)
    assert found.has_tls and found.own_options["ssl"] and found.own_options["ssl_ca_certs"] == "/ca.pem"
    pool = connect(url).connection_pool
    assert issubclass(pool.connection_class, SentinelManagedConnection) and issubclass(
        pool.connection_class, SSLConnection
    )
    assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"


def test_clients_of_asyncio_wait_for_one_of_so_many_connections() -> None:
    pool = connect_async(StageSettings(redis_url=URL)).connection_pool
    assert isinstance(pool, PrimaryPool) and (pool.service_name, pool.max_connections) == ("main", MAX_CONNECTIONS)
    assert [each.connection_pool.connection_kwargs["host"] for each in pool.sentinel_manager.sentinels] == [
        "one",
        "two",
        "::1",
    ]


def test_options_of_the_url_come_before_our_own() -> None:
    url = "redis+sentinel://one/main/0?socket_timeout=3&max_connections=7"
    assert connect(url).connection_pool.connection_kwargs["socket_timeout"] == 3
    assert connect_async(StageSettings(redis_url=url)).connection_pool.max_connections == 7


def test_a_cluster_is_asked_as_whoever_uses_it_and_every_key_has_the_cells_tag() -> None:
    found = parsed("rediss+cluster://me:secret@one:1001,two/my-cell?ssl_ca_certs=/ca.pem")
    assert found.addresses == (("one", 1001), ("two", 6379)) and (found.cell, found.service, found.prefix) == (
        "my-cell",
        "",
        "{my-cell}:",
    )
    assert (
        found.own_options["username"] == "me" and found.own_options["password"] == "secret" and found.own_options["ssl"]
    )
    assert parse_named("redis://one:1001/0") is None and parsed("redis+sentinel://one/main").prefix == ""


@pytest.mark.parametrize(
    ("url", "prefix"), [("redis+cluster://one/a", "{a}:celery:"), (URL, "celery:"), ("redis://one/0", "celery:")]
)
def test_celery_connects_as_all_others_do(url: str, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    queue: Celery = make_queue(url)
    options = queue.conf.broker_transport_options
    assert (
        options[JOBS_URL] == url
        and options["global_keyprefix"] == prefix
        and queue.connection_for_write().transport_cls is JobTransport
    )
    assert queue.connection_for_write().as_uri() and not caplog.records, "kombu warns of no missing host"


@pytest.mark.parametrize("url", WRONG)
def test_one_that_says_too_little_is_one_line(url: str) -> None:
    with pytest.raises(StartupError, match="PENSTOCK_REDIS_URL is not a Redis URL"):
        connect(url)
