"""ModelRunner: a ScheduledBatch becomes tensors, runs through the model, and comes back as logits."""

import torch

from services.compute.batch import ScheduledBatch, ScheduledSequence
from services.compute.kv_cache import KVCache
from services.compute.models.decoder import DecodeGroup, Decoder, ForwardBatch, PrefillChunk


class ModelRunner:
    def __init__(self, model: Decoder, kv_cache: KVCache, device: torch.device) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.device = device

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run one step. Returns the logits [len(batch.sampled), vocab_size] float32, in that order."""
        return self.model.forward(self.prepare(batch), self.kv_cache.tensor)

    def prepare(self, batch: ScheduledBatch) -> ForwardBatch:
        """Single-token sequences come first in a ScheduledBatch; here they are sorted further into groups of similar length."""
        block_size = self.kv_cache.block_size
        input_ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        prefill_chunks = []
        sampled_rows: dict[int, int] = {}  # by handle
        decodes, chunks = split(batch, block_size)
        for scheduled in (*decodes, *chunks):
            sequence = scheduled.sequence
            first, last = sequence.num_computed_tokens, sequence.num_computed_tokens + scheduled.num_scheduled_tokens
            start = len(input_ids)
            input_ids.extend(sequence.token_ids[first:last])
            positions.extend(range(first, last))
            slot_mapping.extend(sequence.block_table[position // block_size] * block_size + position % block_size for position in range(first, last))
            if scheduled.num_scheduled_tokens > 1:
                blocks = sequence.block_table[: -(-last // block_size)]
                prefill_chunks.append(PrefillChunk(slice(start, len(input_ids)), self._tensor(blocks), last))
            if scheduled.is_sampled:
                sampled_rows[sequence.handle] = len(input_ids) - 1
        return ForwardBatch(
            input_ids=self._tensor(input_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slot_mapping),
            decode_groups=self._decode_groups(decodes),
            prefill_chunks=prefill_chunks,
            sampled_rows=self._tensor([sampled_rows[sequence.handle] for sequence in batch.sampled]),
        )

    def _decode_groups(self, decodes: list[ScheduledSequence]) -> list[DecodeGroup]:
        """One group for each power of two of blocks, so that at most half of what a group reads is padding."""
        groups = []
        start = 0
        while start < len(decodes):
            size = _size_class(decodes[start], self.kv_cache.block_size)
            end = start
            while end < len(decodes) and _size_class(decodes[end], self.kv_cache.block_size) == size:
                end += 1
            context_lens = [scheduled.sequence.num_computed_tokens + 1 for scheduled in decodes[start:end]]
            num_blocks = -(-max(context_lens) // self.kv_cache.block_size)
            tables = [scheduled.sequence.block_table[:num_blocks] for scheduled in decodes[start:end]]
            padded = [table + [0] * (num_blocks - len(table)) for table in tables]
            groups.append(DecodeGroup(slice(start, end), self._tensor(padded), self._tensor(context_lens)))
            start = end
        return groups

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def split(batch: ScheduledBatch, block_size: int) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
    """The single tokens, sorted by size class, and the longer chunks."""
    decodes = [scheduled for scheduled in batch.sequences if scheduled.num_scheduled_tokens == 1]
    decodes.sort(key=lambda scheduled: _size_class(scheduled, block_size))
    return decodes, [scheduled for scheduled in batch.sequences if scheduled.num_scheduled_tokens > 1]


def _size_class(scheduled: ScheduledSequence, block_size: int) -> int:
    return (scheduled.sequence.num_computed_tokens // block_size).bit_length()
