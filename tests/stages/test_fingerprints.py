"""A replica goes on with what one of another fingerprint began only when no equal one is free; and the
answer says so. On real Redis, with the demo model in bfloat16 and in float32."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.compute.intake import admit
from services.compute.loop.engine import build_engine
from services.compute.loop.service import ComputeService
from services.requests.text.answers.choice import Choice
from services.requests.text.answers.formats import fingerprint_field
from shared.process.settings import ComputeSettings
from shared.wire.load import Load
from shared.wire.messages import TokenEvent
from shared.wire.registry import Registry
from shared.wire.streams import prompts
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.stages.line_of_stages import FILES, MODEL, LineOfStages, LocalStage, ask, hurried, replica
from tests.waiting import wait_until

NUM_TOKENS = 300
REQUEST = ask("text.0", "Once upon a time", max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[LineOfStages]:
    with running_redis(tmp_path / "redis", None) as url, hurried():
        line = LineOfStages(url)
        line.compute.stage.fingerprint = line.compute.exchange.samplers.fingerprint = "fp_first"
        with line.running():
            yield line


@contextmanager
def second(line: LineOfStages, dtype: str, others: list[str], fingerprint: str = "") -> Iterator[ComputeService]:
    """Another compute replica, which sees computes of these fingerprints beside itself; of a given
    fingerprint, or of its own.
    """
    settings = ComputeSettings(
        redis_url=line.redis_url,
        replica_id="compute-2",
        dtype=dtype,
        kv_cache_memory="64MiB",
        num_threads=1,
        max_num_seqs=8,
    )
    engine = build_engine(settings, FILES)
    stage = LocalStage("compute", settings, max_model_len=engine.max_model_len)
    stage.fingerprint = fingerprint or engine.fingerprint
    look(stage, others)
    compute = ComputeService(stage, settings, engine)
    thread = threading.Thread(target=line._guard, args=(compute.run,))
    thread.start()
    try:
        yield compute
    finally:
        stage.stopping.set()
        thread.join(120)
        stage.transport.close()


def stage_of(compute: ComputeService) -> LocalStage:
    assert isinstance(compute.stage, LocalStage)
    return compute.stage


def look(stage: LocalStage, others: list[str], running: int = 0) -> None:
    load = Load(max_num_seqs=8, running=running)
    computes = [
        replace(replica("compute", f"other-{number}"), fingerprint=each, load=load)
        for number, each in enumerate(others)
    ]
    own = replace(replica("compute", stage.replica_id), fingerprint=stage.fingerprint)
    stage.live = Registry((replica("sampler", "sampler-1"), own, *computes))


def begin(line: LineOfStages) -> None:
    """The first replica answers for a while, and leaves."""
    line.submit(REQUEST)
    wait_until(lambda: len(line.log("text.0")) > 5, description="it has begun")
    line.compute.stage.stopping.set()
    stream = prompts(MODEL)

    def is_released() -> bool:
        found: Any = line.client.xpending_range(stream.key, stream.group, "-", "+", 9)
        return bool(found) and found[0]["times_delivered"] == 0

    wait_until(is_released, description="it has left")


def logged(line: LineOfStages) -> list[TokenEvent]:
    entries: Any = line.log("text.0")
    return parse_log(entries)


def test_another_goes_on_when_no_equal_one_is_left(line: LineOfStages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit, "LEFT_FOR_S", 600.0)
    begin(line)
    num_begun = len(logged(line))
    assert num_begun < NUM_TOKENS and logged(line)[0].fingerprint == "fp_first"
    with second(line, "float32", ["fp_first"]) as compute:
        wait_until(lambda: compute.admitter._num_claims > 3, description="it has looked for what was left")
        assert len(logged(line)) == num_begun and not compute.active
        look(stage_of(compute), ["fp_third"])
        monkeypatch.setattr(admit, "LEFT_FOR_S", 0.0)
        wait_until(lambda: line.has_ended("text.0"), description="the answer is whole", timeout_s=120)
    events = logged(line)
    assert len(events) == NUM_TOKENS
    said = {event.position: event.fingerprint for event in events if event.fingerprint}
    assert said == {1: "fp_first", num_begun + 1: compute.stage.fingerprint}
    choice = Choice(0)
    for event in events:
        choice.add(event)
    assert fingerprint_field([choice]) == {"system_fingerprint": f"fp_first+{compute.stage.fingerprint}"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_full", [True, False])
def test_another_goes_on_when_the_equal_one_is_full_or_does_not_take_it(
    line: LineOfStages, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.setattr(admit, "LEFT_FOR_S", 600.0 if is_full else 0.5)
    begin(line)
    with second(line, "float32", ["fp_third"]) as compute:
        look(stage_of(compute), ["fp_first"], running=8 if is_full else 0)
        wait_until(lambda: line.has_ended("text.0"), description="the answer is whole", timeout_s=120)
    assert len(logged(line)) == NUM_TOKENS and {event.fingerprint for event in logged(line)} == {
        "fp_first",
        "",
        compute.stage.fingerprint,
    }


def test_an_equal_one_goes_on_in_silence(line: LineOfStages) -> None:
    [first] = line.answer(replace(REQUEST, request_id="whole.0")).values()
    begin(line)
    own = build_engine(line.compute.settings, FILES).fingerprint
    assert own != build_engine(line.compute.settings.model_copy(update={"dtype": "float32"}), FILES).fingerprint
    with second(line, "bfloat16", [], "fp_first"):
        wait_until(lambda: line.has_ended("text.0"), description="the answer is whole", timeout_s=120)
    events = logged(line)
    assert [event.fingerprint for event in events] == ["fp_first"] + [""] * (NUM_TOKENS - 1)
    assert [event.token_id for event in events] == [event.token_id for event in parse_log(first)]
