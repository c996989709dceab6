"""Spans: the part of a request's trace that compute writes. A replica writes them if it sends spans at
all, and of the requests that are traced.

`queue`, until its first step; `prefill`, with a `prefill chunk` for each step that had a part in
it; `decode`, with its steps counted. A sequence that is preempted has one more prefill; so has one whose
replica died, at the replica that goes on.
"""

import time
from collections.abc import Callable

from services.compute.exchange.active import ActiveRequest, Chunk, TraceProgress
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.process.tracing import Attributes, Tracer

MAX_CHUNKS = 64  # spans of a prefill; those after them are counted only


class RequestSpans:
    """`computed` after each step, `ended` with each request."""

    def __init__(self, tracer: Tracer, wall_clock: Callable[[], float] = time.time) -> None:
        self.tracer = tracer
        self.wall_clock = wall_clock

    def computed(self, batch: ScheduledBatch, active: dict[int, ActiveRequest], started_at: float) -> None:
        """The step that began at started_at has just ended; some of its requests may have ended before."""
        ended_at = self.wall_clock()
        for row in batch.rows[: batch.num_decodes]:
            if (request := active.get(row.handle)) is not None and request.trace is not None:
                request.trace.num_steps += 1
        for row in batch.rows[batch.num_decodes :]:
            if (request := active.get(row.handle)) is not None and request.message.traceparent:
                self._chunk(request, row, max(started_at, request.scheduled_at), ended_at)

    def _chunk(self, active: ActiveRequest, row: BatchRow, started_at: float, ended_at: float) -> None:
        progress = active.trace
        if progress is None:
            progress = active.trace = TraceProgress()
            self._queue(active, active.scheduled_at)
        progress.num_chunks += 1
        if len(progress.chunks) < MAX_CHUNKS:
            progress.chunks.append(Chunk(started_at, ended_at, row.num_tokens, row.num_context_tokens))
        if row.sampled:
            self._prefill(active, progress, ended_at)
            progress.decoding_since = progress.decoding_since or ended_at

    def ended(self, active: ActiveRequest, outcome: str) -> None:
        """The request has ended here. outcome: a reason of its end, or `taken over`."""
        if not active.message.traceparent:
            return
        now, sequence, progress = self.wall_clock(), active.sequence, active.trace
        if progress is None:
            return self._queue(active, now, outcome)
        if progress.chunks:
            self._prefill(active, progress, progress.chunks[-1].ended_at)
        if progress.decoding_since:
            attributes: Attributes = {
                "penstock.num_steps": progress.num_steps,
                "penstock.num_output_tokens": sequence.tokens.num_decided - sequence.tokens.num_prompt,
                "penstock.num_preemptions": sequence.num_preemptions,
                "penstock.outcome": outcome,
            }
            self._record("decode", active, progress.decoding_since, now, attributes)

    def _queue(self, active: ActiveRequest, ended_at: float, outcome: str = "scheduled") -> None:
        started_at = active.taken_at if active.was_claimed else active.message.tokenized_at or active.taken_at
        attributes: Attributes = {
            "penstock.was_claimed": active.was_claimed,
            "penstock.num_logged_tokens": active.num_logged_tokens,
            "penstock.outcome": outcome,
        }
        self._record("queue", active, started_at, ended_at, attributes)

    def _prefill(self, active: ActiveRequest, progress: TraceProgress, ended_at: float) -> None:
        sequence, chunks = active.sequence, progress.chunks
        attributes: Attributes = {
            "penstock.num_prompt_tokens": sequence.num_prompt_ids,
            "penstock.num_cached_tokens": sequence.num_cached_tokens,
            "penstock.num_chunks": progress.num_chunks,
            "penstock.is_again": bool(progress.decoding_since),
        }
        span = self._record("prefill", active, chunks[0].started_at, ended_at, attributes)
        for chunk in chunks:
            attributes = {
                "penstock.num_tokens": chunk.num_tokens,
                "penstock.num_context_tokens": chunk.num_context_tokens,
            }
            self.tracer.record("prefill chunk", span, chunk.started_at, chunk.ended_at, attributes)
        progress.chunks, progress.num_chunks = [], 0

    def _record(
        self, name: str, active: ActiveRequest, started_at: float, ended_at: float, attributes: Attributes
    ) -> str:
        attributes = {"penstock.request_id": active.message.request_id, **attributes}
        return self.tracer.record(name, active.message.traceparent, started_at, ended_at, attributes)
