"""`python -m tests.hostile.checks`: what 31 answers of one tenant, the checks of which would never
end, do to another's answer.

A part of `make verify SUITE=hostile`.
"""

import json
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from services.requests.store.tenants.api_keys import add_key
from services.requests.workers.grammars.answers import CHECK_TIMEOUT_S
from tests.deployment import MODEL, Deployment
from tests.hostile.cast import running
from tests.waiting import wait_until

COUNT = 31
ROUNDS = 15
PAUSE_S = 0.3  # for the last tokens of the slow answers: their checks take CHECK_TIMEOUT_S
MOST_TIMES = 1.5  # what the other's answer takes alone
SLOW = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^a{40}!$"}},
    "required": ["a"],
    "additionalProperties": False,
    "not": {"properties": {"a": {"pattern": "^(a+)+$"}}},
}
LIST = {
    "type": "array",
    "items": {"enum": [f"item {number}" for number in range(9)]},
    "minItems": 8,
    "maxItems": 8,
    "uniqueItems": True,
}


def asked(client: httpx.Client, schema: Any, seen: threading.Semaphore | None = None) -> tuple[float, float]:
    """The seconds that an answer takes, and those of them after its last text."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "response_format": form,
        "max_tokens": 300,
        "temperature": 0,
        "stream": True,
    }
    began = last = time.monotonic()
    told = []
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if '"content":"' in line:
                last = time.monotonic()
            if seen is not None and "!" in line:
                seen.release()
            if '"schema_errors"' in line:
                told.append(json.loads(line.removeprefix("data: ")))
    assert len(told) == 1 or seen is None
    return time.monotonic() - began, time.monotonic() - last


def checks(deployment: Deployment) -> list[str]:
    """Say what is wrong, in words."""
    slow, other = (
        httpx.Client(
            base_url=deployment.url(), headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=120
        )
        for key in [add_key(deployment.folder / "keys.json", name) for name in ("slow", "brief")]
    )
    wait_until(
        lambda: all(each.get("/v1/models").status_code == 200 for each in (slow, other)),
        description="the keys are known",
    )
    asked(other, LIST)
    alone, beside, held = [], [], []
    for _ in range(ROUNDS):
        alone.append(asked(other, LIST)[0])
        seen = threading.Semaphore(0)
        with ThreadPoolExecutor(COUNT) as pool:
            answers = [pool.submit(asked, slow, SLOW, seen) for _ in range(COUNT)]
            for _ in range(COUNT):
                seen.acquire()
            time.sleep(PAUSE_S)
            beside.append(asked(other, LIST)[0])
            held += [each.result()[1] for each in answers]
    once, busy = statistics.median(alone), statistics.median(beside)
    print(
        f"{COUNT} slow checks: another's answer takes {busy:.2f} s, alone {once:.2f} s; each of the {COUNT} waits "
        f"{max(held):.2f} s at most",
        flush=True,
    )
    faults = []
    if busy > MOST_TIMES * once:
        faults.append(f"beside {COUNT} slow checks, another's answer takes {busy:.2f} s, alone {once:.2f}")
    if statistics.median(held) > CHECK_TIMEOUT_S + 1.0:
        faults.append(f"an answer waits {statistics.median(held):.2f} s for its check")
    return faults


if __name__ == "__main__":
    with running() as deployment:
        faults = checks(deployment)
    print(*faults, "checks " + ("FAILED" if faults else "passed"), sep="\n")
    sys.exit(bool(faults))
