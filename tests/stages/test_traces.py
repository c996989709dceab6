"""The spans of tokenizer, compute and sampler: of those requests that are traced, and of the others none."""

import os

import pytest
from msgspec.structs import replace

from tests.collector import Collector
from tests.stages.line_of_stages import LineOfStages, ask, hurried
from tests.waiting import wait_until


def test_stages_record_where_a_requests_time_went(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector().start()
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    trace_id, parent_id = os.urandom(16).hex(), os.urandom(8).hex()
    traced = replace(
        ask("a.0", "The river", max_tokens=12, ignore_eos=True), traceparent=f"00-{trace_id}-{parent_id}-01"
    )
    with hurried(), LineOfStages(redis_url).running() as line:
        line.answer(traced, ask("b.0", "Another", max_tokens=12))
        names = {"tokenize", "queue", "prefill", "prefill chunk", "decode", "sample"}
        wait_until(lambda: names <= {span.name for span in collector.spans}, description="all spans have come")
    spans = {span.name: span for span in collector.of(trace_id)}
    collector.stop()
    assert set(spans) == names and len(collector.spans) == len(names), "nothing of the request that is not traced"
    assert {span.parent_id for name, span in spans.items() if name != "prefill chunk"} == {parent_id}
    assert spans["prefill chunk"].parent_id == spans["prefill"].span_id
    assert {name: span.service for name, span in spans.items() if name in ("tokenize", "queue", "sample")} == {
        "tokenize": "penstock-tokenizer",
        "queue": "penstock-compute",
        "sample": "penstock-sampler",
    }
    assert spans["decode"].said["penstock.num_output_tokens"] == 12 and spans["decode"].said["penstock.num_steps"] >= 11
    assert (
        spans["sample"].said["penstock.num_tokens"] == 12
        and spans["prefill chunk"].said["penstock.num_tokens"] == spans["tokenize"].said["penstock.num_prompt_tokens"]
    )
    order = [spans[name].started_at for name in ("tokenize", "queue", "prefill", "decode")]
    assert order == sorted(order)
    assert (
        spans["queue"].ended_at == spans["prefill"].started_at
        and spans["prefill"].ended_at == spans["decode"].started_at
    )
