"""Executor: what runs the steps that the loop schedules.

It gets a ScheduledBatch, frozen and without a tensor, which may be copied or sent. So an executor
can be this process's ModelRunner, or one rank of several that all get the same batch.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from services.compute.backends.backend import RowSearch
from services.compute.sequence import RowKey
from services.compute.sequence.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The tokens that a step in flight draws. They are on the device, and the host does not know
    them yet."""

    token_ids: torch.Tensor  # [R] int64
    rows: dict[RowKey, int]  # which of them each token is


class Executor(Protocol):
    """Steps are run one after the other, and what is asked of one is asked before the next runs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def row_search(self) -> RowSearch:
        """Begins the searches through the logits that it gives."""
        ...

    def run(self, batch: ScheduledBatch, drawn: DrawnTokens | None = None) -> Any:
        """Run one step up to the head. drawn: has the tokens that are PENDING in the batch. Returns
        what the methods below take as `hidden`."""
        ...

    def logits(self, batch: ScheduledBatch, hidden: Any, keys: Container[RowKey] | None = None) -> torch.Tensor:
        """Logits of the sampled rows, [len(batch.sampled), vocab_size] float32, in that order; good
        until the head runs again. keys: of the rows that are still wanted, where some are not."""
        ...

    def sampled_states(self, batch: ScheduledBatch, hidden: Any, keys: Container[RowKey] | None = None) -> torch.Tensor:
        """The last hidden states of the sampled rows, as `logits` has them: [R, hidden] float32."""
        ...

    def tapped_states(self, batch: ScheduledBatch, hidden: Any, rows: Sequence[int]) -> torch.Tensor:
        """The inputs of the model's tapped layers, for some of the batch's tokens, by
        their places in it: [rows, layers * hidden] in the model's dtype, a copy."""
        ...

    def prompt_logits(self, batch: ScheduledBatch, hidden: Any) -> Iterator[torch.Tensor]:
        """Logits of the rows that predict the batch's target_ids, in their order, slice by slice,
        [n, vocab_size] float32, each good until the next."""
        ...

    def pooled_states(self, batch: ScheduledBatch, hidden: Any) -> torch.Tensor:
        """The last hidden states of the rows' pooled tokens, in their order, [R, hidden] float32,
        on the host."""
        ...
