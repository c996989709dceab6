"""Margins: by how much the logits of a draft would have to be others for another token.

A draft and its target draw with the same noise. So the token that wins by a wide margin in the one
mostly wins in the other. How often is measured: each chain that is computed says which of its drafts
stood.
"""

from bisect import bisect_right

import numpy as np

from services.compute.candidates.draw import draws_of
from services.compute.candidates.reduction import Reduction
from services.compute.candidates.rows import CandidateRows
from shared.model.arrays import Array
from shared.model.decision import weigh

BORDERS = (0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # of levels, in logits
NUM_LEVELS = len(BORDERS) + 1
# that a draft stands, before anything is known; it weighs as much as so many drafts
EXPECTED = (0.5, 0.55, 0.6, 0.7, 0.8, 0.85, 0.92, 0.97)
WEIGHT = 8.0
MEMORY = 512.0  # drafts of a level that count; older ones fade


class Margins:
    """How often a draft stands, by the level of its margin."""

    def __init__(self) -> None:
        self._stood = [WEIGHT * share for share in EXPECTED]
        self._tried = [WEIGHT] * NUM_LEVELS

    def level_of(self, margin: float) -> int:
        return bisect_right(BORDERS, margin)

    def chance(self, level: int) -> float:
        """The probability that a draft of this level stands, if those before it do."""
        return self._stood[level] / self._tried[level]

    def learn(self, levels: list[int], num_stood: int) -> None:
        """The first num_stood drafts of a chain stood, and the one behind them did not. What is
        behind that was never tried."""
        for number, level in enumerate(levels[: num_stood + 1]):
            if self._tried[level] >= MEMORY:
                self._stood[level] /= 2
                self._tried[level] /= 2
            self._tried[level] += 1
            self._stood[level] += number < num_stood


def margins_of(reduction: Reduction, rows: CandidateRows) -> list[float]:
    """The margin of each row's token, in logits at temperature 1: the gap to the runner-up, with the
    noise. Where a row of the reduction has failed, 0 for all."""
    wanted = reduction.wanted
    margins = np.zeros(len(rows.handles))
    if len(wanted.params) != len(margins):
        return margins.tolist()
    is_greedy = np.array([each.is_greedy for each in wanted.params], bool)
    greedy, random = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)
    if len(greedy):
        some = reduction.logits if len(greedy) == len(margins) else reduction.logits[greedy]
        margins[greedy] = gaps(reduction.search.find_largest(some, 2)[0])
    if len(random):
        draws = draws_of(rows, wanted).only(random)
        shifted, u = weigh(draws)
        margins[random] = draws.temperatures * gaps(shifted - np.log(-np.log(u)))
    return margins.tolist()


def gaps(values: Array) -> Array:
    """Between the largest of each row [R, K] and its second largest."""
    largest = np.partition(values, -2, axis=1)[:, -2:].astype(np.float64)
    found: Array = largest[:, 1] - largest[:, 0]
    return found
