"""A row of logits in order, as far as somebody looks: which token stands at a place, and the mass
up to there.

What has to be sorted is sorted without its token ids, many times faster, and a token is then found
by its value. Equal logits stand in the order of their ids.
"""

from collections.abc import Callable

import numpy as np
import torch

from services.compute.candidates.truncation import cumulative_mass
from shared.model.arrays import Array

# temperatures below the largest: beyond the first lies a token's weight of e^-8
REACHES = (8.0, 20.0, float("inf"))


class SortedHead:
    """A row's largest logits in order, those within `reach` temperatures of the largest: `values`
    falling, and `mass`, what they sum up to."""

    def __init__(self, row: Array, temperature: float, reach: float) -> None:
        self._row = row
        possible = row > -np.inf  # the others are banned
        self._rising = np.sort(row[possible & (row >= row.max() - np.float32(reach * temperature))])
        self._num_possible = int(np.count_nonzero(possible))
        self.values = self._rising[::-1]
        self.mass = cumulative_mass(self.values[None, :], np.array([temperature]))[0]

    @property
    def is_whole(self) -> bool:
        """Whether no token of the row that may be drawn is missing."""
        return len(self._rising) == self._num_possible

    def token_at(self, place: int) -> int:
        """The id of the token at a place of the order."""
        value = self.values[place]
        num_larger = len(self._rising) - int(np.searchsorted(self._rising, value, side="right"))
        return int(np.flatnonzero(self._row == value)[place - num_larger])


def sort_until(row: torch.Tensor, temperature: float, is_enough: Callable[[SortedHead], bool]) -> SortedHead:
    """Sort as long a head of the row as it takes, or the whole row."""
    numbers = row.cpu().numpy()
    for reach in REACHES:
        head = SortedHead(numbers, temperature, reach)
        if head.is_whole or is_enough(head):
            break
    return head
