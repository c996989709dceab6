"""KVTier: the prefix cache's second tier, copies of blocks in a file.

Every block that the prefix cache is offered is also written to the file, once it is computed. Before
a sequence begins, the blocks that it lacks are read back, and are in the prefix cache then like any
others.
"""

import time
from collections.abc import Iterable

from services.compute.cache.block_manager import BlockManager
from services.compute.cache.stored_cache import BlockStore
from services.compute.sequence import Sequence

READ_BUDGET_S = 0.02  # of one step: the running sequences wait for it
READ_AT_ONCE = 8  # blocks
SMOOTHING = 0.2  # weight of the last read in the measured time of one
TRY_EVERY = 32  # sequences between two tries, while computing seems to be faster than reading


class KVTier:
    """Its methods are for the loop's thread only."""

    def __init__(self, stored: BlockStore, block_manager: BlockManager) -> None:
        self.stored = stored
        self.blocks = block_manager
        self.blocks.fresh = []
        self.num_tokens_read = 0  # found in the file
        self._block_read_s: float | None = None  # measured
        self._num_passed_over = 0  # sequences that were not looked up, because computing is faster
        # the handle of the sequence that is being restored, and names that the file does not have
        self._in_vain: tuple[int, set[bytes]] = -1, set()

    def save(self) -> None:
        """After a step: save the blocks that the prefix cache was offered since the last call, if they are
        still in it."""
        fresh, self.blocks.fresh = self.blocks.fresh or [], []
        cached = [(name, block_id) for name, block_id in fresh if self.blocks.block_hashes[block_id] == name]
        if not cached or self.stored.is_broken:
            return
        self.stored.save([name for name, _ in cached], [block_id for _, block_id in cached])

    def restore(self, sequences: Iterable[Sequence], token_s: float | None) -> bool:
        """Before a step: read the blocks that these sequences lack, which may begin in the step; for a bounded
        time. token_s: seconds that computing a token takes; None before they are measured. Returns whether
        all are restored; the others are read before the next step."""
        until = time.perf_counter() + READ_BUDGET_S
        for sequence in sequences:
            if not sequence.kv.is_restored:
                sequence.kv.is_restored = (
                    self.stored.is_broken or not self._is_worth_it(token_s) or self._restore(sequence, until)
                )
            if not sequence.kv.is_restored:
                return False
        return True

    def figures(self) -> dict[str, float]:
        """The tier's figures in Load."""
        return {
            "kv_disk_tokens": self.num_tokens_read,
            "kv_disk_blocks_written": self.stored.num_written,
            "kv_disk_blocks_dropped": self.stored.num_dropped,
            "kv_disk_passed_over": self._num_passed_over,
        }

    def close(self) -> None:
        """Write what is staged, and end. Called once."""
        self.stored.close()

    def _is_worth_it(self, token_s: float | None) -> bool:
        """Whether reading a block is faster than computing it."""
        if token_s is None or self._block_read_s is None or self._block_read_s < token_s * self.blocks.block_size:
            return True
        self._num_passed_over += 1
        return self._num_passed_over % TRY_EVERY == 0

    def _restore(self, sequence: Sequence, until: float) -> bool:
        """Read the sequence's blocks that are missing in memory, of each segment up to the first that the file
        lacks, too. Returns whether it has read all of these."""
        started_at: float | None = None
        if self._in_vain[0] != sequence.handle:
            self._in_vain = sequence.handle, set()
        lacking = self._in_vain[1]
        for names in self.blocks.missing(sequence):
            for first in range(0, len(names), READ_AT_ONCE) if names[0] not in lacking else ():
                if started_at is not None and time.perf_counter() >= until:
                    return False
                asked = names[first : first + READ_AT_ONCE]
                started_at = time.perf_counter()
                num_read = self._read(sequence, asked)
                if num_read:
                    seconds = self.stored.read_s / num_read  # without steps that other ranks compute first
                    self._block_read_s = (
                        seconds
                        if self._block_read_s is None
                        else self._block_read_s + SMOOTHING * (seconds - self._block_read_s)
                    )
                    self.num_tokens_read += num_read * self.blocks.block_size
                if num_read < len(asked):
                    lacking.add(asked[num_read])
                    break
        self._in_vain = -1, set()
        return True

    def _read(self, sequence: Sequence, names: list[bytes]) -> int:
        """Read these blocks of the sequence into the cache, up to the first that is not there. Returns
        how many."""
        num_read = self.stored.find(names)
        if num_read:
            self.stored.load([self.blocks.adopt(sequence, name) for name in names[:num_read]])
        return num_read
