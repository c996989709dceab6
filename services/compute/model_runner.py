"""ModelRunner: a ScheduledBatch becomes tensors, runs through the model, and comes back as logits."""

from typing import Protocol

import torch

from services.compute.batch import ScheduledBatch
from services.compute.cache.kv_cache import CacheShape, KVCache
from services.compute.models.decoder import ForwardBatch


class ModelShape(CacheShape, Protocol):
    @property
    def vocab_size(self) -> int: ...


class Model(Protocol):
    """What runs a step: our own Decoder, or transformers' modules."""

    @property
    def config(self) -> ModelShape: ...

    @property
    def implementation(self) -> str:
        """For the log."""
        ...

    def forward(self, batch: ForwardBatch, kv_layers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Write the step's K and V to KVCache.layers, and return the logits of the sampled rows, [R, vocab] float32, good until the next call."""
        ...


class ModelRunner:
    def __init__(self, model: Model, kv_cache: KVCache, device: torch.device) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.device = device

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run one step. Returns the logits [len(batch.sampled), vocab_size] float32, in that order."""
        if batch.block_copies:
            self._copy_blocks(batch.block_copies)
        return self.model.forward(self.prepare(batch), self.kv_cache.layers)

    def prepare(self, batch: ScheduledBatch) -> ForwardBatch:
        """The batch's tokens in its own order: decodes, then chunks."""
        block_size = self.kv_cache.block_size
        input_ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        sampled_rows: list[int] = []
        for row in batch.rows:
            table, first, last = row.block_table, row.num_computed_tokens, row.num_context_tokens
            input_ids.extend(row.token_ids)
            positions.extend(range(first, last))
            slot_mapping.extend([table[position // block_size] * block_size + position % block_size for position in range(first, last)])
            if row.is_sampled:
                sampled_rows.append(len(input_ids) - 1)
        return ForwardBatch(
            input_ids=self._tensor(input_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slot_mapping),
            query_lens=[row.num_tokens for row in batch.rows],
            context_lens=[row.num_context_tokens for row in batch.rows],
            block_tables=[row.block_table for row in batch.rows],
            sampled_rows=self._tensor(sampled_rows),
        )

    def _copy_blocks(self, block_copies: tuple[tuple[int, int], ...]) -> None:
        """All are read before any is written: a block that is copied from may be copied to as well."""
        sources, targets = zip(*block_copies, strict=True)
        self.kv_cache.tensor[:, :, self._tensor(list(targets))] = self.kv_cache.tensor[:, :, self._tensor(list(sources))]

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
