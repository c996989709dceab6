"""Large buffers of the host: KV caches and packed weights; and giving memory back."""

import ctypes
import mmap
import os

import torch

from shared.process.host_memory import allocation_failed


def mapped_zeros(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 at the beginning of a page. The system provides pages when they are first
    written, large ones where it can: weights and caches are read from all over, and each page of 4
    KiB would need an entry of the TLB."""
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise allocation_failed(num_bytes) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def shared_memory(fd: int, num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 of a file that other processes map, too; zeros at first. A page takes memory
    when it is written."""
    os.ftruncate(fd, num_bytes)
    return torch.frombuffer(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED), dtype=torch.uint8)


def give_back_free_memory() -> None:
    """Return freed memory from malloc to the system. Between the tensors that stay, those that a layer
    needed while it was loaded leave holes that the next layer's don't fit in: half a gigabyte of a
    gigabyte's model."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc
        library.malloc_trim(0)
