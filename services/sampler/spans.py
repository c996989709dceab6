"""Spans: what a trace says of a request's time at this sampler."""

import time

from services.sampler.request_state import RequestState
from shared.process.tracing import Attributes, Tracer


def trace(tracer: Tracer, state: RequestState, compute_id: str, outcome: str) -> None:
    """`sample`: from its introduction by this compute replica to the last token that was decided
    for it, or until now if that ended it."""
    if not state.intro.traceparent:
        return
    now = time.time()
    ended_at = now if outcome != "silence" else now - (time.monotonic() - state.touched_at)
    said: Attributes = {
        "penstock.request_id": state.intro.request_id, "penstock.compute_id": compute_id, "penstock.num_tokens": state.position - state.num_replayed_tokens,
        "penstock.num_replayed_tokens": state.num_replayed_tokens, "penstock.outcome": outcome,
    }  # fmt: skip
    tracer.record("sample", state.intro.traceparent, state.begun_at, ended_at, said)
