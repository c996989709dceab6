"""What do traces cost? Requests/s and the time of a step with every request traced, over those with none, in one run.

Method: `penstock up` with the demo model twice, once with an OTLP endpoint (a collector of this process that drops what it gets), once without; they take
turns, the other's processes stopped meanwhile, the first in one round being the second in the next. Short requests (256 at once, 4 tokens out) for
requests/s, where a trace's nine spans weigh most; longer ones (32 at once, 64 tokens out) for the step. A model whose steps take less than a
millisecond, on purpose: with any other the share is smaller. Medians of the rounds' ratios count. Ceiling: 1.0.

    python -m bench.telemetry --rounds 5
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.pipeline import PARTS, Served, whole_machine

MODEL = "penstock-demo"
SHORT, LONG = (256, 4), (32, 64)  # streams, tokens out
OWN_PARTS = [part for part in PARTS if part != "wait"]


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
    folder.mkdir()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint  # empty: none
    return Served(["--model", "demo", "--kv-cache-memory", "256MiB"], folder, MODEL)


def measure(served: Served, other: Served) -> dict[str, float]:
    """Requests/s, and ms of a step without its waiting."""
    with other.stopped():
        short, long = served.run(*SHORT), served.run(*LONG)
    return {"requests_s": SHORT[0] / short["seconds"], "step_ms": 1000 * sum(long[part] for part in OWN_PARTS) / long["steps"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Drop)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder, whole_machine():
        plain = start(Path(folder) / "plain", "")
        traced = start(Path(folder) / "traced", f"http://127.0.0.1:{collector.server_port}")
        try:
            measure(plain, traced)  # once for nothing: what is first used is loaded
            measure(traced, plain)
            rounds = []
            print(f"{'round':>5} {'requests/s':>12} {'traced':>8} {'ratio':>7} {'step ms':>9} {'traced':>8} {'ratio':>7}")
            for number in range(args.rounds):
                if number % 2:
                    without, with_traces = measure(plain, traced), measure(traced, plain)
                else:
                    with_traces, without = measure(traced, plain), measure(plain, traced)
                found = {"requests_ratio": with_traces["requests_s"] / without["requests_s"], "step_ratio": with_traces["step_ms"] / without["step_ms"]}
                rounds.append(found)
                row = (
                    without["requests_s"],
                    with_traces["requests_s"],
                    found["requests_ratio"],
                    without["step_ms"],
                    with_traces["step_ms"],
                    found["step_ratio"],
                )
                print(f"{number:>5} {row[0]:>12.1f} {row[1]:>8.1f} {row[2]:>7.3f} {row[3]:>9.3f} {row[4]:>8.3f} {row[5]:>7.3f}", flush=True)
        finally:
            plain.close()
            traced.close()
    medians = {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}
    print(json.dumps({"rounds": args.rounds, **medians, "span_bytes": Drop.num_bytes}))


if __name__ == "__main__":
    main()
