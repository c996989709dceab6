"""How many drafts a step gets: as many as pay. What they are worth is measured, by proposer and
grade, for each sequence; what they cost is measured, too. Only time depends on it, never text.

A step of N sequences takes S seconds, and gives N tokens. Each token more that it computes costs c
seconds, and each draft that stands is a token more. So a draft pays while its chance to stand is
more than c N / S: what the same seconds would give without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.compute.sequence.batch import ScheduledBatch

FORGET = 0.98  # weight of a step's time against the next one's
FIRST_SHARE = 0.087  # of a step's fixed time that one token more takes: until it is measured
FLOOR_SHARE = 0.002  # the least that a measurement may say
MARGIN = 1.03  # tokens per second must be so much more than without drafts
MAX_DELAY = 0.25  # of a step, for sequences in it that have no drafts
FIRST_CHANCE, FIRST_WEIGHT = 0.5, 4.0  # assumed before the first try, and how many tries that counts as
SURE_CHANCE = 0.75  # the same of a model that drafts as far as it is sure
FORGET_OWN, FORGET_ALL = 0.95, 0.99  # with each draft, of a sequence and of all
FADE_OWN, FADE_ALL = 0.98, 0.99  # with each draft that is not taken: circumstances change
MAX_KINDS = 256  # of proposer and grade


class DraftKind(NamedTuple):
    """A proposer and its grade. Drafts of one kind are expected to stand equally often."""

    name: str  # of the proposer
    grade: int


@dataclass(slots=True)
class Tries:
    """Drafts that were tried behind others that stood, and those of them that stood, too."""

    tried: float = 0.0
    stood: float = 0.0

    def chance(self, first: float) -> float:
        """The chance that the next draft stands. first: the chance that is assumed before any try."""
        return (self.stood + FIRST_WEIGHT * first) / (self.tried + FIRST_WEIGHT)

    def learn(self, tried: int, stood: int, forget: float) -> None:
        self.tried, self.stood = forget * self.tried + tried, forget * self.stood + stood

    def fade(self, share: float) -> None:
        self.tried, self.stood = share * self.tried, share * self.stood


class StepTime:
    """seconds = fixed_s + per_token_s * tokens (+ drafting_s where some are drafts), fitted to the
    steps of late that had no chunk of a prompt: least squares on the relative error."""

    def __init__(self) -> None:
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._last_s = 0.0
        self._fitted: tuple[float, float, float] | None = None  # None: stale; computed again on demand

    def observe(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        row = np.array([1.0, num_tokens, has_drafts]) / seconds
        self._gram = FORGET * self._gram + np.outer(row, row)
        self._moment = FORGET * self._moment + row
        self._last_s = seconds
        self._fitted = None

    @property
    def fixed_s(self) -> float:
        return self._fit()[0]

    @property
    def per_token_s(self) -> float:
        return self._fit()[1]

    @property
    def drafting_s(self) -> float:
        return self._fit()[2]

    def _fit(self) -> tuple[float, float, float]:
        """The three, of the steps so far."""
        if self._fitted is None and self._last_s:
            # what is not known yet is as it was expected to be
            expected = np.array([[-FIRST_SHARE, 1.0, 0.0], [0.0, 0.0, 1.0]]) / self._last_s
            fixed, per_token, drafting = np.linalg.solve(self._gram + expected.T @ expected, self._moment).tolist()
            self._fitted = max(fixed, 0.0), max(per_token, FLOOR_SHARE * self._last_s), max(drafting, 0.0)
        return self._fitted or (0.0, 0.0, 0.0)

    @property
    def is_known(self) -> bool:
        return self._last_s > 0.0

    def seconds(self, num_tokens: int) -> float:
        """The time of a step without drafts, in seconds."""
        return self.fixed_s + self.per_token_s * num_tokens


@dataclass(slots=True)
class DraftControl:
    """Decides how many of the drafts that are offered a step computes."""

    sure: frozenset[str] = frozenset()  # names of proposers that run a model, and only as far as it is sure
    step_time: StepTime = field(default_factory=StepTime)
    _of_all: dict[DraftKind, Tries] = field(default_factory=dict)
    _own: dict[int, dict[DraftKind, Tries]] = field(default_factory=dict)  # by handle

    def chance(self, handle: int, kind: DraftKind) -> float:
        """The chance that a draft of this kind stands, if all drafts before it do."""
        of_all, first = self._of_all.get(kind), SURE_CHANCE if kind.name in self.sure else FIRST_CHANCE
        if of_all is not None:
            first = of_all.chance(first)
        own = self._own.get(handle, {}).get(kind)
        return first if own is None else own.chance(first)

    def choose(self, offers: Mapping[int, tuple[DraftKind, int]], num_decodes: int) -> dict[int, int]:
        """How many of the drafts that are offered pay, by handle, for some. offers: their kind, and
        how many; num_decodes: sequences that get a token of the step."""
        time = self.step_time
        if not time.is_known:
            return {}
        alone_s = time.seconds(num_decodes)
        tokens, seconds = float(num_decodes), alone_s + time.drafting_s
        longest_s = math.inf if len(offers) == num_decodes else (1 + MAX_DELAY) * alone_s
        chosen: dict[int, int] = {}
        for chance, handle in self._in_order(offers):
            if chance * seconds <= time.per_token_s * tokens or seconds + time.per_token_s > longest_s:
                break
            tokens, seconds = tokens + chance, seconds + time.per_token_s
            chosen[handle] = chosen.get(handle, 0) + 1
        if tokens * alone_s <= MARGIN * num_decodes * seconds:
            chosen = {}
        for handle, (kind, _) in offers.items():
            if handle not in chosen:
                self._fade(handle, kind)
        return chosen

    def best_length(self, name: str, handles: list[int], num_decodes: int, max_drafts: int, draft_s: float) -> int:
        """How many drafts each of these sequences is to be asked for, where they take draft_s
        seconds for each place, all sequences together; 0: they do not pay."""
        time, kind = self.step_time, DraftKind(name, 0)
        if not time.is_known or not handles:
            return 0
        alone_s = time.seconds(num_decodes)
        chances = [self.chance(handle, kind) for handle in handles]
        tokens, seconds = float(num_decodes), alone_s + time.drafting_s
        best, best_rate = 0, MARGIN * num_decodes / alone_s
        for length in range(1, max_drafts + 1):
            tokens += sum(chance**length for chance in chances)
            seconds += len(handles) * time.per_token_s + draft_s
            if tokens / seconds > best_rate:
                best, best_rate = length, tokens / seconds
        if not best:
            for handle in handles:
                self._fade(handle, kind)
        return best

    def learn(self, handle: int, kind: DraftKind, offered: int, stood: int) -> None:
        """Count the drafts that a step computed, and those of them that stood."""
        tried = min(offered, stood + 1)
        if len(self._of_all) < MAX_KINDS:
            self._of_all.setdefault(kind, Tries())
            self._own.setdefault(handle, {}).setdefault(kind, Tries()).learn(tried, stood, FORGET_OWN)
        if (of_all := self._of_all.get(kind)) is not None:
            of_all.learn(tried, stood, FORGET_ALL)

    def timed(self, batch: ScheduledBatch, seconds: float) -> None:
        """How long a step took, without what proposers took that run a model."""
        if batch.num_decodes == len(batch.rows) and seconds > 0.0:
            self.step_time.observe(batch.num_tokens, seconds, has_drafts=batch.num_drafts > 0)

    def forget(self, handle: int) -> None:
        self._own.pop(handle, None)

    def _in_order(self, offers: Mapping[int, tuple[DraftKind, int]]) -> list[tuple[float, int]]:
        """The chance of each draft to stand with all before it, the best first; and whose it is."""
        chances = [(self.chance(handle, kind), handle, count) for handle, (kind, count) in offers.items()]
        return sorted(
            [(chance**place, handle) for chance, handle, count in chances for place in range(1, count + 1)],
            reverse=True,
        )

    def _fade(self, handle: int, kind: DraftKind) -> None:
        if (of_all := self._of_all.get(kind)) is not None:
            of_all.fade(FADE_ALL)
        if (own := self._own.get(handle, {}).get(kind)) is not None:
            own.fade(FADE_OWN)
