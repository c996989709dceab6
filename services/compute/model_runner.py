"""ModelRunner: a ScheduledBatch becomes tensors, runs through the model, and comes back as logits."""

import torch

from services.compute.batch import ScheduledBatch
from services.compute.kv_cache import KVCache
from services.compute.models.decoder import DecodeGroup, Decoder, ForwardBatch, PrefillChunk
from services.compute.sequence import Sequence


class ModelRunner:
    def __init__(self, model: Decoder, kv_cache: KVCache, device: torch.device) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.device = device

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run one step. Returns the logits [len(batch.sampled), vocab_size] float32, in that order."""
        if batch.block_copies:
            self._copy_blocks(batch.block_copies)
        return self.model.forward(self.prepare(batch), self.kv_cache.tensor)

    def prepare(self, batch: ScheduledBatch) -> ForwardBatch:
        """Decodes come first in a ScheduledBatch; here they are sorted further, into groups of similar length."""
        block_size = self.kv_cache.block_size
        order = sorted(range(len(batch.decodes)), key=lambda row: _size_class(batch.decodes[row], block_size))
        decodes = [batch.decodes[row] for row in order]
        positions = [sequence.num_computed_tokens for sequence in decodes]
        input_ids = [sequence.token_ids[position] for sequence, position in zip(decodes, positions, strict=True)]
        slot_mapping = [
            sequence.block_table[position // block_size] * block_size + position % block_size for sequence, position in zip(decodes, positions, strict=True)
        ]
        sampled_rows = [0] * len(decodes)
        for place, row in enumerate(order):
            sampled_rows[row] = place
        prefill_chunks = []
        for chunk in batch.chunks:
            sequence, start = chunk.sequence, len(input_ids)
            first, last = sequence.num_computed_tokens, sequence.num_computed_tokens + chunk.num_tokens
            input_ids.extend(sequence.token_ids[first:last])
            positions.extend(range(first, last))
            slot_mapping.extend(sequence.block_table[position // block_size] * block_size + position % block_size for position in range(first, last))
            prefill_chunks.append(PrefillChunk(slice(start, len(input_ids)), self._tensor(sequence.block_table[: -(-last // block_size)]), last))
            if chunk.is_last:
                sampled_rows.append(len(input_ids) - 1)
        return ForwardBatch(
            input_ids=self._tensor(input_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slot_mapping),
            decode_groups=self._decode_groups(decodes),
            prefill_chunks=prefill_chunks,
            sampled_rows=self._tensor(sampled_rows),
        )

    def _copy_blocks(self, block_copies: list[tuple[int, int]]) -> None:
        """All are read before any is written: a block that is copied from may be copied to as well."""
        sources, targets = zip(*block_copies, strict=True)
        self.kv_cache.tensor[:, :, self._tensor(list(targets))] = self.kv_cache.tensor[:, :, self._tensor(list(sources))]

    def _decode_groups(self, decodes: list[Sequence]) -> list[DecodeGroup]:
        """One group for each power of two of blocks, so that at most half of what a group reads is padding."""
        groups = []
        start = 0
        while start < len(decodes):
            size = _size_class(decodes[start], self.kv_cache.block_size)
            end = start
            while end < len(decodes) and _size_class(decodes[end], self.kv_cache.block_size) == size:
                end += 1
            context_lens = [sequence.num_computed_tokens + 1 for sequence in decodes[start:end]]
            num_blocks = -(-max(context_lens) // self.kv_cache.block_size)
            tables = [sequence.block_table[:num_blocks] for sequence in decodes[start:end]]
            padded = [table + [0] * (num_blocks - len(table)) for table in tables]
            groups.append(DecodeGroup(slice(start, end), self._tensor(padded), self._tensor(context_lens)))
            start = end
        return groups

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _size_class(sequence: Sequence, block_size: int) -> int:
    return (sequence.num_computed_tokens // block_size).bit_length()
