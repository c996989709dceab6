"""A rank of a group, without a model: `python -m tests.stages.group_rank`.

Rank 0 obeys its standard input, a word a line: `step` sends a batch to all and prints their answers,
`hang` has rank 1 wait for ever, `break` has it raise an error, `trip` has it do so a second later,
`sleep` has this process wait in native code for ever, `close` ends the group. The others answer each
batch with what they find in the memory of all.
"""

import ctypes
import mmap
import os
import sys
import time

from services.compute.ranks.group.commands import Loaded, RunStep
from services.compute.ranks.group.ends import Group, Member, join_group, open_group, rank_of
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings, load_settings
from shared.wire.stage import run_stage, start_logging

COMMAND = (sys.executable, "-m", "tests.stages.group_rank")
WORD = b"what rank 0 wrote"
STEP, HANG, BREAK = (
    ScheduledBatch((BatchRow(1, (5, 6), 0, (0,), range(1, 2)),), 0),
    ScheduledBatch((), 0),
    ScheduledBatch((), 1),
)
TRIP = ScheduledBatch((), 2)
STEP_TIMEOUT_S = float(os.environ.get("GROUP_STEP_TIMEOUT_S", "60"))


def loaded(rank: int) -> Loaded:
    """GROUP_FAILS names a rank that can't load, GROUP_OTHER one that has another model."""
    if os.environ.get("GROUP_FAILS") == str(rank):
        raise StartupError("the weights are too large")
    return Loaded("fp_other" if os.environ.get("GROUP_OTHER") == str(rank) else "fp_same", "avx512vnni")


def lead(group: Group) -> None:
    group.identify(loaded(0))
    if group.memory_fd is not None:
        os.ftruncate(group.memory_fd, 4096)
        with mmap.mmap(group.memory_fd, 4096) as memory:
            memory[: len(WORD)] = WORD
    print("ready", *(peer.pid for peer in group.peers), group.num_threads, flush=True)
    for line in sys.stdin:
        match line.strip():
            case "step":
                group.send(RunStep(0, STEP))
                print("stepped", *(group.receive(peer.rank).arithmetic for peer in group.peers), flush=True)
            case "hang":
                group.send(RunStep(0, HANG))
            case "break":
                group.send(RunStep(0, BREAK))
            case "trip":
                group.send(RunStep(0, TRIP))
            case "sleep":
                ctypes.CDLL(None).sleep(600)
            case "close":
                group.close()
                return


def follow(member: Member) -> None:
    member.identify(loaded(member.rank))
    for command in member.commands(STEP_TIMEOUT_S):
        if command == RunStep(0, HANG):
            if member.rank == 1:
                ctypes.CDLL(None).sleep(600)
            continue
        if command in (RunStep(0, BREAK), RunStep(0, TRIP)):
            if member.rank == 1:
                time.sleep(1.0 if command == RunStep(0, TRIP) else 0.0)
                raise RuntimeError("a mistake")
            continue
        assert command == RunStep(0, STEP)
        word = b"nothing"
        if member.memory_fd is not None:
            with mmap.mmap(member.memory_fd, 4096) as memory:
                word = memory[: len(WORD)]
        member.answer(Loaded(str(member.rank), word.decode().replace(" ", "_")))


def main() -> None:
    settings = load_settings(ComputeSettings)
    rank = rank_of(settings)
    start_logging(settings, rank)
    time.sleep(float(os.environ.get("GROUP_LATE_S", "0")))
    if rank:
        with join_group(settings) as member:
            follow(member)
    elif (group := open_group(settings, COMMAND)) is not None:
        with group:
            lead(group)


if __name__ == "__main__":
    run_stage(main)
