"""The worth of affinity: how much of the prompts several compute replicas find in their prefix
caches, the time to the first token, and how evenly they work.

Method: `penstock up` and more compute replicas beside it, with a thread each. Users talk at the
same time, each with pauses: a conversation begins with one of a few system prompts, and every turn
repeats all before it. The same users talk to one replica alone; to several with affinity; and to
several that read one stream, where any free one takes the next prompt. Then prompts that have
nothing in common come at random times, with affinity and without.

    python -m bench.affinity --model FILE_OR_FOLDER [--replicas 2] [--users 8] [--turns 5] [--words 150]
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.kv_disk import words
from bench.pipeline import Served
from services.operator.redis_server import url_of
from shared.wire.registry import look
from shared.wire.replica import Replica

LIVE_S = 120.0
SYSTEMS = 4  # system prompts
ANSWER = 16  # tokens


@dataclass
class Figures:
    """The clients' figures."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    texts: list[str] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


class Fleet:
    """A deployment with some compute replicas."""

    def __init__(self, model: str, folder: Path, num_replicas: int, *, has_affinity: bool, threads: int) -> None:
        folder.mkdir()
        os.environ["PENSTOCK_PREFIX_AFFINITY"] = str(has_affinity)
        self.served = Served(["--model", model, "--num-threads", str(threads)], folder, "")
        self.others: list[subprocess.Popen[bytes]] = []
        try:
            command = [
                sys.executable,
                "-m",
                "services.operator.cli",
                "serve",
                "compute",
                "--model",
                model,
                "--num-threads",
                str(threads),
            ]
            environment = {**os.environ, "PENSTOCK_LOG_LEVEL": "error", "PENSTOCK_REDIS_URL": url_of(folder / "data")}
            self.others += [subprocess.Popen(command, env=environment) for _ in range(num_replicas - 1)]
            deadline = time.monotonic() + LIVE_S
            while len(self.computes()) < num_replicas:
                if time.monotonic() > deadline:
                    raise SystemExit("the replicas do not come up")
                time.sleep(0.2)
            self.url = f"http://127.0.0.1:{self.served.port}/v1"
            self.model = httpx.get(f"{self.url}/models", trust_env=False).json()["data"][0]["id"]
        except BaseException:
            self.close()
            raise

    def computes(self) -> list[Replica]:
        return look(self.served.redis).of("compute")

    def close(self) -> None:
        for process in self.others:
            process.terminate()
            process.wait(30)
        self.served.close()


async def ask(client: httpx.AsyncClient, fleet: Fleet, figures: Figures | None, prompt: str) -> str:
    body = {
        "model": fleet.model,
        "prompt": prompt,
        "max_tokens": ANSWER,
        "seed": 0,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_at, first_at, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    async with client.stream("POST", f"{fleet.url}/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                first_at = first_at or (time.perf_counter() if text else 0.0)
                usage = event.get("usage") or usage
    if figures is not None:
        figures.ttft_s.append(first_at - started_at)
        figures.prompt_tokens += usage["prompt_tokens"]
        figures.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        figures.texts.append(text)
    return text


async def talk(client: httpx.AsyncClient, fleet: Fleet, figures: Figures, user: int, args: argparse.Namespace) -> None:
    """A user's conversations, one after another."""
    rng = random.Random(user)
    for number in range(args.conversations):
        text = words(args.words, rng.randrange(SYSTEMS))
        for turn in range(args.turns):
            await asyncio.sleep(rng.expovariate(1 / args.pause))
            text += " " + words(10, 100 * (100 * user + number) + turn + 50_000)
            text += await ask(client, fleet, figures, text)


async def run(fleet: Fleet, args: argparse.Namespace) -> tuple[Figures, list[float]]:
    """Conversations; then prompts without a common prefix. Returns figures of the former, and each
    replica's share of the latter's tokens.
    """
    figures, rng = Figures(), random.Random(0)
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        for number in range(4 * args.replicas):  # every replica has measured its steps
            await asyncio.gather(
                *(
                    ask(client, fleet, None, words(args.words // 2, 1000 + 10 * number + each))
                    for each in range(args.replicas)
                )
            )
        await asyncio.sleep(2)
        await asyncio.gather(*(talk(client, fleet, figures, user, args) for user in range(args.users)))
        await asyncio.sleep(2)
        before = {each.replica_id: each.load.prompt_tokens or 0.0 for each in fleet.computes()}

        async def later(number: int) -> None:
            await asyncio.sleep(rng.uniform(0, args.alone * args.pause / args.users))
            await ask(client, fleet, None, words(args.words, 10_000 + number))

        await asyncio.gather(*(later(number) for number in range(args.alone)))
        await asyncio.sleep(2)
        worked = [(each.load.prompt_tokens or 0.0) - before[each.replica_id] for each in fleet.computes()]
    return figures, [each / max(1.0, sum(worked)) for each in worked]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, num_replicas, has_affinity in (
        ("one", 1, True),
        ("affinity", args.replicas, True),
        ("one stream", args.replicas, False),
    ):
        fleet = Fleet(
            args.model,
            folder / name.replace(" ", "-"),
            num_replicas,
            has_affinity=has_affinity,
            threads=args.replicas if num_replicas == 1 else 1,
        )
        try:
            figures, shares = asyncio.run(run(fleet, args))
            stolen = sum(each.load.stolen or 0 for each in fleet.computes())
        finally:
            fleet.close()
        ttft = statistics.quantiles(figures.ttft_s, n=10)
        found[name] = {
            "hit_rate": figures.hit_rate,
            "ttft_p50_ms": 1000 * ttft[4],
            "ttft_p90_ms": 1000 * ttft[8],
            "requests": len(figures.ttft_s),
            "stolen": stolen,
            "largest_share": max(shares),
            "texts": hash(tuple(sorted(figures.texts))),
        }
        print(
            f"{name:12}",
            "  ".join(f"{key} {value:.3f}" for key, value in found[name].items() if key != "texts"),
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What is affinity worth?")
    parser.add_argument("--model", required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument(
        "--conversations", type=int, default=3, help="of a user, one after another (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--words", type=int, default=150, help="of a system prompt, of some 3.3 tokens each (default: %(default)s)"
    )
    parser.add_argument(
        "--pause", type=float, default=4.0, help="mean seconds before a user's turn (default: %(default)s)"
    )
    parser.add_argument(
        "--alone", type=int, default=60, help="prompts that have nothing in common (default: %(default)s)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(args, Path(temporary))
    if len({each.pop("texts") for each in found.values()}) != 1:
        raise SystemExit("other bytes")
    print(json.dumps({"model": args.model, "replicas": args.replicas, "found": found}))


if __name__ == "__main__":
    main()
