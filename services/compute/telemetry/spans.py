"""Spans: what a trace says of a request's time at compute. Only there if this replica sends spans,
and only of requests that are traced.

`queue`, until its first step; `prefill`, with a `prefill chunk` for each step that had a part in
it; `decode`, with its steps counted. A sequence that is preempted has a prefill more; so has one
that a replica died with, at the one that goes on.
"""

import time
from dataclasses import dataclass, field

from services.compute.exchange.active import ActiveRequest
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.process.tracing import Attributes, Tracer

MAX_CHUNKS = 64  # spans of a prefill; those after them are counted only


@dataclass(slots=True)
class Chunk:
    """A step's part of a prefill. Times are wall clock, s."""

    started_at: float
    ended_at: float
    num_tokens: int
    num_context_tokens: int


@dataclass(slots=True)
class Progress:
    """The progress of a traced sequence between its spans."""

    active: ActiveRequest
    chunks: list[Chunk] = field(default_factory=list)
    num_chunks: int = 0
    decoding_since: float = 0.0  # 0: its prompt is not computed yet
    num_steps: int = 0  # of decoding


class RequestSpans:
    """`computed` after each step, `ended` with each request."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._progress: dict[int, Progress] = {}  # by handle

    def computed(self, batch: ScheduledBatch, active: dict[int, ActiveRequest], started_at: float) -> None:
        """The step that began then has just ended; some of its requests may have, before."""
        ended_at = time.time()
        if self._progress:
            for row in batch.rows[: batch.num_decodes]:
                if (progress := self._progress.get(row.handle)) is not None:
                    progress.num_steps += 1
        for row in batch.rows[batch.num_decodes :]:
            if (each := active.get(row.handle)) is not None and each.message.traceparent:
                self._chunk(each, row, max(started_at, each.scheduled_at), ended_at)

    def _chunk(self, active: ActiveRequest, row: BatchRow, started_at: float, ended_at: float) -> None:
        progress = self._progress.get(row.handle)
        if progress is None:
            progress = self._progress[row.handle] = Progress(active)
            self._queue(active, active.scheduled_at)
        progress.num_chunks += 1
        if len(progress.chunks) < MAX_CHUNKS:
            progress.chunks.append(Chunk(started_at, ended_at, row.num_tokens, row.num_context_tokens))
        if row.sampled:
            self._prefill(progress, ended_at)
            progress.decoding_since = progress.decoding_since or ended_at

    def ended(self, active: ActiveRequest, outcome: str) -> None:
        """The request has ended here. outcome: a reason of its end, or `taken over`."""
        if not active.message.traceparent:
            return
        now, sequence = time.time(), active.sequence
        progress = self._progress.pop(sequence.handle, None)
        if progress is None:
            return self._queue(active, now, outcome)
        if progress.chunks:
            self._prefill(progress, progress.chunks[-1].ended_at)
        if progress.decoding_since:
            said: Attributes = {
                "penstock.num_steps": progress.num_steps, "penstock.num_output_tokens": sequence.tokens.num_decided - sequence.tokens.num_prompt,
                "penstock.num_preemptions": sequence.num_preemptions, "penstock.outcome": outcome,
            }  # fmt: skip
            self._record("decode", active, progress.decoding_since, now, said)

    def _queue(self, active: ActiveRequest, ended_at: float, outcome: str = "scheduled") -> None:
        started_at = active.taken_at if active.was_claimed else active.message.tokenized_at or active.taken_at
        said: Attributes = {"penstock.was_claimed": active.was_claimed, "penstock.num_logged_tokens": active.num_logged_tokens, "penstock.outcome": outcome}
        self._record("queue", active, started_at, ended_at, said)

    def _prefill(self, progress: Progress, ended_at: float) -> None:
        sequence, chunks = progress.active.sequence, progress.chunks
        said: Attributes = {
            "penstock.num_prompt_tokens": sequence.num_prompt_ids, "penstock.num_cached_tokens": sequence.num_cached_tokens,
            "penstock.num_chunks": progress.num_chunks, "penstock.is_again": bool(progress.decoding_since),
        }  # fmt: skip
        own = self._record("prefill", progress.active, chunks[0].started_at, ended_at, said)
        for chunk in chunks:
            said = {"penstock.num_tokens": chunk.num_tokens, "penstock.num_context_tokens": chunk.num_context_tokens}
            self.tracer.record("prefill chunk", own, chunk.started_at, chunk.ended_at, said)
        progress.chunks, progress.num_chunks = [], 0

    def _record(self, name: str, active: ActiveRequest, started_at: float, ended_at: float, said: Attributes) -> str:
        return self.tracer.record(name, active.message.traceparent, started_at, ended_at, {"penstock.request_id": active.message.request_id, **said})
