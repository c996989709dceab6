"""A step's rows: the outcome of one, and a selection of them."""

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from services.sampler.request_state import RequestState
from shared.wire.messages import Moments, StepCandidates, TokenEvent

# token ids of decisions without one: the sequence is over; the sequence must be introduced; its log
# lacks what was decided before, and it has to begin again where the log ends
FAILED, UNKNOWN, LOST = -1, -2, -3
# the columns of StepCandidates that have a value a row
BY_ROW = (
    "handles",
    "positions",
    "counts",
    "logsumexp",
    "num_kept",
    "tail_mass",
    "tail_token_ids",
    "tail_logits",
    "previous_token_ids",
    "temperatures",
)


@dataclass(slots=True)  # not frozen, for speed: there is one a token
class Decided:
    """The outcome of one row: a new event, or one that the log holds already. Without one there is no
    token, and `code` says why."""

    handle: int
    position: int
    state: RequestState | None
    event: TokenEvent | None = None
    payload: bytes = b""  # a new event, encoded once for the log and the gateway; else empty
    code: int = FAILED
    end: TokenEvent | None = None  # without a token, with which the request ends now

    @property
    def key(self) -> tuple[int, int]:
        return self.handle, self.position

    @property
    def is_over(self) -> bool:
        """Whether nothing follows it in its sequence."""
        return self.state is None or self.event is None or self.event.finish_reason is not None

    def is_notable(self, gateway_id: str) -> bool:
        """Whether it is the first or the last token of a request that this gateway reads, and
        new."""
        if not self.payload or self.state is None or self.state.gateway_id != gateway_id:
            return False
        return self.position == 1 or self.is_over


def moments_of(rows: list[Decided], compute_id: str, sampler_id: str, decided_at: float) -> tuple[Moments, ...]:
    """Times of what happened to the rows' requests; decided_at: wall clock, s."""
    ends = [
        (row.state.intro, event.position)
        for row in rows
        if row.state is not None and (event := row.event or row.end) is not None
    ]
    return tuple(
        Moments(
            each.request_id,
            position,
            each.tokenized_at,
            each.scheduled_at,
            decided_at,
            compute_id,
            sampler_id=sampler_id,
        )
        for each, position in ends
    )


def select(step: StepCandidates, rows: list[int]) -> StepCandidates:
    """The step with some of its rows, at least one."""
    listed = np.isin(np.repeat(np.arange(len(step.handles)), step.counts), rows)
    by_row = {name: getattr(step, name)[rows] for name in BY_ROW if len(getattr(step, name))}
    return replace(
        step, intros=(), forget=step.forget[:0], token_ids=step.token_ids[listed], logits=step.logits[listed], **by_row
    )


def to_decide_again(
    decided: list[Decided], settled: list[Decided], refused: Container[tuple[int, int]]
) -> list[Decided]:
    """The rows that follow refused ones in their logs. refused: by handle and position.

    Not those of sequences that have ended, or whose logs hold other tokens than were refused: these
    rows were computed on the refused ones.
    """
    asked = {row.key: row.event.token_id for row in decided if row.key in refused and row.event is not None}
    over = {
        row.handle
        for row in settled
        if row.is_over or row.event is None or row.event.token_id != asked.get(row.key, row.event.token_id)
    }
    cut = {row.handle for row in decided if row.key in refused} - over
    done = {row.key for row in settled}
    return [row for row in decided if row.handle in cut and row.key not in done]
