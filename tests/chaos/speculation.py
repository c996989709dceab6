"""Does any text change with drafts, even if compute is killed meanwhile?

Method: so many requests of mixed parameters, of the kinds that chaos has (specs.py), and some that
repeat themselves, to `penstock up` with `--speculate off`, then to one with `auto` (or as
`--speculate` says) whose compute is killed (SIGKILL) at equal distances, while requests are under
way. What is compared of each: every choice as it came, with its logprobs and its finish reason, and
how many tokens it had. A request that fails counts as one that differs.

    python -m tests.chaos.speculation [--requests 1000] [--kills 2] [--model demo] [--speculate auto]

The last line is one JSON document. The exit code is 1 if anything differed, if a kill found nobody
under way, or if nothing was drafted.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.specs import COMPLETIONS, KINDS, TOPICS, Spec, make_spec
from tests.pipeline.up import Up

OF_RESPONSES = ("response", "background")  # kinds of another API
TIMEOUT_S = 900.0  # of a request: compute may start again meanwhile, twice, on a slow machine
DRAFTED = re.compile(r"^penstock_spec_decode_num_(draft|accepted)_tokens_total\S* (\S+)$", re.MULTILINE)


@dataclass
class Run:
    """The requests, at one server."""

    up: Up
    at_once: int
    kills_at: list[int]  # answers that there are when compute is killed
    num_answers: int = 0
    num_under_way: int = 0
    hit: tuple[int, ...] = ()  # by kill: requests under way
    drafted: int = 0  # tokens, as far as replicas had reported them
    accepted: int = 0

    async def answer(self, specs: list[Spec]) -> list[Any]:
        """Send all, and return by request what is compared."""
        places = asyncio.Semaphore(self.at_once)
        limits = httpx.Limits(max_connections=self.at_once + 1)
        async with httpx.AsyncClient(base_url=self.up.url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
            found = await asyncio.gather(*(self._ask(client, places, spec) for spec in specs))
            await asyncio.sleep(2.0)  # the last reports
            await self._count_drafts(client)
        return found

    async def _ask(self, client: httpx.AsyncClient, places: asyncio.Semaphore, spec: Spec) -> Any:
        async with places:
            self.num_under_way += 1
            reply = await client.post(spec.path, json=spec.body)
            self.num_under_way -= 1
        self.num_answers += 1
        if self.kills_at and self.num_answers >= self.kills_at[0]:
            self.kills_at.pop(0)
            await self._count_drafts(client)
            self._kill()
        if reply.status_code != 200:
            return reply.text
        answer = reply.json()
        return [*answer["choices"], answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]]

    def _kill(self) -> None:
        for process in self.up.children():
            if process.cmdline()[-1:] == ["services.compute"]:
                process.kill()
        self.hit += (self.num_under_way,)
        print(f"compute killed after {self.num_answers} answers, with {self.num_under_way} under way", flush=True)

    async def _count_drafts(self, client: httpx.AsyncClient) -> None:
        """Add what replicas have drafted; those that die report no more."""
        counts = DRAFTED.findall((await client.get("/metrics")).text)
        self.drafted += sum(int(float(value)) for name, value in counts if name == "draft")
        self.accepted += sum(int(float(value)) for name, value in counts if name == "accepted")


def make_requests(model: str, count: int, longest: int, seed: int) -> list[Spec]:
    """longest: tokens of an answer."""
    rng = random.Random(f"{seed}:speculation")
    kinds = [kind for kind in KINDS if kind not in OF_RESPONSES]
    specs: list[Spec] = []
    for number in range(count):
        kind = rng.choice([*kinds, "repeats", "repeats"])
        spec = repeating(str(number), model, rng) if kind == "repeats" else make_spec(str(number), kind, model, rng)
        spec.body["max_tokens"] = min(spec.body["max_tokens"], longest)
        specs.append(spec)
    return specs


def repeating(name: str, model: str, rng: random.Random) -> Spec:
    topic = rng.choice(TOPICS)
    prompt = f"{topic} and {rng.choice(TOPICS)}, " * rng.randrange(2, 6) + topic
    body = {
        "model": model,
        "prompt": prompt,
        "seed": rng.randrange(1 << 32),
        "max_tokens": rng.choice([40, 80, 120]),
        "temperature": rng.choice([0, 0.3, 0.8]),
    }
    return Spec(name, "repeats", COMPLETIONS, body | {"ignore_eos": True})


async def compare(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, Run] = {}
    found: dict[str, list[Any]] = {}
    kills_at = [args.requests * number // (args.kills + 1) for number in range(1, args.kills + 1)]
    began = time.monotonic()
    for mode in ("off", args.speculate):
        with tempfile.TemporaryDirectory() as folder:
            up = Up(Path(folder), "--speculate", mode, model=args.model, num_threads=args.threads)
            try:
                async with httpx.AsyncClient(base_url=up.url, timeout=60, trust_env=False) as client:
                    model = (await client.get("/v1/models")).json()["data"][0]["id"]
                runs[mode] = run = Run(up, args.at_once, [] if mode == "off" else kills_at)
                found[mode] = await run.answer(make_requests(model, args.requests, args.tokens, args.seed))
            finally:
                up.end()
        print(f"{mode}: {run.num_answers} answers, {run.accepted} of {run.drafted} drafts stood", flush=True)
    run = runs[args.speculate]
    pairs = list(zip(found["off"], found[args.speculate], strict=True))
    different = [number for number, (one, other) in enumerate(pairs) if one != other or isinstance(one, str)]
    for number in different[:3]:
        print(f"request {number}:\n  {str(pairs[number][0])[:400]}\n  {str(pairs[number][1])[:400]}")
    return {
        "model": args.model,
        "requests": args.requests,
        "different": len(different),
        "kills": len(run.hit),
        "under_way": list(run.hit),
        "drafted": run.drafted,
        "accepted": run.accepted,
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Texts with drafts and kills of compute, and without either.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--speculate", default="auto", help="as compute takes it (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=16, help="requests under way (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=120, help="of an answer, at most (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = asyncio.run(compare(args))
    print(json.dumps(result))
    return int(
        bool(result["different"])
        or len(result["under_way"]) != args.kills
        or 0 in result["under_way"]
        or not result["accepted"]
    )


if __name__ == "__main__":
    sys.exit(main())
