"""A batch's part of traces. A run of it is a span in the trace of the request that made the batch,
with what it checked and wrote under it. A line is a trace of its own, linked to that: its ids are
those of the answer, so a worker that goes on after a death goes on in the same trace.
"""

from dataclasses import replace

from msgspec import structs

from services.jobs.asking import Asked
from services.jobs.output import AnsweredLine
from services.requests.store.batches.store import Batch
from shared.process.clock import Clock
from shared.process.tracing import Attributes, Tracer


def spans_of(tracer: Tracer | None, batch: Batch, clock: Clock) -> "BatchSpans | None":
    """Spans of a batch; None if tracing is off."""
    return BatchSpans(tracer, batch, clock) if tracer is not None and batch.traceparent else None


class BatchSpans:
    def __init__(self, tracer: Tracer, batch: Batch, clock: Clock) -> None:
        self.tracer = tracer
        self.clock = clock
        self.batch_id = batch.record.batch_id
        self.traceparent = batch.traceparent
        self._parts: list[tuple[str, float, float]] = []  # of this run, with their times

    def part(self, name: str, started_at: float) -> None:
        """A part of this run is over."""
        self._parts.append((name, started_at, self.clock.wall()))

    def run(self, started_at: float, num_completed: int, num_failed: int, *, is_over: bool) -> None:
        """Record that this run is over; the batch has so many lines that are answered. is_over: so
        is the batch."""
        attributes: Attributes = {
            "penstock.batch_id": self.batch_id,
            "penstock.num_completed": num_completed,
            "penstock.num_failed": num_failed,
            "penstock.is_over": is_over,
        }
        own = self.tracer.record("batch run", self.traceparent, started_at, self.clock.wall(), attributes)
        for name, began_at, ended_at in self._parts:
            self.tracer.record(name, own, began_at, ended_at, {})

    def joined(self, asked: Asked, key: str) -> Asked:
        """A line that is about to enter the pipeline, with a trace. key: what its ids end with."""
        traceparent = self.tracer.trace_of(key)
        requests = [structs.replace(each, traceparent=traceparent) for each in asked.requests]
        return replace(
            asked, record=replace(asked.record, traceparent=traceparent), requests=requests, asked_at=self.clock.wall()
        )

    def admitted(self, asked: Asked, started_at: float) -> None:
        """Redis has it; it had its place since then."""
        if asked.record.traceparent:
            self.tracer.record(
                "admission",
                asked.record.traceparent,
                started_at,
                self.clock.wall(),
                {"penstock.num_sequences": len(asked.requests)},
            )

    def line(self, asked: Asked, custom_id: str, answer: AnsweredLine | None) -> None:
        """Record a request's outcome; None: it has to be asked again."""
        if not asked.record.traceparent:
            return
        outcome = "lost" if answer is None else "completed" if answer.is_completed else "failed"
        attributes: Attributes = {
            "penstock.batch_id": self.batch_id,
            "penstock.custom_id": custom_id,
            "gen_ai.request.model": asked.record.model,
            "gen_ai.response.id": asked.record.response_id,
            "penstock.outcome": outcome,
            "penstock.num_output_tokens": answer.totals.output_tokens if answer is not None else 0,
        }
        self.tracer.record_root(
            "batch line", asked.record.traceparent, asked.asked_at, self.clock.wall(), attributes, link=self.traceparent
        )
