"""OutputLengths: how long answers have been of late, and so how long one that runs will still be."""

from collections import deque
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WINDOW = 1000  # answers remembered
REFRESH = 16  # answers until the estimate is made anew
LONGEST = 1.0  # answers assumed beside the seen ones, which run as long as they may


class OutputLengths:
    """The survival function P(length > x) of recent answers by Kaplan and Meier (1958), "Nonparametric estimation from incomplete observations".

    An answer that ended because it reached its max_tokens is incomplete: all it says is that its length would have been at least that. LONGEST
    imagined answers that never end are counted in; so with no history every answer is expected to run to its max_tokens, and one
    that is longer than all that were seen as well.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[int, bool]] = deque(maxlen=WINDOW)  # length, and whether it ended by itself
        self._num_new = 0
        self._survival: Array = np.ones(1)

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, length: int, *, ended_by_itself: bool) -> None:
        self._ended.append((length, ended_by_itself))
        self._num_new += 1

    def survival(self, lengths: Array) -> Array:
        """P(length > x) for each x of `lengths` (integers, any shape). Never 0."""
        if self._num_new >= min(REFRESH, len(self._ended)) > 0:
            self._survival = self._estimate()
            self._num_new = 0
        values: Array = self._survival[np.minimum(lengths, len(self._survival) - 1)]
        return values

    def _estimate(self) -> Array:
        lengths = np.array([length for length, _ in self._ended])
        ended = np.array([by_itself for _, by_itself in self._ended])
        size = int(lengths.max()) + 1
        deaths = np.bincount(lengths[ended], minlength=size)
        left = np.bincount(lengths, minlength=size)  # by whatever cause
        at_risk = len(lengths) + LONGEST - (np.cumsum(left) - left)
        survival: Array = np.cumprod(1.0 - deaths / at_risk)
        return survival
