"""Admission of sequences: three strategies behind one interface, so that they can be compared on the same
memory.

`reserve` holds a sequence's longest possible length from the start, as servers did before paging.
`paged` gives blocks as they are needed and admits every sequence that fits now; if the cache becomes
full, sequences are preempted. `predicted`, the default, is paged as well, but admits a sequence only if
the memory of all that would then run is expected to fit over their whole future. That expectation
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
from services.compute.sequence import Sequence
from shared.model.arrays import Array

CONFIDENCE = 0.99  # of a predicted peak: with 0.95 more sequences are preempted, and the throughput is the same
COHORT_EVERY = 16  # admissions between predictions that are followed up
MAX_COHORTS = 8  # followed up at a time
WINDOW = 1000  # answers that are remembered
USUAL, USUAL_WEIGHT = 512.0, 2.0  # tokens; the assumption weighs as much as so many answers


@dataclass(slots=True)
class PredictedPeaks:
    """How predicted peaks of memory compare with the real ones. Totals."""

    num_predictions: int = 0
    num_exceeded: int = 0  # at a confidence c, about a share of 1 - c
    sum_of_ratios: float = 0.0  # real / predicted


class AdmissionStrategy(Protocol):
    """`observe` comes once before any `admits` of a step; after each True the sequence begins."""

    preempts: bool  # a running sequence may have to give its place back

    @property
    def peaks(self) -> PredictedPeaks | None:
        """How its predictions compare with the real peaks; None if it predicts none."""

    def observe(self, running: Collection[Sequence]) -> None:
        """Take in the sequences that run."""

    def admits(self, sequence: Sequence, matched: list[int]) -> bool:
        """Whether the sequence may begin, with the matched blocks of the prefix cache or of a sequence of
        the same prompt."""

    def num_tokens_held(self, sequence: Sequence, num_tokens: int) -> int:
        """The tokens for which a sequence that begins takes blocks, when its first chunk ends at
        num_tokens."""

    def ended(self, sequence: Sequence, *, is_complete: bool) -> None:
        """A sequence has ended; is_complete: with its answer, not cancelled."""


class OutputLengths:
    """The survival function P(length > x) of recent answers by Kaplan and Meier (1958),
    "Nonparametric estimation from incomplete observations".

    An answer that still runs, or that ended because it reached its max_tokens, is incomplete: its
    length is beyond that. (Without those that run, the first to end, which are short, would stand for
    all.) Where there are few observations, at the beginning and beyond the longest answer, answers are
    assumed to end at a constant rate, 1 / USUAL a token, mixed in as Hjort's beta process does (1990,
    "Nonparametric Bayes estimators based on beta processes in models for life history data").
    """

    def __init__(self) -> None:
        self._lengths = np.zeros(WINDOW, np.int64)
        self._is_complete = np.zeros(WINDOW, np.bool_)
        self._num_seen = 0
        self._survival: Array = np.ones(1)

    def __len__(self) -> int:
        return min(self._num_seen, WINDOW)

    def add(self, length: int, *, ended_by_itself: bool) -> None:
        at = self._num_seen % WINDOW
        self._lengths[at], self._is_complete[at] = length, ended_by_itself
        self._num_seen += 1

    def estimate(self, running: list[int]) -> None:
        """Estimate the survival function from recent answers, and from the lengths so far of those that run."""
        count = len(self)
        if not count:
            return
        lengths = np.concatenate((self._lengths[:count], np.array(running, np.int64)))
        size = int(lengths.max()) + 1
        ends = np.bincount(self._lengths[:count][self._is_complete[:count]], minlength=size)
        left = np.bincount(lengths, minlength=size)  # that end, or are observed no further
        at_risk = len(lengths) - (np.cumsum(left) - left)
        self._survival = np.cumprod(1.0 - (ends + USUAL_WEIGHT / USUAL) / (at_risk + USUAL_WEIGHT))

    def survival(self, lengths: Array) -> Array:
        """P(length > x) for each x of `lengths` (integers, any shape), as of the last estimate.
        Never 0."""
        last = len(self._survival) - 1
        values: Array = self._survival[np.minimum(lengths, last)] * np.exp(np.minimum(last - lengths, 0) / USUAL)
        return values


class Reserve:
    """The longest a sequence can become, up front."""

    preempts = False
    peaks = None

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager

    def observe(self, running: Collection[Sequence]) -> None:
        pass

    def admits(self, sequence: Sequence, matched: list[int]) -> bool:
        return (
            num_new_blocks(self.block_manager, sequence.max_num_tokens, matched) <= self.block_manager.num_free_blocks
        )

    def num_tokens_held(self, sequence: Sequence, num_tokens: int) -> int:
        return max(num_tokens, sequence.max_num_tokens)

    def ended(self, sequence: Sequence, *, is_complete: bool) -> None:
        pass


class Paged:
    """Admits by the tokens that a sequence has now, with one spare block for each that runs, so that a
    sequence that begins is not preempted at the next border."""

    preempts = True
    peaks = None

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
    """A prediction that is followed up: the sequences that it was made for, by handle, as they were, and
    how much longer each became."""

    predicted_blocks: float
    members: dict[int, tuple[int, int, int]]  # num_tokens, num_output_tokens, num_shared_blocks
    num_remaining: dict[int, int]  # tokens, of those that have ended


class Predicted:
    """The peak of memory over the future of all that would run, at the asked confidence."""

    preempts = True

    def __init__(self, block_manager: BlockManager, *, confidence: float = CONFIDENCE) -> None:
        self.block_manager = block_manager
        self.lengths = OutputLengths()
        self.peaks = PredictedPeaks()
        self._z = NormalDist().inv_cdf(confidence)
        # tokens from now, from 0 up, ever further apart
        self._horizon = np.unique(np.geomspace(1, 1 << 24, 64).astype(np.int32)) - 1
        self._running: list[Sequence] = []
        self._num_fixed_blocks = 0.0  # held now by several sequences, or by none that was counted
        self._blocks: tuple[Array, Array, Array] = self._future([])
        self._cohorts: list[Cohort] = []
        self._num_admitted = 0

    def observe(self, running: Collection[Sequence]) -> None:
        self._running = list(running)
        self.lengths.estimate([sequence.tokens.num_output for sequence in running])
        self._blocks = self._future(self._running)
        self._num_fixed_blocks = self.block_manager.num_used_blocks - sum(
            len(sequence.kv.block_table) - sequence.kv.num_shared_blocks for sequence in running
        )

    def admits(self, sequence: Sequence, matched: list[int]) -> bool:
        shared = sum(self.block_manager.ref_counts[block_id] > 0 for block_id in matched)
        mean, variance, largest = (
            before + own for before, own in zip(self._blocks, self._future([sequence], shared), strict=True)
        )
        peak = float(np.minimum(mean + self._z * np.sqrt(variance), largest).max()) + self._num_fixed_blocks
        if self._running and peak > self.block_manager.num_blocks:
            return False
        self._blocks = mean, variance, largest
        self._running.append(sequence)
        self._num_admitted += 1
        if self._num_admitted % COHORT_EVERY == 0 and len(self._cohorts) < MAX_COHORTS:
            members = {
                other.handle: (len(other.tokens), other.tokens.num_output, other.kv.num_shared_blocks)
                for other in self._running
            }
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
        for cohort in [cohort for cohort in self._cohorts if len(cohort.num_remaining) == len(cohort.members)]:
            self._cohorts.remove(cohort)
            self._compare(cohort)

    def _future(self, sequences: list[Sequence], num_shared: int | None = None) -> tuple[Array, Array, Array]:
        """Mean, variance and largest number of the blocks that the sequences hold after each step
        of the horizon, each [H] float64.

        A sequence with g tokens of output is still there after t more with the probability P(length
        > g + t) / P(length > g), and then holds the blocks of t more tokens. num_shared: of the
        blocks that others hold; by default what each was begun with.
        """
        mean, variance, largest = np.zeros((3, len(self._horizon)))
        if not sequences:
            return mean, variance, largest
        now = np.array([len(sequence.tokens.ids) for sequence in sequences], np.int32)[:, None]
        outputs = now - np.array([sequence.tokens.num_prompt for sequence in sequences], np.int32)[:, None]
        # a request for no tokens holds its prompt all the same
        limits = np.array([max(sequence.request.params.max_tokens or 0, 1) for sequence in sequences], np.int32)[
            :, None
        ]
        shared = (
            np.array([sequence.kv.num_shared_blocks for sequence in sequences])[:, None]
            if num_shared is None
            else num_shared
        )
        # of the horizon, until the last must have ended
        size = int(np.searchsorted(self._horizon, (limits - outputs).max()))
        horizon = self._horizon[:size]
        is_possible = horizon < limits - outputs
        alive = is_possible * (self.lengths.survival(outputs + horizon) / self.lengths.survival(outputs))
        blocks = (now + (horizon + self.block_manager.block_size - 1)) // self.block_manager.block_size - shared
        expected = alive * blocks
        mean[:size] = expected.sum(0)
        variance[:size] = np.einsum("sh,sh->h", expected, blocks - expected)
        largest[:size] = np.einsum("sh,sh->h", is_possible, blocks)
        return mean, variance, largest

    def _compare(self, cohort: Cohort) -> None:
        """The real peak comes when one of the sequences ends: all that lived longer had then grown as far as
        it had."""
        tokens, _, shared = np.array(list(cohort.members.values())).T
        remaining = np.array([cohort.num_remaining[handle] for handle in cohort.members])
        there = remaining[None, :] >= remaining[:, None]
        blocks = -(-(tokens[None, :] + remaining[:, None]) // self.block_manager.block_size) - shared[None, :]
        ratio = float((there * blocks).sum(1).max()) / cohort.predicted_blocks
        self.peaks.num_predictions += 1
        self.peaks.num_exceeded += ratio > 1.0
        self.peaks.sum_of_ratios += ratio


STRATEGIES = ("predicted", "paged", "reserve")


def make_admission(strategy: str, block_manager: BlockManager, *, confidence: float = CONFIDENCE) -> AdmissionStrategy:
    """Make one of STRATEGIES. confidence: of `predicted`."""
    if strategy == "predicted":
        return Predicted(block_manager, confidence=confidence)
    return Paged(block_manager) if strategy == "paged" else Reserve(block_manager)


def num_new_blocks(block_manager: BlockManager, num_tokens: int, matched: list[int]) -> int:
    """The free blocks that a sequence takes for num_tokens tokens: new ones, and cached ones that no
    sequence holds."""
    held = sum(block_manager.ref_counts[block_id] > 0 for block_id in matched)
    return block_manager.num_blocks_for(num_tokens) - held
