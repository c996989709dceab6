"""Group and Member: the two ends of a group, as compute sees them. Rank 0 starts the others
(`open_group`), or all meet at --master."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from services.compute.ranks.group.commands import Accepted, Close, Loaded, encode
from services.compute.ranks.group.cores import num_cores
from services.compute.ranks.group.identity import refuse_loaded
from services.compute.ranks.group.local import handle_of_this_process, join_parent, share_memory, start_ranks
from services.compute.ranks.group.peer import Peer
from services.compute.ranks.group.remote import connect_to_first, gather_ranks
from services.compute.ranks.group.watch import GroupWatch
from shared.process.errors import Invalid, PenstockError, StartupError
from shared.process.settings import ComputeSettings
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

COMMAND = (sys.executable, "-m", "services.compute")

SAY_S = 60.0  # between two lines about a rank that loads for long
CLOSE_S = 5.0  # for the others, to end when the group is closed
BUSY_S = 0.0005  # that a rank stays awake for the next command: while requests run it comes sooner


class GroupEnd:
    """A process of a group. An error that leaves its `with` ends the group, and the other ranks say
    why."""

    def __init__(
        self, settings: ComputeSettings, peers: Sequence[Peer], memory_fd: int | None, num_threads: int
    ) -> None:
        """memory_fd: of memory that all ranks share; None: they are on several hosts."""
        self.peers = tuple(peers)
        self.memory_fd = memory_fd
        self.num_threads = num_threads  # of this rank's model
        self._timeout_s = settings.group_timeout_s
        # while a rank loads, an import may keep it from saying that it lives
        self._watch = GroupWatch(peers, max(settings.group_timeout_s, settings.group_wait_s))
        self._is_over = False
        self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._is_over:
            return self._end()
        self._watch.stop()
        if self._watch.is_closing:  # rank 0 has closed the group: this step, which lost a rank, has no reader
            self._end()
            sys.exit(0)
        reason = str(error) if isinstance(error, PenstockError) else repr(error)
        self._watch.part(reason, error.exit_code if isinstance(error, StartupError) else 1)
        self._end()
        if isinstance(error, StartupError) and self.peers[0].is_parent:
            sys.exit(error.exit_code)  # rank 0 says it, to the same terminal

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._watch.stop()
            for peer in self.peers:
                peer.kill()
                peer.close()
            if self.memory_fd is not None:
                os.close(self.memory_fd)

    def _all_loaded(self) -> None:
        self._watch.timeout_s = self._timeout_s

    def _send(self, peer: Peer, encoded: bytes) -> None:
        try:
            peer.channel.send_encoded(encoded)
        except OSError as error:
            self._watch.await_end(peer, error)

    def _receive(self, peer: Peer, busy_s: float = 0.0) -> Any:
        try:
            return peer.channel.receive(busy_s)
        except (EOFError, OSError, Invalid) as error:
            self._watch.await_end(peer, error)


class Group(GroupEnd):
    """Rank 0's end."""

    rank = 0

    def identify(self, loaded: Loaded) -> None:
        """Wait until all ranks have loaded. Raises StartupError for one that computes otherwise."""
        for peer in self.peers:
            while not peer.channel.has_come(SAY_S):
                log.info("waiting for a rank to load", rank=str(peer))
            if refusal := refuse_loaded(str(peer), self._receive(peer), loaded):
                raise StartupError(refusal)
        self._all_loaded()
        self.send(Accepted())

    def send(self, command: Any) -> None:
        """Give all other ranks a command: a dataclass of commands.py."""
        encoded = encode(command)
        for peer in self.peers:
            self._send(peer, encoded)

    def receive(self, rank: int) -> Any:
        """Wait for a rank's next answer."""
        return self._receive(self.peers[rank - 1])

    def close(self) -> None:
        """End the group, when its work is done; safe to call twice."""
        if self._is_over:
            return
        self._watch.close()
        deadline = time.monotonic() + CLOSE_S
        for peer in self.peers:
            with suppress(OSError):
                peer.channel.connection.settimeout(CLOSE_S)
                peer.channel.send(Close())
        for peer in self.peers:
            with suppress(EOFError, OSError, Invalid, subprocess.TimeoutExpired):
                if peer.process is not None:
                    peer.process.wait(max(0.0, deadline - time.monotonic()))
                else:
                    peer.channel.connection.settimeout(max(0.01, deadline - time.monotonic()))
                    while peer.channel.receive():  # unexpected answers, up to the end of the connection
                        pass
        self._end()


class Member(GroupEnd):
    """The end of any other rank."""

    def __init__(
        self, settings: ComputeSettings, rank: int, first: Peer, memory_fd: int | None, num_threads: int
    ) -> None:
        self.rank = rank
        self._first = first
        super().__init__(settings, [first], memory_fd, num_threads)

    def identify(self, loaded: Loaded) -> None:
        """Say what this rank has loaded, and wait for all others. If rank 0 refuses, this process
        ends with one line."""
        self.answer(loaded)
        self._receive(self._first)
        self._all_loaded()

    def commands(self, step_timeout_s: float) -> Iterator[Any]:
        """Rank 0's commands, until it closes the group. One that is not carried out within
        step_timeout_s, when the next is asked for, ends the group."""
        self._watch.step_timeout_s = step_timeout_s
        while not isinstance(command := self._receive(self._first, BUSY_S), Close):
            self._watch.busy = time.monotonic(), type(command).__name__
            yield command
            self._watch.busy = None
        self._end()

    def hear(self) -> Any:
        """Wait for rank 0's next message while loading."""
        return self._receive(self._first)

    def answer(self, message: Any) -> None:
        """Send rank 0 a dataclass of commands.py."""
        self._send(self._first, encode(message))

    def leave(self) -> None:
        """This rank was asked to stop: rank 0 stops as on SIGTERM, and closes the group."""
        self._watch.leave()


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
