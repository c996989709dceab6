"""Ranks on one host: rank 0 starts the others as its own processes.

Each gets two socket pairs and a descriptor of the memory that all share. None outlives rank 0: it
sees a connection end, and Linux kills it.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from services.compute.ranks.group.channel import Channel
from services.compute.ranks.group.cores import divide_cores, num_cores, pin
from services.compute.ranks.group.identity import Hello, answer_hello, hear_hello, hello_of, refuse, say_hello
from services.compute.ranks.group.peer import Peer, name_of
from services.compute.ranks.group.watch import STARTUP_ERROR
from shared.process.errors import Invalid, StartupError, Unready
from shared.process.settings import ComputeSettings
from shared.process.stage_settings import environment_of
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

HANDLE = "PENSTOCK_GROUP_HANDLE"  # in the environment of a rank that rank 0 started: a Handle, as JSON
PARENT_DEATH_SIGNAL = 1  # prctl(2): PR_SET_PDEATHSIG
LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Handle:
    """A rank that rank 0 starts gets this."""

    rank: int
    first: int  # rank 0's pid
    commands: int  # descriptors: of its end of the connection for commands,
    watch: int  # of that for signs of life,
    memory: int  # and of the memory of all ranks
    cores: tuple[int, ...]  # that it keeps to; none: it is not pinned


def handle_of_this_process() -> Handle | None:
    """None: rank 0 did not start it."""
    text = os.environ.get(HANDLE)
    if text is None:
        return None
    values = json.loads(text)
    return Handle(**values | {"cores": tuple(values["cores"])})


def share_memory() -> int:
    """A descriptor of memory without a name, of no bytes yet."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-group")
    with tempfile.TemporaryFile(prefix="penstock-group") as file:
        return os.dup(file.fileno())


def start_ranks(settings: ComputeSettings, command: Sequence[str], memory_fd: int) -> tuple[list[Peer], int]:
    """Start all ranks but this one, and wait until each has said which rank it is. Returns them, and the
    threads that this one should have. Raises StartupError."""
    num_threads = settings.num_threads if settings.shard_weights else settings.num_ranks * max(1, settings.num_threads)
    if num_threads > (count := num_cores()):
        log.warning(
            "the threads of all ranks are more than the cores: each step waits for the slowest",
            threads=num_threads,
            cores=count,
        )
    # where rank 0 alone computes, it has them all
    cores = divide_cores(1) * settings.num_ranks if settings.shard_weights else divide_cores(settings.num_ranks)
    if settings.num_threads > min(map(len, cores)):  # threads that wait for each other must not wait for one core, too
        cores = [frozenset()] * settings.num_ranks
    pin(cores[0])
    peers: list[Peer] = []
    try:
        for rank in range(1, settings.num_ranks):
            peers.append(_start(settings, command, rank, memory_fd, cores[rank]))
        deadline = time.monotonic() + settings.group_wait_s
        for peer in peers:
            _await_hello(peer, hello_of(settings, 0), deadline)
    except BaseException:
        for peer in peers:
            peer.kill()
            peer.close()
        raise
    return peers, settings.num_threads or max(1, len(cores[0]))


def _start(settings: ComputeSettings, command: Sequence[str], rank: int, memory_fd: int, cores: frozenset[int]) -> Peer:
    (ours, theirs), (watch, their_watch) = socket.socketpair(), socket.socketpair()
    with theirs, their_watch:
        handle = Handle(rank, os.getpid(), theirs.fileno(), their_watch.fileno(), memory_fd, tuple(sorted(cores)))
        environment = os.environ | environment_of(settings) | {HANDLE: json.dumps(asdict(handle))}
        environment["TQDM_DISABLE"] = "1"  # bars are for one process of a terminal
        environment["PENSTOCK_NUM_THREADS"] = str(settings.num_threads or max(1, len(cores)))
        inherited = (handle.commands, handle.watch, handle.memory)
        try:
            process = subprocess.Popen(
                command, env=environment, pass_fds=inherited, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
            )
        except OSError as error:
            ours.close()
            watch.close()
            raise StartupError(f"rank {rank} of {settings.num_ranks} can't be started: {error}") from None
    return Peer(rank, settings.num_ranks, socket.gethostname(), process.pid, Channel(ours), watch, process)


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _await_hello(peer: Peer, ours: Hello, deadline: float) -> None:
    connection = peer.channel.connection
    try:
        hello = hear_hello(connection, max(deadline, time.monotonic() + 0.1))
        refusal = refuse(str(peer), hello, ours)
        answer_hello(connection, refusal)
    except TimeoutError:
        raise Unready(f"{peer} has not come up within --group-wait-s") from None
    except (EOFError, OSError, Invalid):
        reason = f"{peer} died while it started: {peer.why_it_died()}"
        if peer.process is not None and peer.process.returncode == STARTUP_ERROR:
            raise StartupError(reason) from None
        log.error("the group ends", reason=reason)
        sys.exit(1)  # another start may go well
    if refusal:
        raise StartupError(refusal)
    connection.settimeout(None)


def join_parent(settings: ComputeSettings, handle: Handle) -> Peer:
    """Rank 0, to a rank that it started. Raises StartupError."""
    del os.environ[HANDLE]  # not for processes of our own
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or a service manager sends them to all; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    pin(frozenset(handle.cores))
    commands, watch = socket.socket(fileno=handle.commands), socket.socket(fileno=handle.watch)
    for connection in (commands, watch):
        connection.set_inheritable(False)
    os.set_inheritable(handle.memory, False)
    try:
        answer = say_hello(commands, hello_of(settings, handle.rank))
    except (EOFError, OSError, Invalid):
        raise StartupError(f"{name_of(0, settings.num_ranks, socket.gethostname(), handle.first)} died") from None
    return Peer(0, settings.num_ranks, answer.host, answer.pid, Channel(commands), watch, is_parent=True)
