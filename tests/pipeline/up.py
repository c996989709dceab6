"""`penstock up` as a process, for the tests of what it starts."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from tests import forge
from tests.deployment import free_port
from tests.waiting import wait_until

COMMAND = [sys.executable, "-m", "services.operator.cli"]
ONE_THREAD = {"PENSTOCK_NUM_THREADS": "1"}  # other tests want the cores, too


def run(*arguments: str, text: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **ONE_THREAD, **environment},
    )


def run_forked(log: Path, *arguments: str) -> tuple[int, str]:
    """`run` in a process that need not import: its exit code, and all that it wrote, which goes to `log`."""
    process = forge.start("services.operator.cli", os.environ | ONE_THREAD, log, *arguments)
    code = process.wait(120)
    return code, log.read_text()


class Up:
    """Started, and ready. Its output goes to a file in `folder`, its data to a folder there, which
    a second one can take over.
    """

    def __init__(
        self, folder: Path, *arguments: str, model: str = "demo", num_threads: int = 1, timeout_s: float = 180.0
    ) -> None:
        """num_threads: of the model; 1, since other tests want the cores, too. 0: all."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_dir = folder / "data"
        self.log = folder / "up.log"
        command = [
            *COMMAND,
            "up",
            "--model",
            model,
            "--port",
            str(self.port),
            "--data-dir",
            str(self.data_dir),
            *arguments,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PENSTOCK_NUM_THREADS": str(num_threads)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until(
                lambda: "curl" in self.log.read_text(), description="it says how to send a request", timeout_s=timeout_s
            )
        except AssertionError:
            self.end()
            raise

    def ask(self) -> int:
        body = {"model": "penstock-demo", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
        try:
            return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=30, trust_env=False).status_code
        except httpx.HTTPError:
            return 0

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def end(self) -> None:
        """Kills it, whatever state it is in."""
        for process in [*self.children(), self.process] if self.process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):  # some end with their parent
                process.kill()
        self.process.wait()
