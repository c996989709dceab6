"""`python -m tests.hostile.replays`: what one tenant's 400 replays at once of a response that has
ended do to another's request.

A part of `make verify SUITE=hostile`.
"""

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx

from services.requests.store.tenants.api_keys import add_key
from tests.deployment import MODEL, Deployment
from tests.hostile.cast import running
from tests.waiting import wait_until

COUNT = 400
ROUNDS = 7
MOST = 2.0  # times what the other's request takes beside as many of the cheapest reads
CHEAPEST = "/v1/models"
SMALL: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is Penstock?"}],
    "max_tokens": 3,
    "temperature": 0,
}
LONG = {
    "model": MODEL,
    "input": "Tell me everything.",
    "background": True,
    "max_output_tokens": 700,
    "logit_bias": {"0": -100},
    "ignore_eos": True,
}


def made(client: httpx.Client) -> str:
    """A long response in the background, once it has ended."""
    reply = client.post("/v1/responses", json=LONG)
    assert reply.status_code == 200, reply.text
    response_id: str = reply.json()["id"]
    wait_until(
        lambda: client.get(f"/v1/responses/{response_id}").json()["status"] in ("completed", "incomplete"),
        description="it has ended",
        timeout_s=120,
    )
    return response_id


def took(client: httpx.Client) -> float:
    began = time.monotonic()
    client.post("/v1/chat/completions", json=SMALL).raise_for_status()
    return time.monotonic() - began


def replays(deployment: Deployment) -> list[str]:
    """Say what is wrong, in words."""
    keys = [add_key(deployment.folder / "keys.json", name) for name in ("again", "other")]
    again, other = (
        httpx.Client(
            base_url=deployment.url(), headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=120
        )
        for key in keys
    )
    wait_until(
        lambda: all(each.get("/v1/models").status_code == 200 for each in (again, other)),
        description="the keys are known",
    )
    response_id, medians = made(again), {}
    alone = statistics.median(took(other) for _ in range(ROUNDS))
    for path in (CHEAPEST, f"/v1/responses/{response_id}?stream=true", f"/v1/responses/{response_id}"):
        command = [sys.executable, "-m", "tests.hostile.crowd", deployment.url(), keys[0], path, str(COUNT)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
            assert crowd.stdin is not None and crowd.stdout is not None
            beside, found = [], {}
            for _ in range(ROUNDS):
                crowd.stdin.write("go\n")
                crowd.stdin.flush()
                assert crowd.stdout.readline() == "sent\n"
                beside.append(took(other))
                found = json.loads(crowd.stdout.readline())
        times = ", ".join(f"{each:.2f}" for each in sorted(beside))
        print(
            f"{COUNT} of {path.replace(response_id, 'ID')} at once ({found}): another's request takes {times} s, "
            f"alone {alone:.2f}",
            flush=True,
        )
        medians[path] = statistics.median(beside)
    least = medians.pop(CHEAPEST)
    return [
        f"{COUNT} replays at once: another's request takes {each:.2f} s, beside reads {least:.2f}"
        for each in medians.values()
        if each > MOST * least
    ]


if __name__ == "__main__":
    with running() as deployment:
        faults = replays(deployment)
    print(*faults, "replays " + ("FAILED" if faults else "passed"), sep="\n")
    sys.exit(bool(faults))
