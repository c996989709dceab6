"""StoredCache: a KV cache with a KVStore, which keeps copies of some of its blocks. A thread of its own writes
them, so that no step waits for a disk."""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from services.compute.cache.kv_cache import KVCache
from services.compute.cache.kv_store import KVStore
from shared.model.arrays import Array
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

STAGED_BYTES = 64 << 20  # that wait to be written; further blocks are dropped
STOP_TIMEOUT_S = 5.0


class BlockStore(Protocol):
    """The copies of a replica's blocks, whose cache is in this process or on several ranks."""

    @property
    def num_written(self) -> int:
        """Blocks, by now."""
        ...

    @property
    def num_dropped(self) -> int:
        """Blocks that were not written, because too many waited."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether the disk had an error, and is not used any more."""
        ...

    def save(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Copy blocks out of the cache, to be written under these names."""
        ...

    @property
    def read_s(self) -> float:
        """How long the last find read, s."""
        ...

    def find(self, names: Sequence[bytes]) -> int:
        """Read the blocks of these names, up to the first that is not there. Returns how many."""
        ...

    def load(self, block_ids: Sequence[int]) -> None:
        """Copy the first of those that were found last into these blocks of the cache."""
        ...

    def close(self) -> None:
        """Write what is staged, and end. Called once."""
        ...


class StoredCache:
    """The BlockStore of this process' cache. Its methods are for one thread only."""

    def __init__(self, store: KVStore, kv_cache: KVCache) -> None:
        self.store = store
        self.kv_cache = kv_cache
        self.num_written = self.num_dropped = 0
        self.is_broken = False
        self.read_s = 0.0
        self._found = np.empty((0, store.block_bytes), np.uint8)
        self._staged_bytes = 0
        self._staged: queue.Queue[tuple[Sequence[bytes], Array] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write_staged, name="kv-disk", daemon=True)
        self._thread.start()

    def save(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        if self.is_broken:
            return
        num_bytes = len(names) * self.store.block_bytes
        with self._lock:
            if self._staged_bytes + num_bytes > STAGED_BYTES:
                self.num_dropped += len(names)
                return
            self._staged_bytes += num_bytes
        self._staged.put((names, self.kv_cache.read_blocks(block_ids)))

    def has(self, name: bytes) -> bool:
        """Whether a block seems to be there."""
        try:
            return not self.is_broken and self.store.has(name)
        except OSError as error:
            self._give_up(error)
            return False

    def find(self, names: Sequence[bytes]) -> int:
        self._found = np.empty((len(names), self.store.block_bytes), np.uint8)
        num_read, started_at = 0, time.perf_counter()
        try:
            while (
                not self.is_broken
                and num_read < len(names)
                and self.store.read(names[num_read], memoryview(self._found[num_read]))
            ):
                num_read += 1
        except OSError as error:
            self._give_up(error)
        self.read_s = time.perf_counter() - started_at
        return num_read

    def load(self, block_ids: Sequence[int]) -> None:
        self.kv_cache.write_blocks(block_ids, self._found[: len(block_ids)])

    def close(self) -> None:
        self._staged.put(None)
        self._thread.join(STOP_TIMEOUT_S)

    def _write_staged(self) -> None:
        while (item := self._staged.get()) is not None:
            names, data = item
            try:
                for name, block in zip(names, data, strict=True):
                    if not self.is_broken:
                        self.num_written += self.store.write(name, memoryview(block))
            except OSError as error:
                self._give_up(error)
            with self._lock:
                self._staged_bytes -= data.nbytes

    def _give_up(self, error: OSError) -> None:
        if not self.is_broken:
            log.error("--kv-disk is not used any longer", file=self.store.path, error=error.strerror)
        self.is_broken = True


class NothingStored:
    """The BlockStore of a rank without KV heads, which caches nothing."""

    num_written = num_dropped = 0
    is_broken = False
    read_s = 0.0

    def save(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        pass

    def find(self, names: Sequence[bytes]) -> int:
        return len(names)

    def load(self, block_ids: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass
