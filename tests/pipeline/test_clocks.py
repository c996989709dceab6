"""Redis' clock goes back while a stream has expired: it begins again with ids that are older than
what its reader has read.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.wire.messages import Control, encode
from shared.wire.registry import broadcast
from shared.wire.streams import CONTROL, MESSAGE, candidates, decisions, events
from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment
from tests.waiting import wait_until

DAY_MS = 24 * 3600 * 1000


@pytest.fixture
def small(tmp_path: Path, redis_binary: Path | None) -> Iterator[Deployment]:
    """One replica of each stage."""
    with running_redis(tmp_path / "redis", redis_binary) as url:
        deployment = Deployment(url, tmp_path)
        try:
            yield deployment.start_all()
        finally:
            deployment.stop()


def test_requests_are_answered_after_idle_streams_have_expired_and_the_clock_went_back(small: Deployment) -> None:
    client, openai = small.redis(), small.client()

    def answer() -> str:
        return (
            openai.completions.create(
                model=MODEL, prompt="The quick brown fox", max_tokens=12, temperature=0, timeout=60
            )
            .choices[0]
            .text
        )

    before = answer()
    ids = {
        stage: next(each.replica_id for each in small.registry().of(stage))
        for stage in ("sampler", "compute", "gateway")
    }
    streams = [candidates(ids["sampler"]), decisions(ids["compute"]), events(ids["gateway"]), CONTROL]
    broadcast(client, Control("refresh"))
    pipe = client.pipeline(transaction=False)
    for stream in streams:  # each is read up to an id of tomorrow, as made by a clock that was ahead, and expires
        ahead = int(client.time()[0]) * 1000 + DAY_MS
        pipe.xadd(stream.key, {MESSAGE: encode(Control("refresh"))}, id=f"{ahead}-0")
    pipe.execute()

    def are_read() -> bool:
        logs = small.logs()
        return all(f"stream={stream.key}" in logs for stream in streams[:2]) and bool(client.xlen("dead-letter") >= 3)

    wait_until(are_read, description="what is no message is a dead letter by now")
    client.delete(*(stream.key for stream in streams))
    assert answer() == before
    assert "has begun again" in small.logs()
