"""KVTier: the prefix cache's second tier, a KVStore beside the KV cache.

Every block that the prefix cache is offered is also written to the file, by a thread of its own: the
loop copies the block out of the cache once it is computed. Before a sequence begins, the blocks that
it lacks are read back, and are in the prefix cache then like any others.
"""

import queue
import threading
import time
from collections.abc import Iterable

import numpy as np

from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import KVCache
from services.compute.cache.kv_store import KVStore
from services.compute.sequence import Sequence
from shared.model.arrays import Array
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

STAGED_BYTES = 64 << 20  # that wait to be written; what comes meanwhile is left out
READ_BUDGET_S = 0.02  # of one step: others wait for it
READ_AT_ONCE = 8  # blocks
SMOOTHING = 0.2  # weight of the last read in the measured time of one
TRY_EVERY = 32  # sequences, while computing seems to be faster than reading: is it still?
STOP_TIMEOUT_S = 5.0


class KVTier:
    """Its methods are for the loop's thread only."""

    def __init__(self, store: KVStore, block_manager: BlockManager, kv_cache: KVCache) -> None:
        self.store = store
        self.blocks = block_manager
        self.kv_cache = kv_cache
        self.blocks.fresh = []
        self.num_tokens_read = 0  # found in the file
        self.num_blocks_written = self.num_blocks_dropped = 0
        self._block_read_s: float | None = None  # measured
        self._num_passed_over = 0  # sequences that were not looked up, for computing is faster
        # of the sequence that is being restored: its handle, and names that the file did not have
        self._in_vain: tuple[int, set[bytes]] = -1, set()
        self._staged_bytes = 0
        self._staged: queue.Queue[tuple[list[bytes], Array] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._is_broken = False
        self._thread = threading.Thread(target=self._write_staged, name="kv-disk", daemon=True)
        self._thread.start()

    def save(self) -> None:
        """After a step: hand on the blocks that the prefix cache was offered since the last call, if
        they still are in it."""
        fresh, self.blocks.fresh = self.blocks.fresh or [], []
        found = [(name, block_id) for name, block_id in fresh if self.blocks.block_hashes[block_id] == name]
        if not found or self._is_broken:
            return
        num_bytes = len(found) * self.store.block_bytes
        with self._lock:
            if self._staged_bytes + num_bytes > STAGED_BYTES:
                self.num_blocks_dropped += len(found)
                return
            self._staged_bytes += num_bytes
        self._staged.put(([name for name, _ in found], self.kv_cache.read_blocks([block_id for _, block_id in found])))

    def restore(self, sequences: Iterable[Sequence], token_s: float | None) -> bool:
        """Before a step: read the blocks that these sequences, which may begin in it, lack; for a
        bounded time. token_s: seconds that computing a token takes, if they were measured. Returns
        whether all are restored; the others' turn comes before the next step."""
        until = time.perf_counter() + READ_BUDGET_S
        for sequence in sequences:
            if not sequence.is_restored:
                sequence.is_restored = self._is_broken or not self._is_worth_it(token_s) or self._restore(sequence, until)
            if not sequence.is_restored:
                return False
        return True

    def figures(self) -> dict[str, float]:
        """The tier's figures in Load."""
        return {
            "kv_disk_tokens": self.num_tokens_read,
            "kv_disk_blocks_written": self.num_blocks_written,
            "kv_disk_blocks_dropped": self.num_blocks_dropped,
            "kv_disk_passed_over": self._num_passed_over,
        }

    def close(self) -> None:
        """Write what is staged, and end. Called once."""
        self._staged.put(None)
        self._thread.join(STOP_TIMEOUT_S)

    def _is_worth_it(self, token_s: float | None) -> bool:
        """Whether reading a block is faster than computing it."""
        if token_s is None or self._block_read_s is None or self._block_read_s < token_s * self.blocks.block_size:
            return True
        self._num_passed_over += 1
        return self._num_passed_over % TRY_EVERY == 0

    def _restore(self, sequence: Sequence, until: float) -> bool:
        """Read the sequence's blocks that are missing in memory, of each segment up to the first that
        the file lacks, too. Returns whether that is all that can be done."""
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
                    seconds = (time.perf_counter() - started_at) / num_read
                    self._block_read_s = seconds if self._block_read_s is None else self._block_read_s + SMOOTHING * (seconds - self._block_read_s)
                    self.num_tokens_read += num_read * self.blocks.block_size
                if num_read < len(asked):
                    lacking.add(asked[num_read])
                    break
        self._in_vain = -1, set()
        return True

    def _read(self, sequence: Sequence, names: list[bytes]) -> int:
        """Read these blocks of the sequence into the cache, up to the first that is not there. Returns
        how many."""
        data = np.empty((len(names), self.store.block_bytes), np.uint8)
        num_read = 0
        try:
            while num_read < len(names) and self.store.read(names[num_read], memoryview(data[num_read])):
                num_read += 1
        except OSError as error:
            self._give_up(error)
        if num_read:
            self.kv_cache.write_blocks([self.blocks.adopt(sequence, name) for name in names[:num_read]], data[:num_read])
        return num_read

    def _write_staged(self) -> None:
        while (item := self._staged.get()) is not None:
            names, data = item
            try:
                for name, block in zip(names, data, strict=True):
                    if not self._is_broken:
                        self.num_blocks_written += self.store.write(name, memoryview(block))
            except OSError as error:
                self._give_up(error)
            with self._lock:
                self._staged_bytes -= data.nbytes

    def _give_up(self, error: OSError) -> None:
        if not self._is_broken:
            log.error("--kv-disk is not used any longer", file=self.store.path, error=error.strerror)
        self._is_broken = True
