"""How much slower is a tenant's small request while another tenant floods?

Two tenants have a key each. One asks for a few tokens every second, alone and then during each
flood. The ratios compare medians, to the first token and to the end. The bound is 2, to the end: a
request that comes in the middle of a step waits for it, and a step in which the flood was alone is
as long as a full batch makes it. The flood's own requests may be refused (429, 503).

    python -m tests.chaos.fairness [--model PATH] [--flood many,n,beyond,long,read,batch] [--seconds 20] [--most 2]

The last line is one JSON document. The exit code is 1 if a ratio is beyond the bound. Run it on an
idle machine.
"""

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx

from services.requests.store.tenants.api_keys import add_key
from tests.chaos.floods import FLOODS
from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment

NUMBERS = itertools.count(
    1
)  # of small requests: none repeats another, or its drafts would be right whenever it runs alone
PERIOD_S = 1.0  # between two small requests
HEAD_START_S = 5.0  # of the flood
LONGEST_S = 120.0  # for one small request


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians of the small request, in s; missing: those that did not end in LONGEST_S, or were
    refused.
    """

    first_token_s: float
    end_s: float
    num_asked: int
    num_missing: int

    def times(self, alone: "Figures") -> tuple[float, float]:
        """To the first token, and to the end."""
        return self.first_token_s / alone.first_token_s, self.end_s / alone.end_s


async def measure(client: httpx.AsyncClient, seconds: float) -> Figures:
    """Ask every second, whether the last one has ended or not."""
    until, asked = time.monotonic() + seconds, []
    while time.monotonic() < until:
        asked.append(asyncio.create_task(ask_small(client)))
        await asyncio.sleep(PERIOD_S)
    found = [each for each in await asyncio.gather(*asked) if each is not None]
    firsts, ends = [first for first, _ in found] or [LONGEST_S], [end for _, end in found] or [LONGEST_S]
    return Figures(median(firsts), median(ends), len(asked), len(asked) - len(found))


async def ask_small(client: httpx.AsyncClient) -> tuple[float, float] | None:
    """Seconds to the first token and to the end."""
    number = next(NUMBERS)
    body = {
        "model": MODEL,
        "prompt": f"Ship {number} is",
        "max_tokens": 16,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": number,
        "stream": True,
    }
    began, first = time.monotonic(), 0.0
    with suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=body, timeout=LONGEST_S) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {") and not first:
                    first = time.monotonic() - began
                if line == "data: [DONE]" and first:
                    return first, time.monotonic() - began
    return None


@contextmanager
def flooded(name: str, url: str, key: str) -> Iterator[None]:
    """While a process floods. Raises RuntimeError if it has ended by itself."""
    process = subprocess.Popen([sys.executable, "-m", "tests.chaos.floods", name, url, key])
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the flood {name!r} has ended, with {process.returncode}")
    finally:
        process.kill()
        process.wait()


async def run(url: str, keys: dict[str, str], floods: list[str], seconds: float, most: float) -> int:
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {keys['small']}"}, trust_env=False
    ) as small:
        await measure(small, 3)  # the first ones warm up
        print(f"{'flood':10}{'first token, s':>16}{'ratio':>8}{'end, s':>10}{'ratio':>8}{'asked':>8}{'missing':>9}")
        found = {}
        for name in floods:
            alone = await measure(small, seconds)  # before each: whatever else the machine does, both have it
            show("none", alone, alone)
            with flooded(name, url, keys["flood"]):
                await asyncio.sleep(HEAD_START_S)
                figures = await measure(small, seconds)
            found[name] = {**asdict(figures), "alone": asdict(alone), "ratio": figures.times(alone)[1]}
            show(name, figures, alone)
            await quiet(small, alone)
    is_fair = all(each["ratio"] <= most and not each["num_missing"] for each in found.values())
    print("fair" if is_fair else f"UNFAIR: beyond {most:g} times, or not answered")
    print(json.dumps({"ok": is_fair, "most": most, "floods": found}))
    return 0 if is_fair else 1


def show(name: str, found: Figures, alone: Figures) -> None:
    first, end = found.times(alone)
    print(
        f"{name:10}{found.first_token_s:>16.3f}{first:>8.2f}{found.end_s:>10.3f}{end:>8.2f}{found.num_asked:>8}{found.num_missing:>9}",
        flush=True,
    )


async def quiet(client: httpx.AsyncClient, alone: Figures) -> None:
    """Until a small request is as quick as alone: the flood's last ones have ended."""
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        taken = await ask_small(client)
        if taken is not None and taken[1] < 1.5 * alone.end_s:
            return


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fairness", description=__doc__.splitlines()[0])
    parser.add_argument("--flood", default=",".join(FLOODS), help="which, joined by commas (default: %(default)s)")
    parser.add_argument(
        "--model", help="a folder or GGUF file to serve (default: the demo model, of which a step takes 1 ms)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default: %(default)g)")
    parser.add_argument("--most", type=float, default=2.0, help="the largest ratio that is fair (default: %(default)g)")
    args = parser.parse_args()
    floods = args.flood.split(",")
    if unknown := sorted(set(floods) - set(FLOODS)):
        parser.error(f"no flood {', '.join(unknown)}; there are {', '.join(FLOODS)}")
    settings = {"dtype": "bfloat16", "publish_interval_ms": 20} | (
        {"model": args.model, "served_model_name": MODEL} if args.model else {}
    )
    with tempfile.TemporaryDirectory() as name, running_redis((folder := Path(name)) / "redis", None) as redis_url:
        keys = {tenant: add_key(folder / "keys.json", tenant) for tenant in ("small", "flood")}
        deployment = Deployment(redis_url, folder, programs={})
        try:
            for stage in ("sampler", "tokenizer", "compute", "gateway", "jobs"):
                deployment.start(stage, f"{stage}-1", keys_file=folder / "keys.json", **settings)
            deployment.wait_live(*(f"{stage}-1" for stage in ("sampler", "tokenizer", "compute", "gateway", "jobs")))
            return asyncio.run(run(deployment.url(), keys, floods, args.seconds, args.most))
        finally:
            deployment.stop()


if __name__ == "__main__":
    sys.exit(main())
