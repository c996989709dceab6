"""Is every line of a batch answered once, with its own text, whoever is killed? Real processes,
`kill -9` and SIGTERM drawn from a seed.

Method: start a deployment with two workers, ask each of the prompts once over HTTP, without any
fault; then have a batch of many lines with these prompts answered, while one process after the
other is killed: workers, every stage, and Redis. A batch that ends before the kills are used up is
followed by another. At the end every line must be there once, among the completed ones, with the
text that was learned; no request may be left in the pipeline, and no key without a TTL.

    python -m tests.chaos.batches [--lines 2000] [--kills 50] [--seed 7]

The last line is one JSON document; the exit code is 1 if anything was wrong.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.cluster import Cluster
from tests.chaos.options import parse
from tests.chaos.store import Store
from tests.conftest import leaked_keys

Json = dict[str, Any]

URL = "/v1/completions"
NUM_PROMPTS, MAX_TOKENS = 40, 24
VICTIMS = {"jobs": 6, "compute": 3, "sampler": 3, "tokenizer": 2, "gateway": 2, "redis": 1}  # how often which
PAUSE_S = (0.5, 3.0)  # between two kills
PATIENCE_S = 180.0  # for the batch to end once nothing is killed any more
COUNTS = {"sampler": 2, "tokenizer": 1, "compute": 1, "gateway": 1, "jobs": 2}


@dataclass(slots=True)
class Run:
    """The run so far, and what was wrong."""

    cluster: Cluster
    rng: random.Random
    model: str = ""
    known: dict[str, str] = field(default_factory=dict)  # text by prompt
    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_lines: int = 0

    def gateway(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.cluster.of('gateway')[0].port}", timeout=20, trust_env=False
        )

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """An answer of the gateway, asked until it is alive."""
        until = time.monotonic() + PATIENCE_S
        while True:
            with suppress(httpx.HTTPError):
                async with self.gateway() as client:
                    reply = await client.request(method, path, **options)
                if reply.status_code == 200:
                    return reply
                if reply.status_code < 500 and reply.status_code != 429:
                    raise AssertionError(f"{method} {path}: {reply.status_code} {reply.text[:300]}")
            if time.monotonic() > until:
                raise AssertionError(f"{method} {path}: no answer")
            await asyncio.sleep(0.2)


def body_of(model: str, number: int) -> Json:
    return {
        "model": model,
        "prompt": f"Penstock, part {number % NUM_PROMPTS}:",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8,
        "seed": number % NUM_PROMPTS,
    }


async def learn(run: Run) -> None:
    run.model = (await run.call("GET", "/v1/models")).json()["data"][0]["id"]
    for number in range(NUM_PROMPTS):
        body = body_of(run.model, number)
        run.known[body["prompt"]] = (await run.call("POST", URL, json=body)).json()["choices"][0]["text"]


async def kill(run: Run, count: int) -> None:
    """One process after the other: half of the time once all are back, on a machine however slow,
    and half of the time at once.
    """
    while run.kills.total() < count:
        if run.rng.random() < 0.5:
            await run.cluster.wait_ready()
        await asyncio.sleep(run.rng.uniform(*PAUSE_S))
        victim = run.rng.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        if victim == "redis":
            async with run.cluster.store.lock:
                run.cluster.store.kill()
                await asyncio.sleep(run.rng.uniform(0.1, 1.0))
                await run.cluster.store.start()
        else:
            alive = [slot for slot in run.cluster.of(victim) if slot.is_alive and slot.leaving_since is None]
            if not alive:
                continue
            slot = run.rng.choice(alive)
            if run.rng.random() < 0.2 and await run.cluster.is_live(slot):
                run.cluster.leave(slot)
            else:
                run.cluster.kill(slot)
        run.kills[victim] += 1


async def answer(run: Run, num_lines: int) -> None:
    """One batch, from its file to its answers."""
    lines = [
        {"custom_id": f"line-{number:05}", "method": "POST", "url": URL, "body": body_of(run.model, number)}
        for number in range(num_lines)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = (
        await run.call("POST", "/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
    ).json()
    batch = (
        await run.call(
            "POST", "/v1/batches", json={"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        )
    ).json()
    started, told = time.monotonic(), 0.0
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(0.5)
        batch = (await run.call("GET", f"/v1/batches/{batch['id']}")).json()
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(
                f"{told - started:6.1f} s  {batch['status']:12} {batch['request_counts']['completed']:6} lines, "
                f"{run.kills.total():3} kills",
                flush=True,
            )
    found = [
        json.loads(line)
        for name in ("output_file_id", "error_file_id")
        if batch[name]
        for line in await lines_of(run, batch[name])
    ]
    check(run, batch, lines, found)
    run.num_lines += num_lines
    print(f"{time.monotonic() - started:6.1f} s  {batch['status']:12} {batch['request_counts']}", flush=True)


async def lines_of(run: Run, file_id: str) -> list[str]:
    return (await run.call("GET", f"/v1/files/{file_id}/content")).text.splitlines()


def check(run: Run, batch: Json, asked: list[Json], found: list[Json]) -> None:
    counts = Counter(line["custom_id"] for line in found)
    prompts = {line["custom_id"]: line["body"]["prompt"] for line in asked}
    run.wrong += [f"answered {counts[custom_id]} times: {custom_id}" for custom_id in prompts if counts[custom_id] != 1]
    run.wrong += [f"never asked: {custom_id}" for custom_id in counts if custom_id not in prompts]
    if batch["status"] != "completed" or batch["request_counts"] != {
        "total": len(asked),
        "completed": len(asked),
        "failed": 0,
    }:
        run.wrong.append(f"the batch is {batch['status']}: {batch['request_counts']}")
    for line in found:
        if line["response"] is None or line["response"]["status_code"] != 200:
            run.wrong.append(f"not answered: {json.dumps(line)[:300]}")
        elif line["response"]["body"]["choices"][0]["text"] != run.known[prompts[line["custom_id"]]]:
            run.wrong.append(f"another text: {json.dumps(line)[:300]}")


async def check_rest(run: Run) -> None:
    """Nothing is left behind, once all is quiet."""
    until = time.monotonic() + 30
    async with run.cluster.store.client() as client:
        while left := [key.decode() for key in await client.keys("inflight:*")]:
            if time.monotonic() > until:
                run.wrong.append(f"still in the pipeline: {left}")
                break
            await asyncio.sleep(0.5)
    run.wrong += [f"a key without a TTL: {key}" for key in await asyncio.to_thread(leaked_keys, run.cluster.store.url)]


async def main(args: argparse.Namespace, folder: Path) -> int:
    options = replace(parse(["--seed", str(args.seed)]), counts=COUNTS)
    run = Run(
        Cluster(options, folder, Store(folder / "redis"), random.Random(f"{args.seed}:supervisor")),
        random.Random(args.seed),
    )
    supervising: asyncio.Task[None] | None = None
    started = time.monotonic()
    try:
        await run.cluster.start()
        supervising = asyncio.create_task(run.cluster.supervise())
        await learn(run)
        killing = asyncio.create_task(kill(run, args.kills))
        while not run.num_lines or not killing.done():
            await answer(run, args.lines)
        await killing
        await run.cluster.heal()
        await check_rest(run)
        run.wrong += run.cluster.take_crashes()
    finally:
        if supervising is not None:
            supervising.cancel()
        run.cluster.close()
    for each in run.wrong[:20]:
        print(f"WRONG: {each}")
    print(
        f"{'ok' if not run.wrong else f'{len(run.wrong)} WRONG'}: {run.num_lines} lines, {run.kills.total()} kills; "
        f"again with --seed {args.seed}"
    )
    done = {
        "ok": not run.wrong,
        "lines": run.num_lines,
        "kills": dict(run.kills),
        "restarts": run.cluster.num_restarts,
        "seed": args.seed,
    }
    print(json.dumps(done | {"seconds": round(time.monotonic() - started, 1)}))
    return 1 if run.wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.batches", description="Batches while workers and stages are killed."
    )
    parser.add_argument("--lines", type=int, default=2000, help="of a batch (default: %(default)d)")
    parser.add_argument("--kills", type=int, default=50, help="default: %(default)d")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(1_000_000),
        help="draws the kills (default: random, and printed)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="for logs, files and Redis's data, left behind (default: a temporary one); a short path",
    )
    parsed = parser.parse_args()
    place = parsed.folder or Path(tempfile.mkdtemp(prefix="batch-chaos-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        sys.exit(asyncio.run(main(parsed, place)))
    finally:
        if parsed.folder is None:
            shutil.rmtree(place, ignore_errors=True)
