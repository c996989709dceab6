"""Places: bounded per model over all gateways, held by sequences, given back when those end,
whoever is gone by then. And the names that are served.
"""

import asyncio
from functools import partial
from pathlib import Path

import httpx

from services.operator.redis_server import start_server
from services.requests.store.tenants.api_keys import add_key
from shared.wire.messages import Control, RequestError
from shared.wire.streams import tombstone_key
from tests.conftest import answers, running_redis
from tests.deployment import Deployment
from tests.gateway.backstage import ALIAS, NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.streams import BODY, begun, streaming
from tests.waiting import wait_until

WHOLE = BODY | {"stream": False, "stream_options": None}


def test_places_outlive_a_gateway_and_come_back_with_the_sequences_end(deployment: Deployment, own: Backstage) -> None:
    first, second = start_gateways(deployment, 2, max_requests=3)
    with streaming(deployment, gateway=first, n=3) as stream:
        requests = own.take(3)
        refused = deployment.post("/v1/completions", WHOLE)
        assert (
            refused.status_code == 429
            and refused.headers["Retry-After"]
            and refused.json()["error"]["code"] == "server_full"
        )
        deployment.kill(first)
        del deployment.ports[first]
        stream.wait_end()
        assert deployment.post("/v1/completions", WHOLE).status_code == 429 and own.held() == 3
        own.end(requests[0])
        own.write(requests[1], 1, finish=1)
        assert own.held() == 1
        with streaming(deployment, n=2):
            assert own.held() == 3
            for request in [requests[2], *own.take(2)]:
                own.end(request)
                own.end(request)
    assert own.held() == 0 and not own.client.exists(f"inflight:{NAME}")


def test_tokens_are_bounded_too_and_an_answer_of_nobody_gives_its_place_back(
    deployment: Deployment, own: Backstage
) -> None:
    start_gateways(deployment, max_tokens_in_flight=1000)
    assert deployment.post("/v1/completions", WHOLE | {"max_tokens": 1000}).status_code == 429
    with begun(deployment, own, 1, max_tokens=900) as (_, request):
        assert deployment.post("/v1/completions", WHOLE | {"max_tokens": 101}).status_code == 429
        assert own.held() == 1
    wait_until(
        lambda: own.client.exists(tombstone_key(request.request_id)),
        description="the client has gone, a tombstone stands",
    )
    assert own.held() == 1  # until whoever runs it ends it
    own.end(request)
    assert own.held() == 0


def test_a_full_pipeline_is_full_for_those_who_fill_it(deployment: Deployment, own: Backstage, tmp_path: Path) -> None:
    """Two tenants may have half of the places each: whoever has less is not refused."""
    keys = {
        tenant: {"Authorization": f"Bearer {add_key(tmp_path / 'keys.json', tenant)}"} for tenant in ("many", "few")
    }
    start_gateways(deployment, max_requests=4, keys_file=tmp_path / "keys.json")

    def status(tenant: str, n: int) -> int:
        """Ask in the background: the response stays in the pipeline until it ends."""
        body = {"model": NAME, "input": "Water", "background": True, "max_output_tokens": 8}
        codes = {deployment.post("/v1/responses", body, **keys[tenant]).status_code for _ in range(n)}
        return max(codes)

    assert status("many", 4) == 200 and status("many", 1) == 429
    assert status("few", 2) == 200, "an even share"
    assert status("few", 1) == 429 and status("many", 1) == 429
    requests = own.take(6)
    for request in requests:
        own.end(request)
    assert own.held() == 0 and not own.client.exists(f"shares:{NAME}")
    assert status("few", 4) == 200, "all of it, while nobody else wants any"
    for request in own.take(4):
        own.end(request)


def test_a_burst_waits_for_connections_to_redis(gateways: Deployment, backstage: Backstage) -> None:
    count = 300  # all submitted at once, on more connections than a gateway opens

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(trust_env=False, timeout=250, limits=httpx.Limits(max_connections=None)) as client:
            url = gateways.url("gateway-1") + "/v1/completions"
            asked = asyncio.gather(*(client.post(url, json=WHOLE) for _ in range(count)))
            for request in await asyncio.to_thread(backstage.take, count):
                backstage.write(request, 1, finish=1)
            return await asked

    assert {reply.status_code for reply in asyncio.run(ask())} == {200}


