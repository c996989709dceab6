"""What do 100,000 bad lines in batches cost: time, memory, and other clients' requests?

First come lines that are no requests, then requests that are refused. Every batch must end. Memory
of the worker, the gateway and Redis may grow by a bound, and small requests of others are answered.

    python -m tests.chaos.bad_lines [--lines 100000]

The last line is one JSON document. The exit code is 1 if anything was beyond its bound.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment

STAGES = ("sampler", "tokenizer", "compute", "gateway", "jobs")
MOST_GROWTH_MIB = {"jobs": 128, "gateway": 128, "redis": 64}
MOST_LINES = 50_000  # of one batch
LINES_PER_S = 100  # at least
SLOWEST_S = 30.0  # for a small request of another client
ENDS = ("completed", "failed", "expired", "cancelled")
SAMPLE_EVERY_S = 0.5
MIB = 1 << 20

BAD: list[Any] = [
    None,
    7,
    "x",
    [],
    {},
    {"custom_id": "a"},
    {"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {}},
    {"custom_id": "b", "method": "GET", "url": "/v1/completions", "body": {}},
    {"custom_id": "c", "method": "POST", "url": "/v1/no", "body": {}},
]

REFUSED: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"n": 10**9},
    {"mirostat": 2},
    {"prompt": None},
    {"logit_bias": {"x": 1}},
]


def unreadable(number: int, rng: random.Random) -> str:
    """A line that is no request."""
    return rng.choice(["{", "\x00", "[" * 200, '{"custom_id": "\\ud800"}', *(json.dumps(each) for each in BAD)])


def refused(number: int, rng: random.Random) -> str:
    """A line whose request nobody can take."""
    body = {"model": MODEL, "prompt": "x"} | rng.choice(REFUSED)
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body})


class Watch:
    """Samples the memory of some processes, and asks a small thing of the gateway now and then."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        pids = {stage: deployment.processes[f"{stage}-1"].pid for stage in ("jobs", "gateway")}
        with deployment.redis() as client:
            pids["redis"] = int(client.info("server")["process_id"])
        self.processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.first = self.sizes()
        self.most = dict(self.first)
        self.slowest_s = 0.0

    def sizes(self) -> dict[str, float]:
        found = {}
        for name, process in self.processes.items():
            found[name] = (
                sum(float(each.memory_info().rss) for each in (process, *process.children(recursive=True))) / MIB
            )
        return found

    @contextmanager
    def looking(self) -> Iterator[None]:
        over = threading.Event()
        threads = [threading.Thread(target=target, args=(over,)) for target in (self._sample, self._ask)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _sample(self, over: threading.Event) -> None:
        while not over.wait(SAMPLE_EVERY_S):
            self.most = {name: max(self.most[name], size) for name, size in self.sizes().items()}

    def _ask(self, over: threading.Event) -> None:
        while not over.wait(2 * SAMPLE_EVERY_S):
            began = time.monotonic()
            reply = self.deployment.post("/v1/completions", {"model": MODEL, "prompt": "Water", "max_tokens": 2})
            taken_s = time.monotonic() - began if reply.status_code == 200 else float("inf")
            self.slowest_s = max(self.slowest_s, taken_s)


def run_batch(client: httpx.Client, content: bytes) -> dict[str, Any]:
    """The batch when it has ended."""
    file = (
        client.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
        .raise_for_status()
        .json()
    )
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: dict[str, Any] = client.post("/v1/batches", json=wanted).raise_for_status().json()
    while batch["status"] not in ENDS:
        time.sleep(0.5)
        batch = client.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    return batch


def attack(deployment: Deployment, num_lines: int) -> tuple[dict[str, Any], list[str]]:
    """Both kinds, one after the other. Returns figures, and what is wrong."""
    rng, wrong, watch = random.Random(1), [], Watch(deployment)
    kinds = [
        ("unreadable", unreadable, num_lines),
        *(("refused", refused, min(MOST_LINES, num_lines - at)) for at in range(0, num_lines, MOST_LINES)),
    ]
    batches = []
    with httpx.Client(base_url=deployment.url(), trust_env=False, timeout=600) as client:
        for kind, make, count in kinds:
            content = "\n".join(make(number, rng) for number in range(count)).encode()
            began = time.monotonic()
            with watch.looking():
                batch = run_batch(client, content)
            seconds, counts, num_told = (
                time.monotonic() - began,
                batch["request_counts"],
                len((batch["errors"] or {}).get("data", [])),
            )
            print(
                f"{kind:12}{count:>8} lines, {len(content) / MIB:.1f} MiB: {batch['status']} after {seconds:.1f} s, "
                f"{counts}, {num_told} errors told",
                flush=True,
            )
            batches.append(
                {
                    "kind": kind,
                    "lines": count,
                    "status": batch["status"],
                    "seconds": round(seconds, 1),
                    **counts,
                    "errors_told": num_told,
                }
            )
            if seconds > SLOWEST_S + count / LINES_PER_S:
                wrong.append(f"{kind}: {seconds:.0f} s")
            if batch["status"] != "failed" and counts["failed"] != count:
                wrong.append(f"{kind}: {batch['status']}, {counts}")
    growth = {name: round(watch.most[name] - size, 1) for name, size in watch.first.items()}
    wrong += [f"{name} grew by {mib} MiB" for name, mib in growth.items() if mib > MOST_GROWTH_MIB[name]]
    if watch.slowest_s > SLOWEST_S:
        wrong.append(f"a small request of another took {watch.slowest_s:.1f} s")
    figures = {"batches": batches, "growth_mib": growth, "slowest_s": round(watch.slowest_s, 2)}
    return figures, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.bad_lines", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=100_000, help="of each kind (default: %(default)d)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running_redis((folder := Path(name)) / "redis", None) as url:
        deployment = Deployment(url, folder, programs={})
        try:
            for stage in STAGES:
                deployment.start(stage, f"{stage}-1", dtype="bfloat16")
            deployment.wait_live(*(f"{stage}-1" for stage in STAGES))
            figures, wrong = attack(deployment, args.lines)
        finally:
            deployment.stop()
    print(
        f"memory at most {figures['growth_mib']} MiB above the beginning; slowest small request "
        f"{figures['slowest_s']} s"
    )
    for each in wrong:
        print(f"WRONG: {each}")
    print(json.dumps({"ok": not wrong, "wrong": wrong, **figures}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
