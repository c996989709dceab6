"""Peer: another rank of the group, as this process sees it."""

import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field

from services.compute.ranks.group.channel import Channel

LAST_WORDS_S = 1.0  # between the end of a process' connections and its exit


@dataclass(slots=True, eq=False)
class Peer:
    rank: int
    num_ranks: int  # of the group
    host: str
    pid: int
    channel: Channel
    watch: socket.socket  # for signs of life
    process: "subprocess.Popen[bytes] | None" = None  # where this process started it
    is_parent: bool = False  # it started this process
    heard_at: float = field(default_factory=time.monotonic)  # s

    def __str__(self) -> str:
        return name_of(self.rank, self.num_ranks, self.host, self.pid)

    def why_it_died(self) -> str:
        """Why its connections ended, as far as can be known."""
        if self.process is None:
            return "it closed its connection, or its host reset it"
        try:
            code = self.process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"

    def await_end(self) -> None:
        """Give the process, if this one started it, a moment to end by itself."""
        with suppress(subprocess.TimeoutExpired):
            if self.process is not None:
                self.process.wait(LAST_WORDS_S)

    def kill(self) -> None:
        """End the process, if this one started it, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.channel.connection.close()
        self.watch.close()


def name_of(rank: int, num_ranks: int, host: str, pid: int) -> str:
    """A rank's name in logs and errors."""
    return f"rank {rank} of {num_ranks} ({'' if host == socket.gethostname() else f'host {host}, '}pid {pid})"
