"""The server that the clients call: the demo model, started with the interpreter that is given."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_TIMEOUT_S = 180.0


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
            "services.cli",
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


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")
