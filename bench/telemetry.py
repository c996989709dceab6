"""What do traces cost? Requests/s and the time of a step with every request traced, over those with none, in one run.

Method: `penstock up` with the demo model three times: off (no OTLP endpoint), away (an endpoint
where nobody listens), on (a collector of this process that drops what it gets). They take turns,
the others' processes stopped meanwhile; each round begins with another one. Short requests (128 at
once, 4 tokens out) for requests/s, where a trace's nine spans weigh most; longer ones (32 at once,
64 tokens out) for the step. A model whose steps take less than a millisecond, on purpose: with any
other the share is smaller. Medians of the rounds' ratios to off count. Ceiling: 1.0.

    python -m bench.telemetry --rounds 5
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.pipeline import Served, free_port, whole_machine
from shared.wire.load import STEP_PARTS

MODEL = "penstock-demo"
FLAGS = ["--model", "demo", "--kv-cache-memory", "256MiB", "--jobs", "0"]
SHORT, LONG = (128, 4), (32, 64)  # streams, tokens out
OWN_PARTS = [part for part in STEP_PARTS if part != "wait"]
FIGURES = {"requests_s": "requests/s", "step_ms": "ms a step"}


class Drop(BaseHTTPRequestHandler):
    """Takes spans, and keeps none."""

    num_bytes = 0

    def do_POST(self) -> None:
        Drop.num_bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


def start(folder: Path, endpoint: str) -> Served:
    """One that is stopped, having used once what it will use."""
    folder.mkdir()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint  # empty: none
    served = Served(FLAGS, folder, MODEL)
    try:
        served.run(*SHORT)
        served.suspend()
    except BaseException:
        served.close()
        raise
    return served


def measure(served: Served) -> dict[str, float]:
    """Requests/s, and ms of a step without its waiting."""
    with served.awake():
        short, long = served.run(*SHORT), served.run(*LONG)
    return {
        "requests_s": SHORT[0] / short["seconds"],
        "step_ms": 1000 * sum(long[part] for part in OWN_PARTS) / long["steps"],
    }


def compare(all_served: dict[str, Served], rounds: int, seconds: float) -> list[dict[str, float]]:
    """The ratios to off of so many rounds; of fewer, if the time is over."""
    until = time.monotonic() + seconds
    found: list[dict[str, float]] = []
    names, others = list(all_served), [name for name in all_served if name != "off"]
    heads = [f"{name} {head}" for name in FIGURES.values() for head in (*names, *(f"{other}/off" for other in others))]
    print("round" + "".join(f"{head.replace('requests/s', 'req/s'):>21}" for head in heads))
    while len(found) < rounds and (not found or time.monotonic() < until):
        first = len(found) % len(names)
        measured = {name: measure(all_served[name]) for name in (*names[first:], *names[:first])}
        ratios = {
            f"{figure}_{other}": measured[other][figure] / measured["off"][figure]
            for figure in FIGURES
            for other in others
        }
        row = [
            value
            for figure in FIGURES
            for value in (
                *(measured[name][figure] for name in names),
                *(ratios[f"{figure}_{other}"] for other in others),
            )
        ]
        print(f"{len(found):>5}" + "".join(f"{value:>21.3f}" for value in row), flush=True)
        found.append(ratios)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=180, help="after which no further round begins (default: %(default)s)"
    )
    args = parser.parse_args()
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Drop)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoints = {
        "off": "",
        "away": f"http://127.0.0.1:{free_port()}",
        "on": f"http://127.0.0.1:{collector.server_port}",
    }
    with tempfile.TemporaryDirectory() as folder, whole_machine(), ExitStack() as stack:
        all_served = {
            name: stack.enter_context(closing(start(Path(folder) / name, endpoint)))
            for name, endpoint in endpoints.items()
        }
        rounds = compare(all_served, args.rounds, args.seconds)
    medians = {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}
    print(f"medians of {len(rounds)} rounds: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in medians.items()))
    print(json.dumps({"rounds": len(rounds), **medians, "span_bytes": Drop.num_bytes}))


if __name__ == "__main__":
    main()
