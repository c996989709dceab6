"""Resident memory of every process of a run, sampled into the history."""

import asyncio
from contextlib import suppress

import psutil
import redis

from tests.chaos.cluster import Cluster
from tests.chaos.history import History

SAMPLE_EVERY_S = 4.0
MIB = 1 << 20


async def sample_memory(cluster: Cluster, history: History) -> None:
    """Until cancelled. A process counts from when it is ready: while it loads, it grows."""
    ready: set[int] = set()
    while True:
        for slot in cluster.slots:
            process = slot.process
            if process is not None and process.pid not in ready:
                with suppress(redis.RedisError, OSError):
                    if await cluster.is_live(slot) and slot.process is process:
                        ready.add(process.pid)
        history.write("memory", mib=memory_of(cluster, ready))
        await asyncio.sleep(SAMPLE_EVERY_S)


def helpers_of(parents: dict[int, int], pid: int) -> list[int]:
    """The processes below this one. parents: of every process, read once for all, which takes long."""
    own = [child for child, parent in parents.items() if parent == pid]
    return [*own, *(each for child in own for each in helpers_of(parents, child))]


def memory_of(cluster: Cluster, ready: set[int]) -> dict[str, float]:
    """MiB by process, `stage pid`, of those that are live, with their helpers'; Redis among them."""
    pids = {
        f"{slot.stage} {slot.process.pid}": slot.process.pid
        for slot in cluster.slots
        if slot.process is not None and slot.process.pid in ready
    }
    if cluster.store.process is not None:
        pids[f"redis {cluster.store.process.pid}"] = cluster.store.process.pid
    parents = {each.pid: each.info["ppid"] for each in psutil.process_iter(["ppid"])}
    found = {}
    for name, pid in pids.items():
        with suppress(psutil.Error):  # it has just died
            sizes = [psutil.Process(each).memory_info().rss for each in (pid, *helpers_of(parents, pid))]
            found[name] = round(sum(sizes) / MIB, 1)
    return found
