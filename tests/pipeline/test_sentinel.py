"""A primary of Redis that dies, and Sentinels that name another, which lacks what was written last:
no stream changes a byte.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment import Deployment
from tests.pipeline.streams import stream_all
from tests.sentinels import Guarded, running_sentinels

LAG_S = 1.0  # of the replica that takes over


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Guarded]:
    with running_sentinels(tmp_path_factory.mktemp("sentinels") / "redis", redis_binary) as servers:
        yield servers


@pytest.fixture(scope="module")
def deployment(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    stages = Deployment(guarded.url, tmp_path_factory.mktemp("stages"))
    try:
        yield stages.start_all(dtype="float32")
    finally:
        stages.stop()


@pytest.mark.more  # make verify SUITE=failover has it again and again
def test_streams_go_on_with_the_same_bytes_at_a_replica_that_lagged(guarded: Guarded, deployment: Deployment) -> None:
    undisturbed = asyncio.run(stream_all(deployment, 6, max_tokens=700))

    assert (
        asyncio.run(stream_all(deployment, 6, max_tokens=700, disturb=lambda: guarded.fail_over(LAG_S))) == undisturbed
    )
