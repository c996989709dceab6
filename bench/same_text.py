"""Does a server give the same text to the same request, alone, among others, and when it is started
in another way? For any server with OpenAI's API.

Method: each server is started, asked for each text alone, then for all at once, and stopped, one
server after the other. Greedy decoding; what is compared is text. All are compared with the first
server's texts alone.

    python -m bench.same_text --model NAME --url http://127.0.0.1:8123/v1 \\
      --server "one process" "penstock up --model M --port 8123" --server "two ranks" "penstock up
      --model M --port 8123 --tensor-parallel-size 2"
"""

import argparse
import os
import shlex
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx

READY_S, ANSWER_S, STOP_S = 600.0, 600.0, 60.0
PROMPTS = [
    f"{start} and so it went on:"
    for start in (
        "The ship left the harbour at dawn",
        "In the year 1903 a letter came to Vienna",
        "The recipe for the bread of the mountains is simple",
        "A computer has a memory and a processor",
        "My grandmother told me about the long winter",
        "The law of the sea says who may fish",
        "Three friends opened a shop in the old town",
        "The storm took the roof of the school",
    )
]


class Server:
    """A server that a command starts, with all its processes."""

    def __init__(self, command: str, url: str, model: str) -> None:
        self.url = url
        self.model = model
        path = Path(tempfile.gettempdir()) / f"same-text-{os.getpid()}.log"
        with path.open("wb") as log:
            self.process = subprocess.Popen(shlex.split(command), stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + READY_S
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise SystemExit(f"{command}: it did not become ready:\n{path.read_text(errors='replace')[-1500:]}")
            time.sleep(0.5)

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return bool(self.ask("Hello", 1))
        return False

    def ask(self, prompt: str, num_tokens: int) -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{self.url}/completions", json=body, timeout=ANSWER_S)
        reply.raise_for_status()
        text: str = reply.json()["choices"][0]["text"]
        return text

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Whatever is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def texts_of(server: Server, num_tokens: int) -> dict[str, tuple[list[str], float]]:
    """Texts of all prompts, and tokens/s, by how they were asked for."""
    found = {}
    for how, at_once in (("alone", 1), ("together", len(PROMPTS))):
        started = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            texts = list(pool.map(lambda prompt: server.ask(prompt, num_tokens), PROMPTS))
        found[how] = texts, len(PROMPTS) * num_tokens / (time.perf_counter() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The same request, in several ways: the same text?")
    parser.add_argument("--model", required=True, help="as the servers call it")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000/v1", help="of each server in its turn (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=128, help="of each text (default: %(default)s)")
    parser.add_argument("--server", nargs=2, action="append", required=True, metavar=("NAME", "COMMAND"))
    args = parser.parse_args()
    first: list[str] | None = None
    for name, command in args.server:
        server = Server(command, args.url, args.model)
        try:
            found = texts_of(server, args.tokens)
        finally:
            server.stop()
        first = found["alone"][0] if first is None else first
        same = {
            how: sum(one == other for one, other in zip(texts, first, strict=True)) for how, (texts, _) in found.items()
        }
        told = ", ".join(f"{how} {same[how]} ({rate:.1f} tokens/s)" for how, (_, rate) in found.items())
        print(f"{name}: of {len(PROMPTS)} texts the same: {told}", flush=True)


if __name__ == "__main__":
    main()
