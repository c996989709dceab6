"""Resident memory of every process of a run, sampled into the history."""

import asyncio

import psutil

from tests.chaos.cluster import Cluster
from tests.chaos.history import History

SAMPLE_EVERY_S = 3.0
MIB = 1 << 20


async def sample_memory(cluster: Cluster, history: History) -> None:
    """Until cancelled."""
    while True:
        history.write("memory", mib=memory_of(cluster))
        await asyncio.sleep(SAMPLE_EVERY_S)


def memory_of(cluster: Cluster) -> dict[str, float]:
    """MiB by process, `stage pid`, of those that are live, with their helpers'; Redis among them."""
    pids = {f"{slot.stage} {slot.process.pid}": slot.process.pid for slot in cluster.slots if slot.process is not None and slot.is_alive}
    if cluster.store.process is not None:
        pids[f"redis {cluster.store.process.pid}"] = cluster.store.process.pid
    found = {}
    for name, pid in pids.items():
        try:
            process = psutil.Process(pid)
            found[name] = round(sum(each.memory_info().rss for each in (process, *process.children(recursive=True))) / MIB, 1)
        except psutil.Error:  # it has just died
            continue
    return found
