"""Responses outlive whoever works on them: gateways, compute and sampler are killed, and every
event comes once, under its number.
"""

from typing import Any

import httpx
import openai
import pytest

from tests.deployment import MODEL, Deployment
from tests.waiting import wait_until

NUM_TOKENS = 250
LONG: dict[str, Any] = {
    "model": MODEL,
    "input": "The",
    "max_output_tokens": NUM_TOKENS,
    "stream": True,
    "extra_body": {"ignore_eos": True, "seed": 3},
}


def read(stream: Any, count: int) -> list[dict[str, Any]]:
    return [next(stream).to_dict() for _ in range(count)]


def rest_of(client: openai.OpenAI, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    stream = client.responses.retrieve(
        events[0]["response"]["id"], stream=True, starting_after=events[-1]["sequence_number"]
    )
    return [event.to_dict() for event in stream]


def check_whole(events: list[dict[str, Any]], text: str) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert events[-1]["response"]["usage"]["output_tokens"] == NUM_TOKENS


@pytest.mark.more
def test_a_response_goes_on_when_what_works_on_it_is_killed(deployment: Deployment) -> None:
    deployment.start_all(gateways=3, dtype="float32")
    sampler, compute = (
        next(name for name in deployment.processes if name.startswith(stage)) for stage in ("sampler", "compute")
    )
    first, second, third = deployment.ports
    undisturbed = deployment.client(third).responses.create(**LONG | {"stream": False}).output_text

    foreground = deployment.client(first).responses.create(**LONG)
    begun = read(foreground, 20)
    deployment.kill(first)
    with pytest.raises((StopIteration, httpx.HTTPError, openai.APIError)):
        read(foreground, 500)
    check_whole(begun + rest_of(deployment.client(third), begun), undisturbed)

    background = deployment.client(second).responses.create(**LONG, background=True)
    begun = read(background, 20)
    deployment.kill(second)
    deployment.kill(compute)
    deployment.kill(sampler)
    new = [deployment.start("compute", "compute-next", dtype="float32"), deployment.start("sampler", "sampler-next")]
    deployment.wait_live(*new)
    check_whole(begun + rest_of(deployment.client(third), begun), undisturbed)
    assert deployment.client(third).responses.retrieve(begun[0]["response"]["id"]).output_text == undisturbed


def test_a_background_response_without_any_gateway_is_answered(deployment: Deployment) -> None:
    deployment.start_all(dtype="float32", reader_timeout_s=0.5)
    response = deployment.client().responses.create(**LONG | {"stream": False}, background=True)
    (gateway,) = deployment.ports
    deployment.kill(gateway)
    del deployment.ports[gateway]
    with deployment.redis() as redis:
        wait_until(
            lambda: redis.xlen(f"prompts:{MODEL}") == 0 and redis.xlen(f"log:{response.id}.0") == NUM_TOKENS,
            description="it has run",
            timeout_s=60,
        )
    deployment.start("gateway", "gateway-next")
    wait_until(lambda: deployment.get("/ready").status_code == 200, description="another gateway", timeout_s=60)
    done = deployment.client().responses.retrieve(response.id)
    assert (done.status, done.usage.output_tokens) == ("incomplete", NUM_TOKENS)
