"""How a group comes together: rank 0 starts the others, or all meet at --master."""

import os
import signal
import sys
from collections.abc import Sequence

from services.compute.ranks.group.cores import num_cores
from services.compute.ranks.group.ends import Group, Member
from services.compute.ranks.group.local import handle_of_this_process, join_parent, share_memory, start_ranks
from services.compute.ranks.group.remote import connect_to_first, gather_ranks
from shared.process.settings import ComputeSettings

COMMAND = (sys.executable, "-m", "services.compute")


def rank_of(settings: ComputeSettings) -> int:
    """This process's place in its group; 0 where it is alone."""
    handle = handle_of_this_process()
    return (settings.rank or 0) if handle is None else handle.rank


def open_group(settings: ComputeSettings, command: Sequence[str] = COMMAND) -> Group | None:
    """Rank 0's group, once all ranks are there; None: there is one rank only. command: runs a rank.
    Raises StartupError."""
    if settings.num_ranks == 1:
        return None
    if settings.master:
        return Group(settings, gather_ranks(settings), None, settings.num_threads or num_cores())
    memory_fd = share_memory()
    try:
        peers, num_threads = start_ranks(settings, command, memory_fd)
    except BaseException:
        os.close(memory_fd)
        raise
    return Group(settings, peers, memory_fd, num_threads)


def join_group(settings: ComputeSettings) -> Member:
    """Another rank's end of its group, once rank 0 is there. Raises StartupError."""
    handle = handle_of_this_process()
    if handle is not None:
        first = join_parent(settings, handle)
        return Member(settings, handle.rank, first, handle.memory, settings.num_threads)
    rank = rank_of(settings)
    member = Member(settings, rank, connect_to_first(settings, rank), None, settings.num_threads or num_cores())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: member.leave())
    return member
