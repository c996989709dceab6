"""Does the time of a refusal tell how much of a key was right?

Three wrong keys are tried in turns: one that shares nothing with a true key, one that shares all
but the last character, and one of another length. Welch's t test compares their times, without the
slowest tenth of each.
"""

import math
import secrets
import time
from statistics import mean, variance

import httpx

from services.requests.store.tenants.api_keys import PREFIX

ROUNDS = 600  # of one try of each
DROPPED = 0.1  # the share of the slowest, which the machine made slow
MOST_T = 5.0  # what chance does not reach in two comparisons


async def tell_apart(url: str, key: str) -> str:
    """Says what the times tell, in words; empty: nothing."""
    tries = {
        "nothing of it": PREFIX + secrets.token_urlsafe(32),
        "all but the last character": key[:-1] + ("A" if key[-1] != "A" else "B"),
        "a tenth": key[: len(key) // 10],
    }
    times: dict[str, list[float]] = {name: [] for name in tries}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        for _ in range(ROUNDS):
            for name, tried in tries.items():
                began = time.perf_counter()
                reply = await client.get("/v1/models", headers={"Authorization": f"Bearer {tried}"})
                times[name].append(time.perf_counter() - began)
                if reply.status_code != 401:
                    return f"a wrong key is answered with {reply.status_code}"
    first, *others = times
    for other in others:
        if abs(t := welch(times[first], times[other])) > MOST_T:
            return f"the time of a refusal tells {other!r} of a key from {first!r}: t = {t:.1f}"
    return ""


def welch(a: list[float], b: list[float]) -> float:
    """Welch's t of two samples, without their slowest."""
    a, b = (sorted(each)[: int(len(each) * (1 - DROPPED))] for each in (a, b))
    return (mean(a) - mean(b)) / math.sqrt(variance(a) / len(a) + variance(b) / len(b))
