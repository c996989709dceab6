"""A search that draws, as a device does it, where there is none: the next step can be launched on its tokens before anybody has read them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.compute.backends.backend import RowSearch, SearchRequest, SearchResult
from services.compute.candidates.draw import draw
from shared.model.arrays import Array
from shared.model.decision import Draws, pick


@dataclass(frozen=True, slots=True)
class DrawnSearch:
    """Over, but for the reading."""

    found: SearchResult
    drawn: torch.Tensor

    def wait(self) -> None:
        pass

    def read(self) -> SearchResult:
        return replace(self.found, values=self.found.values.copy())

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
        found = self.search.start(logits, wanted).read()
        drawn = draw_all(logits, wanted, found, self.search)
        is_wrong = np.array([self.rng.random() < self.share_wrong for _ in drawn], bool)
        drawn[is_wrong] = (drawn[is_wrong] + self.rng.randrange(1, logits.shape[1])) % logits.shape[1]
        self.num_drawn += len(drawn)
        self.num_wrong += int(is_wrong.sum())
        return DrawnSearch(found, torch.from_numpy(drawn))

    def find_largest(self, logits: torch.Tensor, k: int) -> tuple[Array, Array]:
        return self.search.find_largest(logits, k)

    def total_masses(self, logits: torch.Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
        return self.search.total_masses(logits, rows, largest, temperatures)

    def decide(self, draws: Draws) -> Array:
        return self.search.decide(draws)


def draw_all(logits: torch.Tensor, wanted: SearchRequest, found: SearchResult, search: RowSearch) -> Array:
    """The rows' tokens, [R] int64, as the host draws them."""
    values = np.where(np.arange(found.values.shape[1]) < wanted.num_listed[:, None], found.values, np.float32(-np.inf))
    counts = (values > -np.inf).sum(axis=1).astype(np.int32)
    is_whole = (counts < wanted.num_listed) | (counts == logits.shape[1])
    drawn = draw(logits, wanted, values, found.token_ids, counts, is_whole, found.whole_masses, search)
    return pick(drawn.columns, counts, found.token_ids, drawn.tail_token_ids, drawn.tail_token_ids).astype(np.int64)
