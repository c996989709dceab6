"""Ties the processes of one `penstock up` together, so that none outlives the launcher for long,
however that ended, and no second Redis ever writes to a data folder that one still uses.

A lock on the data folder, which the embedded Redis and every other process inherits: it is free
when the last of them has ended, and not before. A pipe that the launcher alone could write to: its
end tells the stages that the launcher is gone (shared/wire/stage.py), and they leave as on SIGTERM.
A pipe that the launcher and the stages could write to: its end tells the watchman, this file's own
process, that all of them are gone, and it shuts down Redis, which the stages needed until then.

Why pipes: a parent-death signal (prctl) exists on Linux only, and Redis would get it together with
the stages that still hand work over.
"""

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import psutil

from shared.process.errors import StartupError, words_of
from shared.process.telemetry import get_logger

log = get_logger("penstock.launcher")

REST_TIMEOUT_S = 15.0  # for an earlier launcher's processes to end: stages have 10 s, then Redis follows
REDIS_PASSWORD = "PENSTOCK_REDIS_PASSWORD"  # in the watchman's environment: arguments are for all to see
CONNECT_TIMEOUT_S = 5.0  # for a Redis that must end just after it has been started


class Lifeline:
    """The descriptors that a launcher's processes inherit; they are the launcher's as long as it lives."""

    def __init__(self, data_dir: Path) -> None:
        """Take the data folder, once what an earlier launcher left behind has ended. Raises StartupError."""
        self._names: dict[int, str] = {}
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self._own = (data_dir / "lock").open("w")
            self._shared = (data_dir / "processes").open("a+")
        except OSError as error:
            raise StartupError(f"--data-dir {data_dir}: {words_of(error)}") from None
        if not _lock(self._own):
            raise StartupError(f"another penstock up uses {data_dir}; give this one its own --data-dir")
        self._wait_for_the_rest(data_dir)
        self._launcher_lives, self._only_launcher_writes = os.pipe()
        self._anyone_lives, self._launcher_and_stages_write = os.pipe()

    def _wait_for_the_rest(self, data_dir: Path) -> None:
        if _lock(self._shared):
            return
        log.info("waiting for an earlier launcher's processes to end", data_dir=data_dir)
        deadline = time.monotonic() + REST_TIMEOUT_S
        while not _lock(self._shared):
            if time.monotonic() > deadline:
                left = (
                    ", ".join(
                        f"{name} (process {pid})" for pid, name in self._noted().items() if psutil.pid_exists(pid)
                    )
                    or "a process"
                )
                raise StartupError(
                    f"what an earlier penstock up started still uses {data_dir}: {left}; end that, or give this one "
                    "its own --data-dir"
                )
            time.sleep(0.1)

    @property
    def of_redis(self) -> tuple[int, ...]:
        """The descriptors that Redis inherits."""
        return (self._shared.fileno(),)

    @property
    def of_stage(self) -> tuple[int, ...]:
        """The descriptors that a stage inherits."""
        return (self._shared.fileno(), self._launcher_lives, self._launcher_and_stages_write)

    @property
    def launcher_lives(self) -> int:
        """The pipe that a stage reads: it ends with the launcher."""
        return self._launcher_lives

    def start_watchman(self, socket_path: Path, password: str = "") -> "subprocess.Popen[bytes]":
        """The process that shuts the Redis at socket_path down when the launcher and all stages are
        gone. password: Redis', if it wants one.
        """
        command = [sys.executable, "-m", "services.operator.lifeline", str(socket_path)]
        return subprocess.Popen(
            command,
            stdin=self._anyone_lives,
            pass_fds=self.of_redis,
            start_new_session=True,
            env={**os.environ, REDIS_PASSWORD: password},
        )

    def note(self, name: str, pid: int) -> None:
        """Write down which processes use the folder. The last process of a name counts."""
        self._names = {each: other for each, other in self._names.items() if other != name} | {pid: name}
        self._shared.truncate(0)
        self._shared.write("".join(f"{each} {other}\n" for each, other in self._names.items()))
        self._shared.flush()

    def _noted(self) -> dict[int, str]:
        self._shared.seek(0)
        lines = [line.split(maxsplit=1) for line in self._shared.read().splitlines()]
        return {int(line[0]): line[1] for line in lines if len(line) == 2 and line[0].isdecimal()}


def _lock(file: IO[str]) -> bool:
    """Whether the lock is this process's now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StartupError(f"{file.name} can't be locked: {error.strerror}; give another --data-dir") from None
    return True


def watch(socket_path: str, password: str = "") -> None:
    """Wait until no process can write to standard input any more; then shut down the Redis at the socket.
    Its lock, which this process holds, too, says that it is the launcher's own."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(socket_path)
                connection.sendall(f"AUTH {password}\r\nSHUTDOWN\r\n".encode() if password else b"SHUTDOWN\r\n")
                while connection.recv(1024):
                    continue  # until the end, when Redis has written all
                return
            except OSError:
                time.sleep(0.1)


if __name__ == "__main__":
    watch(sys.argv[1], os.environ.get(REDIS_PASSWORD, ""))
