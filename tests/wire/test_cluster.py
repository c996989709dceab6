"""Connections to a cell of a real Redis Cluster: they follow its slot when its server dies, and when it is moved."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.requests.store.client import connect as connect_async
from services.requests.store.client import persist
from shared.process.stage_settings import StageSettings
from shared.wire.messages import Control
from shared.wire.registry import broadcast
from shared.wire.streams import CONTROL
from shared.wire.transport import Transport
from tests.clusters import Clustered, running_cluster
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Clustered]:
    with running_cluster(tmp_path_factory.mktemp("cluster") / "redis", redis_binary) as cluster:
        yield cluster


@pytest.fixture
def transport(cluster: Clustered) -> Iterator[Transport]:
    transport = Transport(cluster.url("a"), threading.Event())
    yield transport
    transport.close()


def test_commands_scripts_and_transactions_stay_in_their_cell(cluster: Clustered, transport: Transport) -> None:
    transport.run(lambda pipe: pipe.set("name", "a"))
    transport.run(lambda pipe: broadcast(pipe, Control("refresh")))
    transport.run(lambda pipe: pipe.hset("h", "f", 1).zadd("z", {"m": 1}), atomic=True)
    other = Transport(cluster.url("b"), threading.Event())
    try:
        assert other.client.get("name") is None and not other.client.exists(CONTROL.key, "h", "z")
    finally:
        other.close()
    assert transport.client.get("name") == b"a" and transport.client.xlen(CONTROL.key) == 1
    assert set(cluster.ask(cluster.primary_of("a"), "KEYS", "{a}:*")) == {"{a}:name", "{a}:control", "{a}:h", "{a}:z"}


@pytest.mark.parametrize("how", ["fail over", "move by key"])
def test_a_cell_is_found_where_it_is_now(how: str, cluster: Clustered, transport: Transport) -> None:
    async def run() -> None:
        client = connect_async(StageSettings(redis_url=cluster.url("a")))
        transport.run(lambda pipe: pipe.set("before", how))
        assert await client.get("before") == how.encode()
        was = cluster.primary_of("a")
        await (cluster.fail_over("a", 0) if how == "fail over" else asyncio.to_thread(cluster.move_by_key, "a"))
        assert cluster.primary_of("a") not in (0, was)
        assert await persist(lambda: client.get("before")) == how.encode()
        await persist(lambda: client.incr("counter"))
        assert await asyncio.to_thread(transport.run, lambda pipe: pipe.get("before")) == [how.encode()]
        await client.aclose()

    asyncio.run(run())
    wait_until(cluster.is_whole, description="the cluster is whole")
