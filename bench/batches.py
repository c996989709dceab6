"""What does a batch take, and what does it take from others? Its requests/s beside the same over
HTTP; interactive TTFT without it and with it.

Method: the same completions of English prose (bench.served's), greedy, end tokens ignored. First as
streams over HTTP, so many at once as a worker has in the pipeline. Then as a batch: from its
creation to its end, checking and files included. Then interactive requests at random times with a
rate (a Poisson process), once alone and once, at the same times, while a batch runs that is long
enough; it is cancelled when they are answered. A batch that is faster than HTTP is not to be
expected: both end in the same pipeline, and that is the ceiling. Give the server a worker:
`penstock up` has one.

    python -m bench.batches http://127.0.0.1:8000 --num-lines 10000
    python -m bench.batches http://127.0.0.1:8000 --num-lines 500 --interactive 200 --rate 2
"""

import argparse
import asyncio
import itertools
import json
import math
import time
from typing import Any

import httpx
import numpy as np
import uvloop

from bench.served import ask_all, prose, server_of, show, summarize
from services.simulator.trace import TraceRequest, with_rate

URL = "/v1/completions"
LENGTHS = ((20, 60), (16, 48))  # prompt and output tokens, evenly distributed
POLL_S = 0.2
TELL_EVERY_S, STALLED_S = 10.0, 180.0  # how far a batch is; for how long none of its lines need be answered
FINAL = ("completed", "failed", "expired", "cancelled")


def lengths_of(count: int, seed: int) -> list[TraceRequest]:
    rng = np.random.default_rng(seed)
    return [
        TraceRequest(int(rng.integers(*LENGTHS[0], endpoint=True)), int(rng.integers(*LENGTHS[1], endpoint=True)))
        for _ in range(count)
    ]


