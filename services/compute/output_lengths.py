"""OutputLengths: how long answers have been of late, and so how long one that runs will still be."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WINDOW = 1000  # answers remembered
LONGEST = 1.0  # answers assumed beside the seen ones, which run as long as they may


class OutputLengths:
    """The survival function P(length > x) of recent answers by Kaplan and Meier (1958), "Nonparametric estimation from incomplete observations".

    An answer that still runs, or that ended because it reached its max_tokens, is incomplete: all it says is that its length is beyond that.
    (Without those that run, the first to end, which are short, would speak for all.) LONGEST imagined answers that never end are
    counted in; so with no history every answer is expected to run to its max_tokens, and one longer than all that were seen as well.
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
        """Look at what was seen, and at the lengths so far of what runs."""
        count = len(self)
        if not count:
            return
        lengths = np.concatenate((self._lengths[:count], np.array(running, np.int64)))
        size = int(lengths.max()) + 1
        ends = np.bincount(self._lengths[:count][self._is_complete[:count]], minlength=size)
        left = np.bincount(lengths, minlength=size)  # out of sight, by whatever cause
        at_risk = len(lengths) + LONGEST - (np.cumsum(left) - left)
        self._survival = np.cumprod(1.0 - ends / at_risk)

    def survival(self, lengths: Array) -> Array:
        """P(length > x) for each x of `lengths` (integers, any shape), as of the last estimate. Never 0."""
        values: Array = self._survival[np.minimum(lengths, len(self._survival) - 1)]
        return values
