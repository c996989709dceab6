"""How much memory a process can still take on this machine or in its container, and an error for
too little."""

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from shared.process.errors import StartupError

GIB = 1 << 30
UNITS = ("bytes", "KiB", "MiB", "GiB")
CGROUP = Path("/sys/fs/cgroup")  # a container sees its own limits here


def size_text(num_bytes: float) -> str:
    """The size as people write it: 1.5 GiB, 32 KiB, 1024 GiB."""
    power = min(max(int(num_bytes), 1).bit_length() - 1, 39) // 10
    number = num_bytes / (1 << 10 * power)
    return f"{number:.3g} {UNITS[power]}" if number < 100 else f"{number:.0f} {UNITS[power]}"


# errors of torch, numpy, C++ and the loader of shared objects, and the size that they requested
TOO_LITTLE = re.compile(r"(?:can't|cannot|unable to) (?:allocate|mmap)|bad_alloc|failed to map segment", re.IGNORECASE)
ASKED_UNITS = (*UNITS, "TiB", "PiB")
ASKED = re.compile(rf"allocate ([\d.]+) ({'|'.join(ASKED_UNITS)})")


@contextmanager
def enough_memory(name: str, advice: str) -> Iterator[None]:
    """Make any failed allocation inside a StartupError of one line: a new start would fail, too. name:
    of what needs the memory; advice: what to set."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StartupError) or not is_out_of_memory(error):
            raise
        asked = ASKED.search(str(error))
        wanted = (
            f"{size_text(float(asked[1]) * 1024 ** ASKED_UNITS.index(asked[2]))} more were asked for, and "
            if asked
            else ""
        )
        raise StartupError(
            f"{name}: too little memory: {wanted}{size_text(free_host_memory())} are free for this process. {advice}"
        ) from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error says that the system refused memory."""
    is_refused = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return is_refused or TOO_LITTLE.search(str(error)) is not None


def allocation_failed(num_bytes: int) -> MemoryError:
    """The error for memory that the system did not give."""
    return MemoryError(f"can't allocate {num_bytes} bytes")


def total_host_memory() -> int:
    """The memory of this machine or its container, in bytes."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def free_host_memory() -> int:
    """The memory that this process can still take, in bytes."""
    available = int(psutil.virtual_memory().available)
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)  # ulimit -v
    if limit_bytes != resource.RLIM_INFINITY:
        available = min(available, max(0, limit_bytes - psutil.Process().memory_info().vms))
    try:
        limit, used, details = ((CGROUP / name).read_text() for name in ("memory.max", "memory.current", "memory.stat"))
    except OSError:  # no cgroups here, or an older kind
        return available
    if limit.strip() == "max":
        return available
    # the page cache of files that were read once, such as weights
    droppable = int(dict(line.split() for line in details.splitlines())["inactive_file"])
    return min(available, int(limit) - int(used) + droppable)
