"""A step's rows: what one came to, and some of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from services.sampler.request_state import RequestState
from shared.messages import StepCandidates, TokenEvent
from shared.token_log import LogEntry

FAILED, UNKNOWN = -1, -2  # token ids of decisions without one: the sequence is over; the sequence must be introduced


@dataclass(frozen=True, slots=True)
class Decided:
    """What one row came to: a new entry for the log, or an event that it holds already, or, with neither, no token: `code` says why."""

    handle: int
    position: int
    state: RequestState | None
    entry: LogEntry | None = None
    event: TokenEvent | None = None
    code: int = FAILED
    end: TokenEvent | None = None  # without a token, with which the request ends now

    @property
    def key(self) -> tuple[int, int]:
        return self.handle, self.position

    @property
    def is_over(self) -> bool:
        """Whether nothing follows it in its sequence."""
        return self.state is None or self.outcome is None or self.outcome.finish_reason is not None

    @property
    def outcome(self) -> TokenEvent | None:
        return self.entry.event if self.entry is not None else self.event


def select(step: StepCandidates, rows: list[int]) -> Iterator[StepCandidates]:
    """The step with some of its rows; nothing for none."""
    if not rows:
        return
    listed = np.isin(np.repeat(np.arange(len(step.handles)), step.counts), rows)
    by_row = {
        name: getattr(step, name)[rows]
        for name in ("handles", "positions", "counts", "logsumexp", "kept_mass", "tail_token_ids", "tail_logits", "previous_token_ids", "temperatures")
        if len(getattr(step, name))
    }
    yield replace(step, intros=(), forget=step.forget[:0], token_ids=step.token_ids[listed], logits=step.logits[listed], **by_row)