def lines_of(model: str, prompts: list[str], requests: list[TraceRequest]) -> bytes:
    """A batch's input."""
    bodies = [
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    lines = [
        {"custom_id": f"{number:06}", "method": "POST", "url": URL, "body": body} for number, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def create(client: httpx.Client, content: bytes) -> dict[str, Any]:
    file = (
        client.post("/v1/files", files={"file": ("bench.jsonl", content)}, data={"purpose": "batch"})
        .raise_for_status()
        .json()
    )
    batch = (
        client.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"})
        .raise_for_status()
        .json()
    )
    return dict(batch)


def follow(client: httpx.Client, batch: dict[str, Any], num_lines: float = float("inf")) -> dict[str, Any]:
    """The batch once it has ended, or so many of its lines are answered. Raises SystemExit for one
    that stands still.
    """
    moved_at = told_at = time.monotonic()
    while batch["status"] not in FINAL and batch["request_counts"]["completed"] < num_lines:
        time.sleep(POLL_S)
        before, batch = batch, dict(client.get(f"/v1/batches/{batch['id']}").raise_for_status().json())
        now, counts = time.monotonic(), batch["request_counts"]
        if (counts, batch["status"]) != (before["request_counts"], before["status"]):
            moved_at = now
        elif now > moved_at + STALLED_S:
            raise SystemExit(f"the batch stands still, {batch['status']}: {counts}; is there a worker?")
        if now > told_at + TELL_EVERY_S:
            told_at = now
            print(f"  {batch['status']}: {counts['completed']} of {counts['total']} lines", flush=True)
    return batch


def run_batch(client: httpx.Client, content: bytes) -> dict[str, float]:
    """A batch, from its creation to its end. Raises SystemExit for one that is not answered whole."""
    started = time.perf_counter()
    batch = follow(client, create(client, content))
    seconds = time.perf_counter() - started
    counts = batch["request_counts"]
    if batch["status"] != "completed" or counts["failed"]:
        raise SystemExit(f"the batch is {batch['status']}: {counts}, {batch['errors']}")
    return {
        "seconds": seconds,
        "requests_per_s": counts["total"] / seconds,
        "output_tokens_per_s": batch["usage"]["output_tokens"] / seconds,
    }


def cancel(client: httpx.Client, batch: dict[str, Any]) -> int:
    """End the batch that ran beside. Returns how many lines it has answered. Raises SystemExit for
    one that had ended.
    """
    if client.post(f"/v1/batches/{batch['id']}/cancel").status_code != 200:
        raise SystemExit("the batch ended before the interactive requests did: give more --beside lines")
    batch = follow(client, batch)
    return int(batch["request_counts"]["completed"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Batches: their requests/s, and others' TTFT beside them.")
    parser.add_argument("url", help="as in http://127.0.0.1:8000")
    parser.add_argument(
        "--num-lines", type=int, default=1000, help="of the batch that is compared with HTTP (default: %(default)s)"
    )
    parser.add_argument("--num-http", type=int, help="requests over HTTP; by default as many, at most 1000")
    parser.add_argument(
        "--at-once",
        type=int,
        default=32,
        help="requests over HTTP, at once (default: %(default)s, as many as a worker has)",
    )
    parser.add_argument(
        "--interactive", type=int, default=100, help="requests whose TTFT is measured (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="of these, a second (default: %(default)s)")
    parser.add_argument(
        "--beside", type=int, default=20_000, help="lines of the batch beside them (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    url, model = server_of(args.url, None)
    figures: dict[str, Any] = {}
    unshared = httpx.Limits(
        max_keepalive_connections=0
    )  # a connection that was idle while others were measured may just be closed
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        httpx.Client(base_url=url, timeout=120, trust_env=False, limits=unshared) as client,
    ):
        requests = lengths_of(args.num_lines, args.seed)
        prompts = prose(requests)
        num_http = min(args.num_http or 1000, args.num_lines)
        print(f"{num_http} requests over HTTP, {args.at_once} at once", flush=True)
        figures["http"] = throughput(runner, url, model, prompts[:num_http], requests[:num_http], args.at_once)
        print(f"a batch of {args.num_lines} lines", flush=True)
        figures["batch"] = run_batch(client, lines_of(model, prompts, requests))
        for name in ("http", "batch"):
            print(
                f"{name:6}{figures[name]['requests_per_s']:9.1f} "
                f"requests/s{figures[name]['output_tokens_per_s']:10.0f} tokens/s"
            )
        interactive = with_rate(lengths_of(args.interactive, args.seed + 1), args.rate, seed=args.seed)
        figures["alone"] = measure(runner, url, model, interactive, "alone")
        batch = follow(client, create(client, lines_of(model, *beside(args.beside, args.seed + 2))), 2 * args.at_once)
        begun_at, before = time.perf_counter(), batch["request_counts"]["completed"]
        figures["beside"] = measure(runner, url, model, interactive, "while a batch runs")
        seconds = time.perf_counter() - begun_at
        figures["beside"]["lines_per_s"] = round((cancel(client, batch) - before) / seconds, 3)
    show_both(figures)
    print(json.dumps({"url": url, "model": model, "rate": args.rate, "seed": args.seed, **figures}))


def show_both(figures: dict[str, Any]) -> None:
    """How a batch slows others, and they it."""
    columns = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms")
    print(f"{'':24}" + "".join(f"{column:>13}" for column in (*columns, "lines/s")))
    for title, name in (("interactive alone", "alone"), ("interactive and a batch", "beside")):
        print(f"{title:24}" + "".join(f"{figures[name].get(column, math.nan):13.1f}" for column in columns), end="")
        print(f"{figures[name]['lines_per_s']:13.1f}" if name == "beside" else "")
    print(f"{'a batch alone':24}{'':{13 * len(columns)}}{figures['batch']['requests_per_s']:13.1f}")


def throughput(
    runner: asyncio.Runner, url: str, model: str, prompts: list[str], requests: list[TraceRequest], at_once: int
) -> dict[str, float]:
    """Seconds of the requests over HTTP. Raises SystemExit if one fails."""
    started = time.perf_counter()
    answers = runner.run(ask_all(url, model, prompts, requests, at_once=at_once))
    seconds = time.perf_counter() - started
    if errors := [answer.error for answer in answers if answer.error]:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0][:300]}")
    num_tokens = sum(answer.num_output_tokens for answer in answers)
    return {"seconds": seconds, "requests_per_s": len(answers) / seconds, "output_tokens_per_s": num_tokens / seconds}


def measure(runner: asyncio.Runner, url: str, model: str, requests: list[TraceRequest], title: str) -> dict[str, float]:
    """TTFT, TPOT and ITL of requests that come at their times."""
    print(f"{len(requests)} interactive requests, {title}", flush=True)
    figures = summarize(runner.run(ask_all(url, model, prose(requests), requests, at_once=len(requests))), requests)
    show(figures)
    if figures["errors"]:
        raise SystemExit(
            f"{figures['errors']:.0f} interactive requests failed: their times would be of the others only"
        )
    return {name: round(value, 3) for name, value in figures.items()}


def beside(count: int, seed: int) -> tuple[list[str], list[TraceRequest]]:
    """Prompts and lengths of the batch that runs beside: more lines than there is prose for, so some begin alike."""
    requests = lengths_of(min(count, 5000), seed)
    prompts = prose(requests)
    numbered = list(itertools.islice(itertools.cycle(zip(prompts, requests, strict=True)), count))
    return [f"{number}. {prompt}" for number, (prompt, _) in enumerate(numbered)], [request for _, request in numbered]


if __name__ == "__main__":
    main()
