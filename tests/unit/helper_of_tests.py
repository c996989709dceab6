"""`python -m tests.unit.helper_of_tests [USER | kept]`: a helper that does to itself what the question says."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from shared.process.errors import Invalid
from shared.process.worker import run_worker

SEEN: list[str] = []


def refuse(_: str) -> None:
    raise Invalid("no", param="p", code="c", status=404)


def forge(_: str) -> bytes:
    os.write(1, b"\0" * 100)
    return os.read(0, 1)


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def pipes(_: str) -> int:
    """How many pipes are open besides standard input, output and errors."""
    own = [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
    return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") for fd in own)


WORDS: dict[str, Callable[[str], object]] = {
    "look": lambda _: SEEN,
    "sleep": lambda rest: time.sleep(float(rest)),
    "wait": wait_for_file,
    "environment": lambda _: dict(os.environ),
    "memory": lambda rest: len(bytearray(int(rest))),
    "files": lambda rest: [os.dup(0) for _ in range(int(rest))][-1],
    "child": lambda _: subprocess.run([sys.executable, "-c", ""], check=True).returncode,
    "pipes": pipes,
    "core": lambda _: resource.getrlimit(resource.RLIMIT_CORE),
    "deadly": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "profiled": lambda _: os.kill(os.getpid(), signal.SIGPROF),
    "invalid": refuse,
    "forged": forge,
    "arrays": lambda _: {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": (1, ("x", [None]))},
}


def answer(question: bytes) -> object:
    word, _, rest = question.decode().partition(" ")
    SEEN.append(word)
    return WORDS[word](rest)


if __name__ == "__main__":
    is_kept = sys.argv[1:] == ["kept"]
    if len(sys.argv) > 1 and not is_kept:
        os.setuid(int(sys.argv[1]))
    run_worker(answer, 64 << 20, is_kept=is_kept)
