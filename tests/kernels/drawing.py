"""A search that draws, as a device does it, where there is none: the next step can be launched on
its tokens before anybody has read them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.compute.backends.backend import RowSearch, SearchRequest
from services.compute.candidates.reduction import fill
from services.compute.candidates.rows import new_rows
from shared.model.arrays import Array
from shared.model.decision import Draws


@dataclass(frozen=True, slots=True)
class DrawnSearch:
    """Over, but for the reading."""

    found: tuple[Array, Array, Array]
    drawn: torch.Tensor

    def wait(self) -> None:
        pass

    def read(self) -> tuple[Array, Array, Array]:
        values, token_ids, masses = self.found
        return values.copy(), token_ids, masses

    def read_drawn(self) -> Array:
        drawn: Array = self.drawn.numpy()
        return drawn


@dataclass(slots=True)
class DrawingSearch:
    """Another's search, with draws of which some are wrong."""

    search: RowSearch
    rng: random.Random
    share_wrong: float
    num_drawn: int = 0
    num_wrong: int = 0

    def ban(self, logits: torch.Tensor, rows: Array, masks: Sequence[Array]) -> None:
        self.search.ban(logits, rows, masks)

    def start(self, logits: torch.Tensor, wanted: SearchRequest) -> DrawnSearch:
        search = DrawnSearch(self.search.start(logits, wanted).read(), torch.zeros(0))
        zeros = np.zeros(len(wanted.params), np.int32)
        rows = new_rows(zeros, wanted.positions, zeros)
        fill(rows, logits, wanted, search, self.search)
        drawn = rows.chosen.astype(np.int64)
        is_wrong = np.array([self.rng.random() < self.share_wrong for _ in drawn], bool)
        drawn[is_wrong] = (drawn[is_wrong] + self.rng.randrange(1, logits.shape[1])) % logits.shape[1]
        self.num_drawn += len(drawn)
        self.num_wrong += int(is_wrong.sum())
        return DrawnSearch(search.found, torch.from_numpy(drawn))

    def find_largest(self, logits: torch.Tensor, k: int) -> tuple[Array, Array]:
        return self.search.find_largest(logits, k)

    def total_masses(self, logits: torch.Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
        return self.search.total_masses(logits, rows, largest, temperatures)

    def decide(self, draws: Draws) -> Array:
        return self.search.decide(draws)
