"""Admission: three strategies behind one interface, so that they can be compared on the same
memory.

`reserve` holds a sequence's longest possible length from the start, as servers did before paging.
`paged` gives blocks as they are needed and lets in whoever fits now; what runs later into a full
cache is preempted. `predicted`, the default, is paged as well, but lets a sequence in only if the
memory of all that would then run is expected to fit over their whole future. That expectation
follows "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025),
section 3: lengths come from the recent past, the peak of memory is sought over the future. The
paper draws lengths at random; here the distribution is used as it is.
"""

from collections.abc import Collection
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.output_lengths import OutputLengths
from services.compute.sequence import Sequence
from shared.model.arrays import Array

CONFIDENCE = 0.99  # asked of a predicted peak: with 0.95 more is preempted and no more is done
COHORT_EVERY = 16  # admissions between predictions that are followed up
MAX_COHORTS = 8  # followed up at a time


@dataclass(slots=True)
class Calibration:
    """How predicted peaks compare with what came. Totals."""

    num_predictions: int = 0
    num_exceeded: int = 0  # at a confidence c, about a share of 1 - c
    sum_of_ratios: float = 0.0  # real / predicted


class Admission(Protocol):
    """A strategy. `observe` comes once before any `admits` of a step; after each True the sequence
    begins."""

    preempts: bool  # what runs may have to give its place back

    @property
    def calibration(self) -> Calibration | None:
        """How its predictions compare with what came; None: it predicts nothing."""

    def observe(self, running: Collection[Sequence]) -> None:
        """Look at what runs."""

    def admits(self, sequence: Sequence, matched: list[int]) -> bool:
        """Whether the sequence may begin, with the blocks `matched` found in the prefix cache or
        with another."""

    def num_tokens_held(self, sequence: Sequence, num_tokens: int) -> int:
        """The tokens for which a sequence that begins takes blocks, when its first chunk ends at
        num_tokens."""

    def ended(self, sequence: Sequence, *, is_complete: bool) -> None:
        """A sequence has ended; is_complete: with its answer, not cancelled."""


class Reserve:
    """The longest a sequence can become, up front."""

    preempts = False
    calibration = None

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager

    def observe(self, running: Collection[Sequence]) -> None:
        pass

    def admits(self, sequence: Sequence, matched: list[int]) -> bool:
        return num_new_blocks(self.block_manager, sequence.max_num_tokens, matched) <= self.block_manager.num_free_blocks

    def num_tokens_held(self, sequence: Sequence, num_tokens: int) -> int:
        return max(num_tokens, sequence.max_num_tokens)

    def ended(self, sequence: Sequence, *, is_complete: bool) -> None:
        pass


class Paged:
    """Admits by the tokens that a sequence has now, with one spare block for each that runs, so
    that who begins is not preempted at the next border."""

    preempts = True
    calibration = None

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager
        self.num_running = 0

    def observe(self, running: Collection[Sequence]) -> None:
        self.num_running = len(running)

    def admits(self, sequence: Sequence, matched: list[int]) -> bool:
        needed = num_new_blocks(self.block_manager, min(len(sequence.tokens) + 1, sequence.max_num_tokens), matched)
        if self.num_running and needed + self.num_running > self.block_manager.num_free_blocks:
            return False
        self.num_running += 1
        return True

    def num_tokens_held(self, sequence: Sequence, num_tokens: int) -> int:  # noqa: ARG002
        return num_tokens

    def ended(self, sequence: Sequence, *, is_complete: bool) -> None:
        pass


@dataclass(slots=True)
class Cohort:
    """A prediction to be followed up: the sequences it was made for, by handle, as they were, and
    how much longer each came to be."""

    predicted_blocks: float
    members: dict[int, tuple[int, int, int]]  # num_tokens, num_output_tokens, num_shared_blocks
    num_remaining: dict[int, int]  # tokens, of those that have ended


