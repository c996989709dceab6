"""Blocks for tests of the cache's file, each a function of its number. Without torch: processes
that write at once begin quickly.
"""

import random

from services.compute.cache.kv_store import ENTRY, PAGE, WAYS, KVStore

BLOCK = 96  # bytes
SIZE = PAGE + 4 * WAYS * (BLOCK + ENTRY.size)  # four sets


def name_of(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def block_of(number: int) -> bytes:
    return random.Random(-number - 1).randbytes(BLOCK)


def read(store: KVStore, number: int) -> bytes | None:
    into = bytearray(BLOCK)
    return bytes(into) if store.read(name_of(number), memoryview(into)) else None


def write(store: KVStore, number: int) -> bool:
    return store.write(name_of(number), memoryview(block_of(number)))
