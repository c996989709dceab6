"""A gateway that lets requests wait for replicas, while none of them comes."""

import httpx
import pytest

from shared.wire.entries import append_to_group
from shared.wire.streams import SERVED, GroupStream, prompts, requests, served_key
from tests.deployment import Deployment
from tests.gateway.backstage import ALIAS, NAME, STAGES, Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.streams import BODY, streaming
from tests.waiting import wait_until

WHOLE = BODY | {"stream": False, "stream_options": None}
WAIT_S = 1


@pytest.fixture
def served(deployment: Deployment, own: Backstage) -> Backstage:
    """A model that was served, and whose replicas are gone; one of two gateways is new."""
    start_gateways(deployment, wait_for_replicas_s=WAIT_S)
    for stream in (requests(NAME), prompts(NAME)):
        own.client.xgroup_create(stream.key, stream.group, id="0", mkstream=True)
    wait_until(
        lambda: all(own.client.exists(served_key(stage, NAME)) for stage in STAGES),
        description="the replicas are remembered",
    )
    own.leave()
    wait_until(lambda: not deployment.registry().of("compute"), description="no replica is alive")
    deployment.start("gateway", "gateway-2", ping_interval_s=0.4, wait_for_replicas_s=WAIT_S)
    wait_until(
        lambda: deployment.get("/ready", "gateway-2").status_code == 200,
        description="the new gateway is ready without a pipeline",
    )
    return own


def test_a_request_that_nobody_takes_ends_with_one_clear_error(deployment: Deployment, served: Backstage) -> None:
    """With a reader, in the background, and after its gateway has died. Redis still knows then how much waits."""
    served.client.xadd(requests(NAME).key, {"m": b"\xff", "r": b"\xff.0", "g": b"\xff"})  # nobody's, and no text
    refused = deployment.post("/v1/completions", WHOLE)
    assert refused.status_code == 503 and refused.headers["Retry-After"]
    assert refused.json()["error"] == {
        "message": f"no tokenizer of the model {NAME} was there within {WAIT_S} s: try again later",
        "type": "unavailable_error",
        "param": None,
        "code": "no_replica",
    }
    background = deployment.post("/v1/responses", {"model": ALIAS, "input": "Water", "background": True}).json()["id"]
    with streaming(deployment, gateway="gateway-1") as stream:
        wait_until(lambda: ": starting" in stream.lines, description="the stream says why it waits")
        deployment.kill("gateway-1")
    del deployment.ports["gateway-1"]
    wait_until(lambda: served.held() == 0, description="the other gateway has ended them all")
    assert deployment.get(f"/v1/responses/{background}").json()["status"] == "failed"
    assert waiting_in(served, requests(NAME)) == (0, 0, 0)


def test_a_prompt_waits_for_compute_no_longer_than_its_request_may_and_what_is_taken_stays(
    deployment: Deployment, served: Backstage
) -> None:
    """The tokenizer came, and hands two requests on; compute takes the first, and is gone."""
    stream = prompts(NAME)
    with streaming(deployment, n=2) as answer:
        pipe = served.client.pipeline(transaction=True)
        for request in served.take(2):
            append_to_group(pipe, stream, request)
        pipe.delete(requests(NAME).key)
        pipe.xreadgroup(stream.group, "compute-1", {stream.key: ">"}, count=1)
        pipe.execute()
        wait_until(lambda: answer.error is not None, description="the second has waited for too long")
        assert answer.error["code"] == "no_replica" and "no compute" in answer.error["message"]
    assert waiting_in(served, stream) == (1, 0, 1), "the first may go on at any time"


def test_a_name_belongs_to_the_model_that_is_served_under_it_now(deployment: Deployment, served: Backstage) -> None:
    assert deployment.post("/v1/completions", WHOLE | {"model": "sand"}).status_code == 404
    other = Backstage(deployment.redis_url, "stone", (ALIAS,))
    try:
        wait_until(
            lambda: deployment.get(f"/v1/models/{ALIAS}").json()["root"] == "stone",
            description="the alias is the other's",
        )
        assert deployment.get(f"/v1/models/{NAME}").json()["root"] == NAME
    finally:
        other.close()


def test_an_operator_can_have_a_model_forgotten(deployment: Deployment, served: Backstage) -> None:
    for stage in STAGES:
        served.client.delete(served_key(stage, NAME))
    new = deployment.start("gateway", "gateway-3", wait_for_replicas_s=WAIT_S)
    deployment.wait_live(new)
    wait_until(
        lambda: deployment.get("/ready", new).status_code == 503, description="it is not ready: nothing is known"
    )
    assert (
        httpx.post(deployment.url(new) + "/v1/completions", json=WHOLE, trust_env=False).json()["error"]["code"]
        == "stage_missing"
    )
    assert not served.client.exists(SERVED)


def waiting_in(served: Backstage, stream: GroupStream) -> tuple[int, int, int]:
    """The stream's entries, the lag of its group, and what is pending there."""
    group = served.client.xinfo_groups(stream.key)[0]
    return int(served.client.xlen(stream.key)), int(group["lag"]), int(group["pending"])