def test_every_name_is_served_and_echoed_and_a_missing_stage_is_said_of_its_model(
    deployment: Deployment, own: Backstage
) -> None:
    start_gateways(deployment, min_priority=-2)
    other = Backstage(deployment.redis_url, "stone", (), stages=("tokenizer", "sampler"))
    try:
        deployment.wait_live("tokenizer-of-stone")
        ask = partial(deployment.post, "/v1/completions", WHOLE | {"model": "stone"})
        missing = wait_until(
            lambda: (reply := ask()).status_code == 503 and reply,
            description="the gateway knows that there is such a model",
        )
        assert "no compute is alive for the model stone" in missing.json()["error"]["message"]
        for asked in (deployment.get("/v1/models/stone"), deployment.post("/api/show", {"model": "stone"})):
            assert asked.status_code == 503 and asked.headers["Retry-After"], (
                "a model that is on its way has not vanished"
            )
        assert (
            deployment.post("/v1/completions", WHOLE | {"model": "sand"}).status_code
            == 404
            == deployment.get("/v1/models/sand").status_code
        )
        listed = deployment.get("/v1/models").json()["data"]
        assert {card["id"]: card["root"] for card in listed} == {NAME: NAME, ALIAS: NAME, "stone": "stone"}, (
            "nor from the list"
        )
        assert (
            len(deployment.get("/api/tags").json()["models"]) == 3
            and len(deployment.get("/api/ps").json()["models"]) == 2
        )
        assert deployment.post("/api/chat", {"model": "stone:latest"}).status_code == 503
        assert deployment.get(f"/v1/models/{ALIAS}").json()["id"] == ALIAS
        with begun(deployment, own, 1, model=ALIAS, priority=-2) as (stream, request):
            assert request.model == NAME and request.scheduling.priority == -2 and stream.chunks[0]["model"] == ALIAS
            own.end(request)
            stream.wait_end()
        refused = deployment.post("/v1/completions", WHOLE | {"priority": -3})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    finally:
        other.close()


def test_a_cancel_outlives_a_redis_that_restarts(tmp_path: Path, redis_binary: Path | None) -> None:
    with running_redis(tmp_path / "redis", redis_binary) as url:
        deployment, own, restarted = Deployment(url, tmp_path, has_users=False), Backstage(url), []
        try:
            start_gateways(deployment)
            with begun(deployment, own, 1) as (_, request):
                own.client.shutdown(nosave=True)
            wait_until(
                lambda: "redis can't serve" in (tmp_path / "gateway-1.log").read_text(),
                description="the gateway has noticed",
            )
            wait_until(
                lambda: "cancelling" in (tmp_path / "gateway-1.log").read_text(), description="the client has gone"
            )
            restarted.append(start_server(tmp_path / "redis", binary=redis_binary))
            wait_until(lambda: answers(url), description="redis answers")
            wait_until(lambda: own.controls("cancel"), description="it is cancelled")
            assert own.controls("cancel") == [Control("cancel", (request.request_id,))]
            assert own.client.exists(tombstone_key(request.request_id))
        finally:
            deployment.stop()
            own.close()
            for process in restarted:
                process.kill()
                process.wait()


def test_measurements_are_of_sequences(deployment: Deployment, own: Backstage) -> None:
    """Two choices that each get one token make no interval; what is refused before it was submitted
    was not cancelled.
    """
    start_gateways(deployment)
    assert deployment.post("/v1/completions", WHOLE | {"max_tokens": 0}).status_code == 400
    with streaming(deployment, n=2) as stream:
        for request in own.take(2):
            own.write(request, 1, 2, finish=2)
        stream.wait_end()
    with streaming(deployment) as stream:
        own.end(own.take()[0], error=RequestError("too long", 400))
        stream.wait_end()
    metrics = deployment.get("/metrics").text
    assert 'penstock_inter_token_latency_seconds_count{model_name="paper"} 2.0' in metrics
    assert 'penstock_request_success_total{finished_reason="cancelled",model_name="paper"} 0.0' in metrics
    assert 'penstock_request_success_total{finished_reason="error",model_name="paper"} 1.0' in metrics
