"""Speculation: which proposers are asked for drafts, which drafts a step computes, and how many stood.

See proposer.py for what drafts are, control.py for how many there are, and flight.py for which of
them stand.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, Protocol

from services.compute.candidates.constraints import Constraints
from services.compute.scheduling.drafts import Drafting
from services.compute.sequence import Sequence
from services.compute.sequence.batch import ScheduledBatch
from services.compute.speculation.control import DraftControl, DraftKind
from services.compute.speculation.proposer import MAX_GRADE, Proposer, Wanted

LONGEST_PAUSE = 32  # steps, on a device that draws, until proposers without drafts are asked again
SMOOTH = 0.9  # weight of what a place of a model's drafts took before


class Chooser(Protocol):
    """control.py's DraftControl, or a test's."""

    def chance(self, handle: int, kind: DraftKind) -> float: ...
    def choose(self, offers: Mapping[int, tuple[DraftKind, int]], num_decodes: int) -> dict[int, int]: ...
    def best_length(self, name: str, handles: list[int], num_decodes: int, max_drafts: int, draft_s: float) -> int: ...
    def learn(self, handle: int, kind: DraftKind, offered: int, stood: int) -> None: ...
    def timed(self, batch: ScheduledBatch, seconds: float) -> None: ...
    def forget(self, handle: int) -> None: ...


@dataclass(slots=True)
class Tally:
    """Counts of the drafts that were computed."""

    num_drafts: int = 0  # times that a sequence had some
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, offered: int, stood: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += offered
        self.num_accepted_tokens += stood


class Speculation:
    """The methods belong to the loop."""

    def __init__(
        self, proposers: Ordered[Proposer], constraints: Constraints, vocab_size: int, control: Chooser | None = None
    ) -> None:
        """proposers: those that run no model first."""
        self.proposers = proposers
        self.control: Chooser = control or DraftControl(
            frozenset(proposer.name for proposer in proposers if proposer.runs_model and proposer.stops_itself)
        )
        self.constraints = constraints
        self.vocab_size = vocab_size
        self.total = Tally()
        self.accepted_by_place: list[int] = []  # how often the first, the second, … draft stood
        self.tallies: dict[int, Tally] = {}  # by handle
        self.offered: dict[int, tuple[DraftKind, int]] = {}  # by handle: of the step that was scheduled last
        # On a device that draws, drafts are asked for when no step is in flight, and that costs time:
        # after steps without any, proposers are asked less and less often
        self._pause = self._pause_left = 0  # steps
        self.place_s: dict[str, float] = {}  # by proposer: that each place of its drafts takes
        self._model_s = 0.0  # that proposers took for the step that was scheduled last

    def drafting(self, max_drafts: int, max_sampled: int) -> Drafting | None:
        """The scheduler's way to ask for drafts; None: no proposer."""
        return Drafting(self.draft, max_drafts, max_sampled) if self.proposers and max_drafts else None

    def draft(self, wanted: list[tuple[Sequence, int]], num_decodes: int) -> dict[int, list[int]]:
        """Drafts for the step that is being scheduled, by handle, for some."""
        self.offered, self._model_s = {}, 0.0
        asked = {sequence.handle: Wanted(sequence, max_drafts) for sequence, max_drafts in wanted}
        best: dict[int, tuple[DraftKind, list[int]]] = {}
        for proposer in self.proposers:
            for handle, (kind, token_ids) in self._ask(proposer, asked, best, num_decodes).items():
                if handle not in best or self._worth(handle, kind, token_ids) > self._worth(handle, *best[handle]):
                    best[handle] = kind, token_ids
        counts = self.control.choose(
            {handle: (kind, len(token_ids)) for handle, (kind, token_ids) in best.items()}, num_decodes
        )
        self.offered = {handle: (best[handle][0], count) for handle, count in counts.items()}
        if counts:
            self._pause = self._pause_left = 0
        return {handle: best[handle][1][:count] for handle, count in counts.items()}

    def waits_for(self, batch: ScheduledBatch) -> bool:
        """Whether the step in flight is to be collected before another is scheduled: what it draws
        depends on drafts, or what follows may be drafted."""
        if not self.proposers:
            return False
        self._pause_left -= 1
        is_due = self._pause_left < 0
        if is_due:
            self._pause = self._pause_left = min(max(1, 2 * self._pause), LONGEST_PAUSE)
        return is_due or batch.num_drafts > 0 or any(proposer.needs_hidden for proposer in self.proposers)

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        """A step was collected. decided: by handle, how many tokens stand."""
        for row in batch.rows[: batch.num_decodes]:
            if len(row.sampled) > 1 and row.handle in decided and (offer := self.offered.get(row.handle)) is not None:
                self._count(row.handle, offer[0], len(row.sampled) - 1, decided[row.handle] - 1)
        for proposer in self.proposers:
            proposer.computed(batch, hidden, decided)

    def timed(self, batch: ScheduledBatch, seconds: float) -> None:
        """How long the step took that was collected last."""
        if self.proposers:
            self.control.timed(batch, seconds - (self._model_s if batch.num_drafts else 0.0))

    def figures(self) -> dict[str, Any]:
        """Figures for the registry, by the names of Load's fields."""
        if not self.proposers:
            return {}
        return {
            "spec_decode_drafts": self.total.num_drafts,
            "spec_decode_draft_tokens": self.total.num_draft_tokens,
            "spec_decode_accepted_tokens": self.total.num_accepted_tokens,
            "accepted_by_place": {str(place): float(count) for place, count in enumerate(list(self.accepted_by_place))},
        }

    def forget(self, handle: int) -> Tally:
        """The sequence is gone. Returns its tally."""
        self.control.forget(handle)
        for proposer in self.proposers:
            proposer.forget(handle)
        return self.tallies.pop(handle, Tally())

    def _ask(
        self,
        proposer: Proposer,
        asked: Mapping[int, Wanted],
        best: Mapping[int, tuple[DraftKind, list[int]]],
        num_decodes: int,
    ) -> dict[int, tuple[DraftKind, list[int]]]:
        """The drafts of one of them: its kind, and those that may run."""
        if proposer.runs_model:
            # its cache has no holes, and no images
            asked = {
                handle: each for handle, each in asked.items() if handle not in best and each.sequence.request.is_plain
            }
            max_drafts = max((each.max_drafts for each in asked.values()), default=0)
            paying = self.control.best_length(
                proposer.name, list(asked), num_decodes, max_drafts, self.place_s.get(proposer.name, 0.0)
            )
            max_drafts = max_drafts if paying and proposer.stops_itself else paying
            asked = (
                {handle: Wanted(each.sequence, min(max_drafts, each.max_drafts)) for handle, each in asked.items()}
                if max_drafts
                else {}
            )
        if not asked:
            return {}
        began = time.perf_counter()
        found = proposer.propose(asked)
        if proposer.runs_model:
            self._learn_time(
                proposer.name,
                time.perf_counter() - began,
                max((len(each.token_ids) for each in found.values()), default=0),
            )
        usable = {
            handle: (DraftKind(proposer.name, min(each.grade, MAX_GRADE)), self._usable(asked[handle], each.token_ids))
            for handle, each in found.items()
        }
        return {handle: (kind, token_ids) for handle, (kind, token_ids) in usable.items() if token_ids}

    def _usable(self, wanted: Wanted, token_ids: list[int]) -> list[int]:
        """The first of the drafts, up to one that can't be, or ends the sequence."""
        sequence = wanted.sequence
        ends = sequence.request.end_token_ids
        count = next(
            (at for at, each in enumerate(token_ids) if each in ends or not 0 <= each < self.vocab_size), len(token_ids)
        )
        return self.constraints.allowed(sequence, token_ids[: min(count, wanted.max_drafts)])

    def _worth(self, handle: int, kind: DraftKind, token_ids: list[int]) -> float:
        """How many of the drafts are expected to stand."""
        chance = self.control.chance(handle, kind)
        return sum(chance**place for place in range(1, len(token_ids) + 1))

    def _learn_time(self, name: str, seconds: float, num_places: int) -> None:
        self._model_s += seconds
        if num_places:
            known = self.place_s.get(name, seconds / num_places)
            self.place_s[name] = SMOOTH * known + (1 - SMOOTH) * seconds / num_places

    def _count(self, handle: int, kind: DraftKind, offered: int, stood: int) -> None:
        self.control.learn(handle, kind, offered, stood)
        self.total.add(offered, stood)
        self.tallies.setdefault(handle, Tally()).add(offered, stood)
        self.accepted_by_place += [0] * (offered - len(self.accepted_by_place))
        for place in range(stood):
            self.accepted_by_place[place] += 1
