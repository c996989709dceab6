"""Undecided: the rows that samplers have been asked to decide, and who has been asked how often.

Rows are known by (handle, position). Decisions may come twice, late, or out of order (from two
samplers, after a takeover); they are let through once and in the order of the positions. A sampler
that says nothing is asked again, with growing patience: it may have died, lost its memory, or be
busy with rebuilding what it took over.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.compute.candidates.rows import CandidateRows, gather

FIRST_PATIENCE_S, LONGEST_PATIENCE_S = 2.0, 30.0
NOT_ASKED = float("inf")
LOST = -3
# that a row is sent into, to samplers that live and do not answer: some three minutes
MAX_SILENCES = 8


@dataclass(frozen=True, slots=True)
class Decision:
    """The log's token at a position of a sequence."""

    handle: int
    position: int
    token_id: int  # -1: none, the sequence has ended without; LOST: its log lacks what was decided before
    is_finished: bool


@dataclass(slots=True)
class Row:
    """A row under way."""

    rows: CandidateRows
    index: int
    # of the message with which it is first sent: decisions of earlier ones are not for it
    step: int
    asked_at: float = NOT_ASKED  # monotonic, s: when it was sent last
    asked_step: int = 0  # of the message with which it was sent last
    num_silences: int = 0


@dataclass(slots=True)
class Patience:
    """Patience with one sampler."""

    heard_at: float = 0.0
    seconds: float = FIRST_PATIENCE_S
    answered_step: int = 0  # of the last message that it answered; it takes them in order


@dataclass(slots=True)
class Undecided:
    rows: dict[int, dict[int, Row]] = field(default_factory=dict)  # by handle, by position, rising
    # that came before one at an earlier position
    early: dict[tuple[int, int], Decision] = field(default_factory=dict)
    patience: dict[str, Patience] = field(default_factory=dict)  # by sampler

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    def add(self, rows: CandidateRows, step: int) -> None:
        """Rows that are to be sent with the message of that step."""
        for index, (handle, position) in enumerate(zip(rows.handles.tolist(), rows.positions.tolist(), strict=True)):
            self.rows.setdefault(handle, {})[position] = Row(rows, index, step)

    def unsent(self, step: int) -> CandidateRows | None:
        """The rows that nobody has been asked for yet, for the message of that step."""
        return self._ask(step, (row for rows in self.rows.values() for row in rows.values() if row.asked_at == NOT_ASKED))

    def of(self, handles: Iterable[int], step: int) -> CandidateRows | None:
        """All rows of some sequences, to be asked for again with the message of that step."""
        return self._ask(step, (row for handle in handles for row in self.rows.get(handle, {}).values()))

    def _ask(self, step: int, chosen: Iterable[Row]) -> CandidateRows | None:
        now = time.monotonic()
        indices: dict[int, tuple[CandidateRows, list[int]]] = {}
        for row in chosen:
            row.asked_at, row.asked_step = now, step
            indices.setdefault(id(row.rows), (row.rows, []))[1].append(row.index)
        return gather(list(indices.values())) if indices else None

    def forget(self, handle: int, after_position: int = 0) -> None:
        """The sequence has ended, or goes on otherwise after a position: nobody waits for these
        rows any more."""
        rows = self.rows.get(handle, {})
        for position in [each for each in rows if each > after_position]:
            del rows[position]
        if not rows:
            self.rows.pop(handle, None)
        for key in [key for key in self.early if key[0] == handle and key[1] > after_position]:
            del self.early[key]

    def settle(self, step: int, decisions: Iterable[Decision]) -> list[Decision]:
        """The decisions of a message that are awaited, with those that came early and whose turn it
        is now."""
        settled = []
        for decision in decisions:
            row = self.rows.get(decision.handle, {}).get(decision.position)
            if row is None or step < row.step:
                continue
            if decision.token_id == LOST:  # the sequence is given up: it waits for no turn
                settled.append(decision)
                continue
            self.early[decision.handle, decision.position] = decision
            settled += self._in_turn(decision.handle)
        return settled

    def _in_turn(self, handle: int) -> list[Decision]:
        rows, found = self.rows[handle], []
        while rows and (decision := self.early.pop((handle, next(iter(rows))), None)) is not None:
            del rows[decision.position]
            found.append(decision)
        if not rows:
            del self.rows[handle]
        return found

    def record_reply(self, sampler_id: str, step: int) -> None:
        """The sampler has answered the message of that step: it lives, and works."""
        known = self.patience.get(sampler_id, Patience())
        self.patience[sampler_id] = Patience(time.monotonic(), answered_step=max(step, known.answered_step))

    def silent(self, sampler_by_handle: dict[int, str | None], *, seen_since: float = -math.inf) -> list[int]:
        """The handles whose rows are to be sent again.

        Their samplers have said nothing for longer than they may; from now on each of those may take
        twice as long. Or their samplers have answered a later message, but not these rows: they have
        lost them, or skipped them. seen_since: monotonic, s, when this replica could not see the last
        time: an answer that it could not hear is no silence.
        """
        now = time.monotonic()
        asked_at: dict[str, float] = {}
        unanswered = set()
        for handle, sampler_id in sampler_by_handle.items():
            if sampler_id is not None and (rows := self.rows.get(handle)):
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
        handles = [handle for handle, sampler_id in sampler_by_handle.items() if handle in unanswered or (sampler_id in late and handle in self.rows)]
        for handle in handles:
            for row in self.rows[handle].values():
                row.num_silences += 1
        return handles

    def _patience_with(self, row: Row, sampler_id: str) -> float:
        """How long a sequence's first row may stay undecided, in seconds."""
        if self.patience.get(sampler_id, Patience()).answered_step > row.asked_step:
            return min(FIRST_PATIENCE_S * 2.0**row.num_silences, LONGEST_PATIENCE_S)
        return LONGEST_PATIENCE_S

    def given_up(self) -> list[int]:
        """The handles of sequences whose rows met with too much silence."""
        return [handle for handle, rows in self.rows.items() if any(row.num_silences > MAX_SILENCES for row in rows.values())]
