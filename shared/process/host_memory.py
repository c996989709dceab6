"""How much memory a process could still take on this machine, or in its container."""

from pathlib import Path

import psutil

GIB = 1 << 30
UNITS = ("bytes", "KiB", "MiB", "GiB")
CGROUP = Path("/sys/fs/cgroup")  # a container sees its own limits here


def size_text(num_bytes: float) -> str:
    """The size as people write it: 1.5 GiB, 32 KiB, 1024 GiB."""
    power = min(max(int(num_bytes), 1).bit_length() - 1, 39) // 10
    number = num_bytes / (1 << 10 * power)
    return f"{number:.3g} {UNITS[power]}" if number < 100 else f"{number:.0f} {UNITS[power]}"


def total_host_memory() -> int:
    """Bytes, of this machine or its container."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def free_host_memory() -> int:
    """Bytes."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used, details = ((CGROUP / name).read_text() for name in ("memory.max", "memory.current", "memory.stat"))
    except OSError:  # no cgroups here, or an older kind
        return available
    if limit.strip() == "max":
        return available
    # files read once, as weights are
    droppable = int(dict(line.split() for line in details.splitlines())["inactive_file"])
    return min(available, int(limit) - int(used) + droppable)
