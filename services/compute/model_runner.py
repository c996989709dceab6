"""ModelRunner: a ScheduledBatch becomes tensors, runs through the model, and comes back as logits."""

import torch

from services.compute.batch import ScheduledBatch
from services.compute.cache.kv_cache import KVCache
from services.compute.models.decoder import Decoder, ForwardBatch


class ModelRunner:
    def __init__(self, model: Decoder, kv_cache: KVCache, device: torch.device) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.device = device

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
        for sequence in batch.decodes:
            position = sequence.num_computed_tokens
            input_ids.append(sequence.token_ids[position])
            positions.append(position)
            slot_mapping.append(sequence.block_table[position // block_size] * block_size + position % block_size)
        sampled_rows = list(range(len(batch.decodes)))
        for chunk in batch.chunks:
            sequence, first, last = chunk.sequence, chunk.sequence.num_computed_tokens, chunk.sequence.num_computed_tokens + chunk.num_tokens
            input_ids.extend(sequence.token_ids[first:last])
            positions.extend(range(first, last))
            slot_mapping.extend(sequence.block_table[position // block_size] * block_size + position % block_size for position in range(first, last))
            if chunk.is_last:
                sampled_rows.append(len(input_ids) - 1)
        sequences = batch.decodes + [chunk.sequence for chunk in batch.chunks]
        query_lens = [1] * len(batch.decodes) + [chunk.num_tokens for chunk in batch.chunks]
        return ForwardBatch(
            input_ids=self._tensor(input_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slot_mapping),
            query_lens=query_lens,
            context_lens=[sequence.num_computed_tokens + length for sequence, length in zip(sequences, query_lens, strict=True)],
            block_tables=[sequence.block_table for sequence in sequences],
            sampled_rows=self._tensor(sampled_rows),
        )

    def _copy_blocks(self, block_copies: list[tuple[int, int]]) -> None:
        """All are read before any is written: a block that is copied from may be copied to as well."""
        sources, targets = zip(*block_copies, strict=True)
        self.kv_cache.tensor[:, :, self._tensor(list(targets))] = self.kv_cache.tensor[:, :, self._tensor(list(sources))]

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
