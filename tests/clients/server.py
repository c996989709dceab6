"""The servers that the clients call: the demo model, and the scripted one, started with the
interpreter that is given.
"""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_TIMEOUT_S = 180.0
NAMED_HOST = "named.example"  # of the pages that may call the demo model's server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(python: str, origin: str) -> Iterator[str]:
    """The demo model, and who may call it from a page; yields its URL."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "wb") as log:
        command = [
            python,
            "-m",
            "services.operator.cli",
            "up",
            "--model",
            "demo",
            "--dtype",
            "float32",
            "--port",
            str(port),
            "--data-dir",
            folder,
            "--allow-origin",
            origin,
        ]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, Path(folder) / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def scripted_server(python: str, script: Path) -> Iterator[str]:
    """The model that says what the script says; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "tests.clients.scripted", folder, str(script)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        try:
            if not (url := process.stdout.readline().strip()):
                raise SystemExit("the scripted model's server did not start")
            yield url
        finally:
            process.stdin.close()
            process.wait()


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")
