"""Undecided: the rows that samplers were asked to decide, and how long each sampler may take.

Rows are named by (handle, position), and stand with their requests. Decisions may come twice, late, or
out of order (from two samplers, after a takeover); each is let through once, in the order of positions.
A sampler that does not answer is asked again, after growing pauses: it may have died, lost its memory,
or be busy with rebuilding what it took over.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from services.compute.candidates.rows import CandidateRows, gather
from services.compute.exchange.active import NOT_ASKED, ActiveRequest, AwaitedRow, Decision

FIRST_PATIENCE_S, LONGEST_PATIENCE_S = 2.0, 30.0
LOST = -3
# times that a row is sent to samplers that live and do not answer: some three minutes
MAX_SILENCES = 8


@dataclass(slots=True)
class Patience:
    """Patience with one sampler."""

    heard_at: float = 0.0
    seconds: float = FIRST_PATIENCE_S
    answered_step: int = 0  # of the last message that it answered; it takes them in order


@dataclass(slots=True)
class Undecided:
    active: Mapping[int, ActiveRequest]  # by handle: the service's
    clock: Callable[[], float] = time.monotonic
    patience: dict[str, Patience] = field(default_factory=dict)  # by sampler

    def __len__(self) -> int:
        return sum(len(active.rows) for active in self.active.values())

    @property
    def handles(self) -> list[int]:
        """The sequences that have undecided rows."""
        return [handle for handle, active in self.active.items() if active.rows]

    def add(self, rows: CandidateRows, step: int) -> None:
        """Add rows that will be sent with the message of that step."""
        for index, (handle, position) in enumerate(zip(rows.handles.tolist(), rows.positions.tolist(), strict=True)):
            self.active[handle].rows[position] = AwaitedRow(rows, index, step)

    def unsent(self, step: int) -> CandidateRows | None:
        """The rows that no sampler was asked for yet, for the message of that step."""
        return self._ask(
            step, (row for active in self.active.values() for row in active.rows.values() if row.asked_at == NOT_ASKED)
        )

    def of(self, handles: Iterable[int], step: int) -> CandidateRows | None:
        """All rows of some sequences, to be asked for again with the message of that step."""
        return self._ask(step, (row for handle in handles for row in self.active[handle].rows.values()))

    def _ask(self, step: int, chosen: Iterable[AwaitedRow]) -> CandidateRows | None:
        now = self.clock()
        indices: dict[int, tuple[CandidateRows, list[int]]] = {}
        for row in chosen:
            row.asked_at, row.asked_step = now, step
            indices.setdefault(id(row.rows), (row.rows, []))[1].append(row.index)
        return gather(list(indices.values())) if indices else None

    def truncate(self, handle: int, position: int) -> None:
        """Drop the sequence's rows behind a position: it goes on otherwise."""
        active = self.active[handle]
        active.rows = {at: row for at, row in active.rows.items() if at <= position}
        active.early = {at: decision for at, decision in active.early.items() if at <= position}

    def settle(self, step: int, decisions: Iterable[Decision]) -> list[Decision]:
        """The decisions of a message that are awaited, and those that came early and are next now."""
        settled = []
        for decision in decisions:
            active = self.active.get(decision.handle)
            row = active.rows.get(decision.position) if active is not None else None
            if active is None or row is None or step < row.step:
                continue
            if decision.token_id == LOST:  # the sequence is given up: the order does not matter
                settled.append(decision)
                continue
            active.early[decision.position] = decision
            while active.rows and (following := active.early.pop(next(iter(active.rows)), None)) is not None:
                del active.rows[following.position]
                settled.append(following)
        return settled

    def record_reply(self, sampler_id: str, step: int) -> None:
        """The sampler has answered the message of that step: it lives, and works."""
        known = self.patience.get(sampler_id, Patience())
        self.patience[sampler_id] = Patience(self.clock(), answered_step=max(step, known.answered_step))

    def silent(self, *, seen_since: float = -math.inf) -> list[int]:
        """The handles whose rows must be sent again.

        Their samplers have not answered for longer than they may; from now on each of those may take
        twice as long. Or their samplers have answered a later message, but not these rows: they have
        lost them, or skipped them. seen_since: monotonic, s: when this replica could read from Redis
        again. An answer that it could not read is no silence.
        """
        now = self.clock()
        asked_at: dict[str, float] = {}
        unanswered = set()
        introduced = [
            (handle, active.sampler_id, active.rows)
            for handle, active in self.active.items()
            if active.sampler_id is not None and active.rows
        ]
        for handle, sampler_id, rows in introduced:
            oldest = max(min(row.asked_at for row in rows.values()), seen_since)
            asked_at[sampler_id] = min(asked_at.get(sampler_id, now), oldest)
            if now - oldest > self._patience_with(next(iter(rows.values())), sampler_id):
                unanswered.add(handle)
        late = set()
        for sampler_id, since in asked_at.items():
            patience = self.patience.setdefault(sampler_id, Patience())
            if now - max(since, patience.heard_at) > patience.seconds:
                late.add(sampler_id)
                patience.heard_at, patience.seconds = now, min(2 * patience.seconds, LONGEST_PATIENCE_S)
        handles = [handle for handle, sampler_id, _ in introduced if handle in unanswered or sampler_id in late]
        for handle in handles:
            for row in self.active[handle].rows.values():
                row.num_silences += 1
        return handles

    def _patience_with(self, row: AwaitedRow, sampler_id: str) -> float:
        """How long a sequence's first row may stay undecided, in seconds."""
        if self.patience.get(sampler_id, Patience()).answered_step > row.asked_step:
            return min(FIRST_PATIENCE_S * 2.0**row.num_silences, LONGEST_PATIENCE_S)
        return LONGEST_PATIENCE_S

    def given_up(self) -> list[int]:
        """The handles of sequences whose rows met with too much silence."""
        return [
            handle
            for handle, active in self.active.items()
            if any(row.num_silences > MAX_SILENCES for row in active.rows.values())
        ]
