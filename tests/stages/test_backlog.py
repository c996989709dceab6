"""Requests that wait at a compute replica go on to one with less to do, and what has ended long ago
does not run again.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from services.compute.sequence import Sequence
from shared.model.sampling_params import SamplingParams
from shared.wire.entries import RELEASED_MS, GroupReader, append_to_group
from shared.wire.load import Load
from shared.wire.messages import RequestError, TokenizedRequest
from shared.wire.registry import Registry
from shared.wire.streams import inflight_key, log_key, prompts
from tests.conftest import running_redis
from tests.stages.line_of_stages import MODEL, LineOfStages, hurried, replica
from tests.waiting import wait_until


@pytest.fixture
def line(tmp_path: Path, redis_binary: Path | None) -> Iterator[LineOfStages]:
    with running_redis(tmp_path, redis_binary) as url, hurried():
        yield LineOfStages(url)


def put(line: LineOfStages, names: list[str], *, is_in_flight: bool = True) -> None:
    """As a tokenizer does it."""
    for name in names:
        append_to_group(
            line.client,
            prompts(MODEL),
            TokenizedRequest(name, None, MODEL, SamplingParams(max_tokens=4), np.array([30, 40], np.int32), ()),
        )
        if is_in_flight:
            line.client.hset(inflight_key(MODEL), name, "1")
            line.client.hincrby(inflight_key(MODEL), "", 1)


def test_what_waits_goes_on_to_a_replica_with_less_to_do(line: LineOfStages) -> None:
    compute, names = line.compute, [f"r{number}.0" for number in range(40)]
    compute.exchange.start()
    put(line, names)

    def has_all() -> bool:
        compute.receive(wait_s=0.05)
        return len(compute.active) == len(names)

    wait_until(has_all, description="compute has them all")
    compute.leave_snapshot()
    other = replace(replica("compute", "compute-2"), load=Load(max_num_seqs=8, running=2, waiting=0))
    compute.stage.live = Registry((*compute.stage.live.replicas, other))
    compute.hand_on()
    assert [active.message.request_id for active in compute.active.values()] == names[:26], (
        "two for each place of the other's, less what it has"
    )
    compute.stage.transport.run(compute.on_heartbeat)  # which keeps the others only
    reader = GroupReader(compute.stage.transport, prompts(MODEL), "compute-2")
    deliveries, dead = reader.claim(idle_ms=RELEASED_MS, count=64)
    assert [each.message.request_id for each in deliveries] == names[26:] and not dead
    assert all(each.was_released for each in deliveries), "which raises no suspicion"
    other = replace(other, load=Load(max_num_seqs=8, running=8, waiting=8))
    compute.stage.live = Registry((*compute.stage.live.replicas[:-1], other))
    compute.hand_on()
    assert len(compute.active) == 26, "it has enough"
    compute.stage.transport.close()
    line.client.close()


def test_a_claimed_request_that_ended_before_its_log_expired_does_not_run_again(line: LineOfStages) -> None:
    """Its replica died before it acknowledged the entry, and none was there for longer than logs are kept."""
    line.compute.exchange.prompts.ensure_group()
    put(line, ["ended.0"], is_in_flight=False)
    put(line, ["waiting.0"])
    line.client.xreadgroup("compute", "dead", {prompts(MODEL).key: ">"})
    with line.running():
        wait_until(
            lambda: line.has_ended("waiting.0") and not line.client.xlen(prompts(MODEL).key),
            description="nothing is pending any more",
        )
        assert not line.client.exists(log_key("ended.0"))


def test_the_heartbeat_keeps_what_came_just_before_a_long_call_of_the_encoder(
    line: LineOfStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = line.compute
    compute.exchange.start()
    put(line, ["a.0"])
    compute.receive(wait_s=5.0)
    wait_until(lambda: len(compute.active) == 1, description="the request is there")
    found = []

    def encode() -> list[tuple[Sequence, RequestError]]:
        time.sleep(0.3)
        renewed_at = time.monotonic()
        compute.stage.transport.run(compute.on_heartbeat)
        [entry] = line.client.xpending_range(prompts(MODEL).key, prompts(MODEL).group, "-", "+", 10)
        found.append((entry["time_since_delivered"] / 1000, time.monotonic() - renewed_at))
        return []

    monkeypatch.setattr(compute.admitter, "encode", encode)
    compute.step()
    [(idle_s, since_renewal_s)] = found
    assert idle_s < since_renewal_s + 0.1, "it had waited for longer when it was renewed"
    compute.stage.transport.close()
    line.client.close()


def test_a_replica_says_how_much_it_takes_when_it_joins(line: LineOfStages) -> None:
    line.compute.leave_snapshot()
    assert line.compute.stage.load.max_num_seqs == line.compute.scheduler.max_num_seqs
    line.compute.stage.transport.close()
    line.client.close()
