"""HelperProcess: a helper process (worker.py) for a caller that waits."""

import os
import select
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from typing import Any

from shared.process.worker import QUESTION, REPLY, environment, outcome_of


class HelperStuck(Exception):
    """The helper did not answer in time, and was killed."""


class HelperProcess:
    """One process, started by the first question, one question at a time. It ends when this object
    does."""

    def __init__(self, module: str, *arguments: str) -> None:
        """module: one that calls run_worker."""
        self._module, self._arguments = module, arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., HelperProcess] | None = None

    def ask(self, question: bytes, limit_s: float, timeout_s: float) -> Any:
        """The answer, or the Invalid that it is. An empty question asks for nothing: the process is
        ready when it is answered.

        limit_s: of the answering; timeout_s: by the clock, with the start of the process.

        Raises TimeoutError if limit_s or the processor time was used up; HelperStuck; EOFError or
        OSError if the process ended; Unreadable.
        """
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._process = start(self._module, *self._arguments)
            self._finalizer = weakref.finalize(self, end, self._process)
        try:
            outcome, reply = exchange(self._process, question, limit_s, time.monotonic() + timeout_s)
        except (OSError, EOFError, HelperStuck):
            self.stop()
            raise
        return outcome_of(reply, outcome)

    def stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = None


def start(module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=environment(),
        start_new_session=True,
    )


def exchange(process: "subprocess.Popen[bytes]", question: bytes, limit_s: float, ends_at: float) -> tuple[int, bytes]:
    """Write a question and read its reply. Raises HelperStuck at the time `ends_at`, EOFError, OSError."""
    assert process.stdin is not None and process.stdout is not None
    sink, source = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(sink, False)
    for data in (QUESTION.pack(limit_s, len(question)), question):
        view = memoryview(data)
        while view:
            wait(sink, ends_at, is_write=True)
            view = view[os.write(sink, view) :]
    outcome, length = REPLY.unpack(receive(source, REPLY.size, ends_at))
    return outcome, receive(source, length, ends_at)


def receive(source: int, count: int, ends_at: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        wait(source, ends_at)
        piece = os.read(source, count - len(data))
        if not piece:
            raise EOFError("no answer")
        data += piece
    return bytes(data)


def wait(file: int, ends_at: float, *, is_write: bool = False) -> None:
    """Wait until a file can be read or written. Raises HelperStuck."""
    left_s = max(0.0, ends_at - time.monotonic())
    readable, writable, _ = select.select([] if is_write else [file], [file] if is_write else [], [], left_s)
    if not readable and not writable:
        raise HelperStuck


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its child, wait for it, and close its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
