"""KVStore: blocks of keys and values in a file, by their hashes.

By batch invariance a block's bytes follow from its hash (block_manager.py). So any process may write
a block, and any other read it: the replicas of a host that name one folder share the file, and a
restarted one finds what it wrote before.

The file is like a processor's cache. A hash says in which set its block may stand, a set has WAYS
places, and the place that was used longest ago goes first. So nothing has to be counted, locked or
read at the start. A place has an entry of 64 bytes with the hash, the time of its last use and a
checksum of the block; entries come first in the file, then the blocks. A block that was written in
part, by two at once, or changed on the disk does not match its checksum, and counts as not there.
"""

import os
import struct
import time
from pathlib import Path

import xxhash

from shared.process.errors import StartupError
from shared.process.host_memory import size_text

VERSION = 1
MAGIC = b"PenstockKV"
HEADER = struct.Struct("<10sHQQ")  # magic, version, bytes of a block, sets
ENTRY = struct.Struct("<16s16sQ24x")  # hash, checksum, time of the last use in ns
WAYS = 16  # places of a set
PAGE = 4096
LARGEST = 1 << 56  # bytes of a file
NOBODY = bytes(16)
TOUCH_NS = 1_000_000_000  # a use is written down if the one before is longer ago


class KVStore:
    """One file. All methods may be called by several threads, and processes."""

    def __init__(self, folder: Path, size: int, block_bytes: int, part: str = "") -> None:
        """size: bytes that the file may take; block_bytes: of every block; part: names the part
        of the layers and heads that blocks hold, which has a file of its own. Raises StartupError."""
        self.block_bytes = block_bytes
        self.num_sets = (size - PAGE) // (WAYS * (block_bytes + ENTRY.size))
        if size > LARGEST:
            raise StartupError(f"--kv-disk: at most {size_text(LARGEST)}, not {size_text(size)}")
        if self.num_sets < 1:
            raise StartupError(
                f"--kv-disk: {size_text(size)} hold not even one set of {WAYS} blocks of {size_text(block_bytes)}"
            )
        self.path = folder / f"kv-{block_bytes}{part}.{VERSION}"
        self._blocks_at = PAGE + -(-self.num_sets * WAYS * ENTRY.size // PAGE) * PAGE
        try:
            if folder.exists() and not folder.is_dir():
                raise StartupError(f"--kv-disk: {folder} is not a folder")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._begin()
        except OSError as error:
            raise StartupError(f"--kv-disk: {self.path}: {error.strerror}") from None

    def _begin(self) -> None:
        """A file of another size or form is emptied: its blocks would stand elsewhere."""
        header = HEADER.pack(MAGIC, VERSION, self.block_bytes, self.num_sets)
        if os.pread(self._file, HEADER.size, 0) != header:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, header, 0)
        os.ftruncate(self._file, self._blocks_at + self.num_sets * WAYS * self.block_bytes)

    @property
    def num_blocks(self) -> int:
        """The most that it holds."""
        return self.num_sets * WAYS

    def has(self, block_hash: bytes) -> bool:
        """Whether the block seems to be there. Raises OSError."""
        return self._find(block_hash) is not None

    def read(self, block_hash: bytes, into: memoryview) -> bool:
        """Read a block, block_bytes bytes. Returns whether it is there, and whole. Raises OSError."""
        entry = self._find(block_hash)
        if entry is None:
            return False
        place, checksum, used_at = entry
        num_bytes = os.preadv(self._file, [into], self._blocks_at + place * self.block_bytes)
        if num_bytes != self.block_bytes or xxhash.xxh3_128_digest(into) != checksum:
            self._write_entry(place, NOBODY, NOBODY, 0)
            return False
        if (now := time.time_ns()) - used_at > TOUCH_NS:
            self._write_entry(place, block_hash, checksum, now)
        return True

    def write(self, block_hash: bytes, block: memoryview) -> bool:
        """Write a block, unless it is there. Returns whether it was written. Raises OSError."""
        entries = self._entries(block_hash)
        if any(entry[0] == block_hash for entry in entries):
            return False
        way = min(range(WAYS), key=lambda number: entries[number][2])
        place = self._set_of(block_hash) * WAYS + way
        self._write_entry(place, NOBODY, NOBODY, time.time_ns())  # nobody takes what is not whole for the old block
        os.pwrite(self._file, block, self._blocks_at + place * self.block_bytes)
        self._write_entry(place, block_hash, xxhash.xxh3_128_digest(block), time.time_ns())
        return True

    def close(self) -> None:
        os.close(self._file)

    def _set_of(self, block_hash: bytes) -> int:
        return int.from_bytes(block_hash[:8], "little") % self.num_sets

    def _entries(self, block_hash: bytes) -> list[tuple[bytes, bytes, int]]:
        """Hash, checksum and last use of the places of its set."""
        size = WAYS * ENTRY.size
        return list(
            ENTRY.iter_unpack(os.pread(self._file, size, PAGE + self._set_of(block_hash) * size).ljust(size, b"\0"))
        )

    def _find(self, block_hash: bytes) -> tuple[int, bytes, int] | None:
        """The block's place, checksum and last use."""
        for way, (name, checksum, used_at) in enumerate(self._entries(block_hash)):
            if name == block_hash:
                return self._set_of(block_hash) * WAYS + way, checksum, used_at
        return None

    def _write_entry(self, place: int, block_hash: bytes, checksum: bytes, used_at: int) -> None:
        os.pwrite(self._file, ENTRY.pack(block_hash, checksum, used_at), PAGE + place * ENTRY.size)
