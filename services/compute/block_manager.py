"""BlockManager: which sequence has which blocks of the KV cache. The tensors are kv_cache.py's."""

from collections import deque

from services.compute.sequence import Sequence


class BlockManager:
    """A pool of num_blocks blocks of block_size tokens. A block is either free or in exactly one block table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_block_ids: deque[int] = deque(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """The blocks to be added before the sequence's first num_tokens tokens fit."""
        return max(0, self.num_blocks_for(num_tokens) - len(sequence.block_table))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for its first num_tokens tokens, all or none. Returns whether there were enough."""
        missing = self.num_missing_blocks(sequence, num_tokens)
        if missing > self.num_free_blocks:
            return False
        sequence.block_table.extend(self.free_block_ids.popleft() for _ in range(missing))
        return True

    def free(self, sequence: Sequence) -> None:
        """Take all of the sequence's blocks back."""
        self.free_block_ids.extend(reversed(sequence.block_table))
        sequence.block_table.clear()
