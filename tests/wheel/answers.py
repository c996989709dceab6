"""`python tests/wheel/answers.py PENSTOCK`: an installed Penstock answers a request with the demo
model, on native kernels, where there is no compiler.

It needs nothing but Python, so that it runs in a bare container.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")


def main(penstock: str) -> None:
    found = [name for name in COMPILERS if shutil.which(name)]
    assert not found, f"a compiler is there: {', '.join(found)}"
    subprocess.run([penstock, "--version"], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as to:
            command = [penstock, "up", "--model", "demo", "--port", str(port), "--data-dir", f"{folder}/data"]
            process = subprocess.Popen(command, stdout=to, stderr=to, cwd=folder)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/ready", process)
            answer = ask(f"http://127.0.0.1:{port}/v1/chat/completions", "What is Penstock?")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
            lines = log.read_text().splitlines()
            native = [line for line in lines if "native kernels" in line and "instruction_set" in line]
            if sys.exc_info()[0] is not None or not native:
                print(*lines[-60:], sep="\n")
    assert native, "torch computes: the log has no line on native kernels"
    print(native[0])
    print(answer["choices"][0]["message"]["content"])
    assert answer["choices"][0]["finish_reason"] == "stop", answer


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except OSError as error:
            assert process.poll() is None, "penstock up ended"
            assert time.monotonic() < deadline, f"not ready: {error}"
            time.sleep(0.5)


def ask(url: str, question: str) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": question}], "temperature": 0}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


if __name__ == "__main__":
    main(*sys.argv[1:])
