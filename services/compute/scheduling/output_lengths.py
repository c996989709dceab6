"""OutputLengths: how long answers have been of late, and so how long one that runs will still
be."""

import numpy as np

from shared.model.arrays import Array

WINDOW = 1000  # answers remembered
USUAL, USUAL_WEIGHT = 512.0, 2.0  # tokens; how many seen answers the assumption weighs as much as


class OutputLengths:
    """The survival function P(length > x) of recent answers by Kaplan and Meier (1958),
    "Nonparametric estimation from incomplete observations".

    An answer that still runs, or that ended because it reached its max_tokens, is incomplete: all
    it says is that its length is beyond that. (Without those that run, the first to end, which are
    short, would speak for all.) Where little was seen, at the beginning and beyond the longest,
    answers are assumed to end at a constant rate, 1 / USUAL a token, mixed in as Hjort's beta
    process does (1990, "Nonparametric Bayes estimators based on beta processes in models for life
    history data").
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
        at_risk = len(lengths) - (np.cumsum(left) - left)
        self._survival = np.cumprod(1.0 - (ends + USUAL_WEIGHT / USUAL) / (at_risk + USUAL_WEIGHT))

    def survival(self, lengths: Array) -> Array:
        """P(length > x) for each x of `lengths` (integers, any shape), as of the last estimate.
        Never 0."""
        last = len(self._survival) - 1
        values: Array = self._survival[np.minimum(lengths, last)] * np.exp(np.minimum(last - lengths, 0) / USUAL)
        return values