class Predicted:
    """The peak of memory over the future of all that would run, at the asked confidence."""

    preempts = True

    def __init__(self, block_manager: BlockManager, *, confidence: float = CONFIDENCE) -> None:
        self.block_manager = block_manager
        self.lengths = OutputLengths()
        self.calibration = Calibration()
        self._z = NormalDist().inv_cdf(confidence)
        # tokens from now, from 0 up, ever further apart
        self._horizon = np.unique(np.geomspace(1, 1 << 24, 64).astype(np.int32)) - 1
        self._running: list[Sequence] = []
        self._num_fixed_blocks = 0.0  # held now by more than one, or by nobody who was counted
        self._blocks: tuple[Array, Array, Array] = self._future([])
        self._cohorts: list[Cohort] = []
        self._num_admitted = 0

    def observe(self, running: Collection[Sequence]) -> None:
        self._running = list(running)
        self.lengths.estimate([each.tokens.num_output for each in running])
        self._blocks = self._future(self._running)
        self._num_fixed_blocks = self.block_manager.num_used_blocks - sum(len(each.kv.block_table) - each.kv.num_shared_blocks for each in running)

    def admits(self, sequence: Sequence, matched: list[int]) -> bool:
        shared = sum(self.block_manager.ref_counts[block_id] > 0 for block_id in matched)
        mean, variance, most = (before + own for before, own in zip(self._blocks, self._future([sequence], shared), strict=True))
        peak = float(np.minimum(mean + self._z * np.sqrt(variance), most).max()) + self._num_fixed_blocks
        if self._running and peak > self.block_manager.num_blocks:
            return False
        self._blocks = mean, variance, most
        self._running.append(sequence)
        self._num_admitted += 1
        if self._num_admitted % COHORT_EVERY == 0 and len(self._cohorts) < MAX_COHORTS:
            members = {each.handle: (len(each.tokens), each.tokens.num_output, each.kv.num_shared_blocks) for each in self._running}
            members[sequence.handle] = (len(sequence.tokens), sequence.tokens.num_output, shared)
            self._cohorts.append(Cohort(peak - self._num_fixed_blocks, members, {}))
        return True

    def num_tokens_held(self, sequence: Sequence, num_tokens: int) -> int:  # noqa: ARG002
        return num_tokens

    def ended(self, sequence: Sequence, *, is_complete: bool) -> None:
        length = sequence.tokens.num_output
        if is_complete:
            self.lengths.add(length, ended_by_itself=length < (sequence.request.params.max_tokens or 0))
        for cohort in self._cohorts:
            if sequence.handle in cohort.members:
                cohort.num_remaining[sequence.handle] = length - cohort.members[sequence.handle][1]
        for cohort in [each for each in self._cohorts if len(each.num_remaining) == len(each.members)]:
            self._cohorts.remove(cohort)
            self._compare(cohort)

    def _future(self, sequences: list[Sequence], num_shared: int | None = None) -> tuple[Array, Array, Array]:
        """Mean, variance and largest number of the blocks that the sequences hold after each step
        of the horizon, each [H] float64.

        A sequence with g tokens of output is still there after t more with the probability P(length
        > g + t) / P(length > g), and then holds the blocks of t more tokens. num_shared: of the
        blocks that others hold; by default what each was begun with.
        """
        mean, variance, most = np.zeros((3, len(self._horizon)))
        if not sequences:
            return mean, variance, most
        now = np.array([len(each.tokens.ids) for each in sequences], np.int32)[:, None]
        outputs = now - np.array([each.tokens.num_prompt for each in sequences], np.int32)[:, None]
        # who asks for none holds its prompt all the same
        limits = np.array([max(each.request.params.max_tokens or 0, 1) for each in sequences], np.int32)[:, None]
        shared = np.array([each.kv.num_shared_blocks for each in sequences])[:, None] if num_shared is None else num_shared
        # of the horizon, until the last must have ended
        size = int(np.searchsorted(self._horizon, (limits - outputs).max()))
        horizon = self._horizon[:size]
        is_possible = horizon < limits - outputs
        alive = is_possible * (self.lengths.survival(outputs + horizon) / self.lengths.survival(outputs))
        blocks = (now + (horizon + self.block_manager.block_size - 1)) // self.block_manager.block_size - shared
        expected = alive * blocks
        mean[:size] = expected.sum(0)
        variance[:size] = np.einsum("sh,sh->h", expected, blocks - expected)
        most[:size] = np.einsum("sh,sh->h", is_possible, blocks)
        return mean, variance, most

    def _compare(self, cohort: Cohort) -> None:
        """The real peak comes when one of the sequences ends: all that lived longer had then grown
        as far as it had."""
        tokens, _, shared = np.array(list(cohort.members.values())).T
        remaining = np.array([cohort.num_remaining[handle] for handle in cohort.members])
        there = remaining[None, :] >= remaining[:, None]
        blocks = -(-(tokens[None, :] + remaining[:, None]) // self.block_manager.block_size) - shared[None, :]
        ratio = float((there * blocks).sum(1).max()) / cohort.predicted_blocks
        self.calibration.num_predictions += 1
        self.calibration.num_exceeded += ratio > 1.0
        self.calibration.sum_of_ratios += ratio


STRATEGIES = ("predicted", "paged", "reserve")


def make_admission(strategy: str, block_manager: BlockManager, *, confidence: float = CONFIDENCE) -> Admission:
    """Make one of STRATEGIES. confidence: of `predicted`."""
    if strategy == "predicted":
        return Predicted(block_manager, confidence=confidence)
    return Paged(block_manager) if strategy == "paged" else Reserve(block_manager)


def num_new_blocks(block_manager: BlockManager, num_tokens: int, matched: list[int]) -> int:
    """The free blocks that a sequence takes for num_tokens tokens: new ones, and cached ones that
    nobody holds."""
    held = sum(block_manager.ref_counts[block_id] > 0 for block_id in matched)
    return block_manager.num_blocks_for(num_tokens) - held
