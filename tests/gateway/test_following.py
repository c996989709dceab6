"""Background responses behind a gateway: readers follow the log, and are told when the gateway
leaves or Redis has lost the response.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from shared.wire.messages import RequestError
from shared.wire.streams import inflight_key, log_key
from shared.wire.token_log import end_request
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.waiting import wait_until

BODY = {"model": NAME, "input": "The", "background": True}


def events_of(lines: list[str]) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def follow(deployment: Deployment, response_id: str, gateway: str) -> Any:
    return httpx.stream(
        "GET", deployment.url(gateway) + f"/v1/responses/{response_id}?stream=true", timeout=60, trust_env=False
    )


def test_a_gateway_that_drains_says_where_to_go_on(deployment: Deployment, own: Backstage) -> None:
    first, second = start_gateways(deployment, 2)
    made = httpx.post(deployment.url(first) + "/v1/responses", json=BODY, timeout=60, trust_env=False).json()
    (request,) = own.take()
    assert made["status"] == "queued" and request.gateway_id is None
    own.write(request, 1, 2)
    with follow(deployment, made["id"], first) as response:
        lines = response.iter_lines()
        read = [next(lines)]
        while not read[-1].endswith('"delta":"2 ","logprobs":[]}'):
            read.append(next(lines))
        deployment.processes[first].terminate()
        read += list(lines)
    begun = events_of(read)
    assert (begun[-1]["type"], begun[-1]["code"]) == ("error", "gateway_draining")
    last = begun[-1]["sequence_number"]
    assert f"starting_after={last}" in begun[-1]["message"] and last == begun[-2]["sequence_number"]
    own.write(request, 3, finish=3)
    url = deployment.url(second) + f"/v1/responses/{made['id']}?stream=true&starting_after={last}"
    rest = events_of(httpx.get(url, timeout=60, trust_env=False).text.splitlines())
    assert [event["sequence_number"] for event in begun[:-1] + rest] == list(range(len(begun) - 1 + len(rest)))
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == "1 2 3 "
    assert not own.held() and not own.controls("attach") and not own.controls("cancel")


def test_what_redis_has_lost_is_an_error_and_a_log_with_a_gap_a_failure(
    gateways: Deployment, backstage: Backstage
) -> None:
    lost, torn = (gateways.post("/v1/responses", BODY).json()["id"] for _ in range(2))
    first, second = backstage.take(2)
    with follow(gateways, lost, "gateway-2") as response:
        backstage.client.hdel(inflight_key(NAME), first.request_id)
        (*_, error) = events_of(list(response.iter_lines()))
        assert (error["type"], error["code"]) == ("error", "request_lost")
    backstage.write(second, 1, 2, 3, finish=3)
    backstage.client.xdel(log_key(second.request_id), "2-0")
    found = wait_until(lambda: gateways.get(f"/v1/responses/{torn}").json(), description="an answer")
    assert found["status"] == "failed" and "gap" in found["error"]["message"]


def test_a_log_that_redis_cut_and_that_ended_before_its_reader_ends_the_stream(
    gateways: Deployment, backstage: Backstage
) -> None:
    """A Redis that came back without its last writes: the request ended at a token that the reader has passed."""
    response_id = gateways.post("/v1/responses", BODY).json()["id"]
    (request,) = backstage.take()
    backstage.write(request, 1, 2, 3, 4)
    client, key = backstage.client, log_key(request.request_id)
    with follow(gateways, response_id, "gateway-2") as response:
        lines = response.iter_lines()
        read = [next(lines)]
        while not read[-1].endswith('"delta":"4 ","logprobs":[]}'):
            read.append(next(lines))
        kept = client.xrange(key, max="2-0")
        client.delete(key)
        for entry_id, values in kept:
            client.xadd(key, values, id=entry_id)
        with client.pipeline(transaction=False) as pipe:
            end_request(
                pipe,
                NAME,
                request.request_id,
                None,
                error=RequestError("Redis has lost a part of this request's tokens"),
            )
            pipe.execute()
        *_, failed = events_of(list(lines))
    assert failed["type"] == "response.failed" and "lost a part" in failed["response"]["error"]["message"]


def test_who_reads_an_ended_response_again_reads_no_log(gateways: Deployment, backstage: Backstage) -> None:
    response_id = gateways.post("/v1/responses", BODY).json()["id"]
    (request,) = backstage.take()
    backstage.write(request, *range(1, 601), finish=600)
    path = f"/v1/responses/{response_id}"
    whole, stream = gateways.get(path, "gateway-1"), gateways.get(f"{path}?stream=true", "gateway-1")
    assert whole.json()["output"][0]["content"][0]["text"] == "".join(f"{number} " for number in range(1, 601))
    events = events_of(stream.text.splitlines())
    assert [event["sequence_number"] for event in events] == list(range(len(events))) and events[-1][
        "response"
    ] == whole.json()
    backstage.client.delete(log_key(request.request_id))
    assert gateways.get(path, "gateway-1").json() == whole.json()
    assert gateways.get(f"{path}?stream=true", "gateway-1").text == stream.text
    for after in (0, 300, len(events) - 1, len(events) + 100):
        rest = events_of(gateways.get(f"{path}?stream=true&starting_after={after}", "gateway-1").text.splitlines())
        assert rest == events[after + 1 :]
    assert gateways.get(path, "gateway-2").status_code == 404, "which has never read it"
    assert httpx.delete(gateways.url("gateway-1") + path, timeout=60, trust_env=False).status_code == 200
    assert gateways.get(path, "gateway-1").status_code == 404


def test_all_who_follow_a_response_get_the_same_whenever_they_come(gateways: Deployment, backstage: Backstage) -> None:
    response_id = gateways.post("/v1/responses", BODY).json()["id"]
    (request,) = backstage.take()
    with ThreadPoolExecutor(8) as pool, follow(gateways, response_id, "gateway-1") as left:
        assert next(left.iter_lines())
        path = f"/v1/responses/{response_id}?stream=true"
        early = [pool.submit(gateways.get, path, "gateway-1") for _ in range(3)]
        backstage.write(request, *range(1, 301))
        late = [pool.submit(gateways.get, path, "gateway-1") for _ in range(3)]
        left.close()
        backstage.write(request, 301, finish=301)
        texts = {strip(each.result().text) for each in early + late}
    assert len(texts) == 1 and '"301 "' in texts.pop()


def strip(text: str) -> str:
    """Without pings."""
    return "\n".join(line for line in text.splitlines() if line.startswith("data: "))
