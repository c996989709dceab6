"""Stages of tests, forked from a process that has imported their modules: a start takes a tenth of
what an interpreter's own imports take.

A stage is a process as ever: `runpy` runs its `__main__`, with an environment, a log and an exit code
of its own. What differs from `python -m` is that replicas share the seed of hash(). Chaos and
`penstock up` start theirs by `python -m`.
"""

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from shared.process import helper
from shared.process.worker import environment

# The stages of "light" never see torch: the tokenizer makes its import fail.
KINDS = {"light": ("gateway", "jobs", "sampler", "tokenizer"), "compute": ("compute", "encoder")}
GATEWAY, TOKENIZER = "tests.gateway_of_tests", "tests.tokenizer_of_tests"  # of "light", too
# What their `main` imports only when its settings are good: torch takes a second of a core. transformers stays out
# of "compute": few tests need it.
LATE = {
    "light": (),
    "compute": (
        "services.compute.images.reader",
        "services.compute.loop.engine",
        "services.compute.loop.service",
        "services.compute.ranks.rank",
        "services.compute.weights.sizes",
        "services.encoder.service",
    ),
}
VARIABLES = {kind: f"FORGE_OF_{kind.upper()}" for kind in KINDS}  # the address of one that several test processes share


class ForkedProcess:
    """The part of subprocess.Popen that tests use, for a process whose parent is another: that one
    tells the exit code.
    """

    def __init__(
        self,
        connection: socket.socket,
        module: str,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        log: Path,
        pipes: tuple[int, ...] = (),
    ) -> None:
        """pipes: its standard input and output; none: it has no input, and its output goes to the log."""
        self.args = module
        self.returncode: int | None = None
        self._connection = connection
        self._lock = threading.Lock()  # a test may wait in one thread, and look in another
        socket.send_fds(connection, [b"\n"], pipes)
        connection.sendall(
            json.dumps({"module": module, "arguments": arguments, "environment": environment, "log": str(log)}).encode()
            + b"\n"
        )
        self.pid = int(self._line())

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            try:
                part = self._connection.recv(1)
            except ConnectionResetError:
                part = b""
            if not part:
                raise RuntimeError(f"the process that forks {self.args} has died")
            line += part
        return line

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
                self.returncode = int(self._line())
                self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        ends_at = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if ends_at is not None and time.monotonic() > ends_at:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended a moment ago
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedHelper(ForkedProcess):
    """A helper of a stage, as shared/process/helper.py uses it: in a session of its own."""

    def __init__(self, module: str, *arguments: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[VARIABLES["light"]])
        source, sink = os.pipe(), os.pipe()
        log = Path(f"/proc/{os.getpid()}/fd/2")
        super().__init__(connection, module, arguments, environment(), log, (source[0], sink[1]))
        os.close(source[0])
        os.close(sink[1])
        self.stdin, self.stdout = io.FileIO(source[1], "w"), io.FileIO(sink[0])


def fork_helpers() -> None:
    """Let this process' helpers be forks, too, if several test processes share a process that forks: transformers
    takes one that renders templates 0.4 s of a core."""

    def start_helper(module: str, *arguments: str) -> Any:
        return (
            ForkedHelper(module, *arguments)
            if module.startswith("services.")
            else start_interpreter(module, *arguments)
        )

    start_interpreter = helper.start
    if VARIABLES["light"] in os.environ:
        helper.start = start_helper


def start(module: str, environment: dict[str, str], log: Path, *arguments: str) -> ForkedProcess:
    """Run `module` as `python -m` would, its output appended to `log`."""
    is_light = module.startswith(("services.operator.", GATEWAY, TOKENIZER))
    is_light |= module.removeprefix("services.") in KINDS["light"]
    kind = "light" if is_light else "compute"
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(forge(kind))
    return ForkedProcess(connection, module, arguments, environment, log)


def refused(module: str, folder: Path, **settings: str) -> str:
    """The output of a stage that does not start with these settings. It must end with exit code 2."""
    log = folder / "refused.log"
    process = start(
        module, {**os.environ, **{f"PENSTOCK_{name.upper()}": value for name, value in settings.items()}}, log
    )
    assert process.wait(120) == 2, log.read_text()
    return log.read_text()


@cache
def forge(kind: str) -> str:
    """The address of the process that forks stages of this kind: of one that is there, or of a new
    one, which ends with this process.
    """
    if address := os.environ.get(VARIABLES[kind]):
        return address
    folder = tempfile.TemporaryDirectory(prefix="forge-")
    path = f"{folder.name}/{kind}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forge", kind, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def stop() -> None:
        process.communicate()  # closes its input
        folder.cleanup()

    atexit.register(stop)
    return path


def main(kind: str, listener: socket.socket) -> None:
    preload(kind)
    request = next_request(listener)
    os.environ.clear()
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if pipes := request["pipes"]:
        os.setsid()
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
            os.close(pipe)
    else:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
    sys.argv = [request["module"], *request["arguments"]]
    sys.modules.pop(f"{request['module']}.__main__", None)  # preloaded: runpy would warn
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def preload(kind: str) -> None:
    gc.disable()  # a collection would look through all modules again and again
    for module in (*(f"services.{stage}.__main__" for stage in KINDS[kind]), *LATE[kind]):
        importlib.import_module(module)
    if kind == "light":
        from services.tokenizer import __main__ as tokenizer
        from shared.model.files import open_model

        tokenizer.load_tokenizer(open_model("demo"))  # which imports transformers
    gc.freeze()  # a fork's collector would write to every page
    gc.enable()


def next_request(listener: socket.socket) -> dict[str, Any]:
    """Fork for each connection. Returns in the new process only, with what it is to run. The forge
    ends with its standard input.
    """
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            sys.exit()
        connection, _ = listener.accept()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork():
            connection.close()
            continue
        listener.close()
        with connection:
            _, pipes, _, _ = socket.recv_fds(connection, 1, 2)
            request: dict[str, Any] = json.loads(connection.makefile("rb").readline()) | {"pipes": pipes}
            if not (pid := os.fork()):
                return request
            watch_over(pid, connection)
        os._exit(0)


def watch_over(pid: int, connection: socket.socket) -> None:
    """Tell the test the process' id, and its exit code when it ends. Kills it when the test has gone."""
    connection.sendall(b"%d\n" % pid)

    def outlive() -> None:
        with suppress(ConnectionError):
            connection.recv(1)  # nothing is ever sent: it returns at the end
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=outlive, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.sendall(b"%d\n" % code)


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
