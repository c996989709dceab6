"""Cores for the ranks of one host: each has its own, so that no two wait for one."""

import os
from pathlib import Path

NODES, CPUS = Path("/sys/devices/system/node"), Path("/sys/devices/system/cpu")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divide_cores(num_ranks: int) -> list[frozenset[int]]:
    """The cores of each rank: disjoint, adjacent, and of one NUMA node where the nodes are
    enough. Empty sets: there are fewer cores than ranks, or this system pins nothing."""
    if not hasattr(os, "sched_setaffinity"):
        return [frozenset()] * num_ranks
    return divide(
        os.sched_getaffinity(0),
        num_ranks,
        _numbers(NODES, "node*/cpulist"),
        _numbers(CPUS, "cpu*/topology/thread_siblings_list"),
    )


def divide(cores: set[int], num_ranks: int, nodes: list[list[int]], siblings: list[list[int]]) -> list[frozenset[int]]:
    """nodes, siblings: the cores of each NUMA node, and the threads of each core of the machine."""
    if len(cores) < num_ranks:
        return [frozenset()] * num_ranks
    node_of = {core: number for number, each in enumerate(nodes) for core in each}
    first_of = {core: threads[0] for threads in siblings for core in threads}
    ordered = sorted(cores, key=lambda core: (node_of.get(core, 0), first_of.get(core, core), core))
    each, more = divmod(len(ordered), num_ranks)
    stops = [rank * each + min(rank, more) for rank in range(num_ranks + 1)]
    return [frozenset(ordered[first:last]) for first, last in zip(stops[:-1], stops[1:], strict=True)]


def pin(cores: frozenset[int]) -> None:
    """Keep this thread, and those that it starts from now on, on these cores."""
    if cores:
        os.sched_setaffinity(0, cores)


def _numbers(folder: Path, pattern: str) -> list[list[int]]:
    """The lists of numbers in these files, each once; none where there is no such folder."""
    texts = {path.read_text().strip() for path in folder.glob(pattern)}
    return sorted(numbers for text in texts if (numbers := parse_numbers(text)))


def parse_numbers(text: str) -> list[int]:
    """The numbers of a list as Linux writes it: 0-3,8."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
