"""Faults of the ranks of a group: a rank that rank 0 started dies, or is stopped for shorter or for
longer than the group waits for it.
"""

import asyncio
import random
import signal
import time
from contextlib import suppress

import psutil

from tests.chaos.arena import Arena
from tests.chaos.cluster import Slot

ENDS_WITHIN_S = (
    40.0  # after the time-out of a group whose rank is stopped: another fault may have stopped rank 0 meanwhile
)


async def kill_rank(arena: Arena, rng: random.Random) -> None:
    """SIGKILL to a rank, whatever the group does just then."""
    slot = rng.choice(arena.cluster.of("compute"))
    if ranks := arena.cluster.ranks_of(slot):
        slot.is_rank_hit = True
        with suppress(psutil.NoSuchProcess):
            rng.choice(ranks).kill()


async def stop_rank(arena: Arena, rng: random.Random) -> None:
    """SIGSTOP to a rank of a group that serves. It goes on well before the group gives it up: then so does
    the group. Or it does not, and the group must end.
    """
    slot, timeout_s = rng.choice(arena.cluster.of("compute")), arena.cluster.options.group_timeout_s
    is_long, share = rng.random() < 0.5, rng.random()
    process, ranks = slot.process, arena.cluster.ranks_of(slot)
    if process is None or not ranks or slot.stopped_since is not None or not await arena.cluster.is_live(slot):
        return
    rank = rng.choice(ranks)
    with suppress(psutil.NoSuchProcess):
        if rank.status() == psutil.STATUS_STOPPED:  # another fault of this kind will have it go on
            return
        slot.is_rank_hit |= is_long
        rank.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(timeout_s * share / 2)
            if is_long and not await ends(slot, process.pid, timeout_s + ENDS_WITHIN_S):
                arena.history.find(f"stop-rank: {slot.name} serves on, though its rank {rank.pid} is stopped")
        finally:
            rank.send_signal(signal.SIGCONT)


async def ends(slot: Slot, pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while slot.is_alive and slot.process is not None and slot.process.pid == pid:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True
