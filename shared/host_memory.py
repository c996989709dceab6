"""How much memory a process could still take on this machine, or in its container."""

from pathlib import Path

import psutil

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")  # a container sees its own limits here


def free_host_memory() -> int:
    """Bytes."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used, details = ((CGROUP / name).read_text() for name in ("memory.max", "memory.current", "memory.stat"))
    except OSError:  # no cgroups here, or an older kind
        return available
    if limit.strip() == "max":
        return available
    droppable = int(dict(line.split() for line in details.splitlines())["inactive_file"])  # files read once, as weights are
    return min(available, int(limit) - int(used) + droppable)
