"""Taking a stream over: from any position, also after its end; who asks for nonsense disturbs
nobody, and only the present reader cancels.
"""

from typing import Any

import httpx
import pytest

from shared.wire.messages import RequestError, StepEvents, TokenEvent, encode
from shared.wire.streams import MESSAGE, events, log_key, tombstone_key
from shared.wire.streams import response_of as response_of_id
from shared.wire.token_log import END
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.streams import begun, streaming
from tests.waiting import wait_until


def response_of(stream: Any) -> str:
    found: str = stream.chunks[0]["id"]
    return found


def takeovers(backstage: Backstage, request: Any) -> list[tuple[str | None, int]]:
    """Gateways and their generations of readers. Once each: a gateway whose events come late
    announces itself again, as what it is, or as none (0).
    """
    attached = [
        each for each in backstage.controls("attach") if request.request_id in each.request_ids and each.generation
    ]
    return list(dict.fromkeys((each.gateway_id, each.generation) for each in attached))


def resume(gateways: Deployment, response_id: str, last_id: str, gateway: str | None = None) -> httpx.Response:
    return httpx.get(
        gateways.url(gateway) + f"/v1/streams/{response_id}",
        headers={"Last-Event-ID": last_id},
        timeout=60,
        trust_env=False,
    )


def test_a_resumed_stream_goes_on_and_the_reader_before_is_told_and_cancels_nothing(
    gateways: Deployment, backstage: Backstage
) -> None:
    with begun(gateways, backstage, 1, 2, 3, gateway="gateway-1") as (first, request):
        with streaming(gateways, resume=response_of(first), last_id="2", gateway="gateway-2") as second:
            first.wait_end()
            assert first.error["code"] == "resumed_elsewhere" and first.lines[-2] == "data: [DONE]"
            second.wait("3 ")
            backstage.write(request, 4, gateway="gateway-2")
            second.wait("3 4 ")
            with streaming(
                gateways, resume=response_of(first), last_id="3", gateway="gateway-2"
            ) as third:  # within one gateway, too
                second.wait_end()
                assert second.error["code"] == "resumed_elsewhere"
                third.wait("4 ")
                assert not backstage.client.exists(tombstone_key(request.request_id))
                assert not [each for each in backstage.controls("cancel") if request.request_id in each.request_ids]
                assert takeovers(backstage, request) == [("gateway-2", 1), ("gateway-2", 2)]
        wait_until(
            lambda: backstage.client.exists(tombstone_key(request.request_id)),
            description="the last reader's leaving cancels",
        )


@pytest.mark.parametrize("by", ["event", "log"])
def test_tokens_that_come_again_as_others_end_the_answer_and_cancel_what_runs(
    by: str, gateways: Deployment, backstage: Backstage
) -> None:
    """Redis has lost a part of the log, and another version has computed it again."""
    with begun(gateways, backstage, 1, 2, 3, gateway="gateway-1") as (stream, request):
        stream.wait("1 2 3 ")
        other = TokenEvent(
            request.request_id, 2, 8, "other ", num_prompt_tokens=3, finish_reason="length" if by == "log" else None
        )
        backstage.client.delete(log_key(request.request_id))
        backstage.client.xadd(
            log_key(request.request_id), {MESSAGE: encode(other)} | ({END: "1"} if by == "log" else {}), id="2-0"
        )
        if by == "event":
            backstage.client.xadd(events(str(request.gateway_id)).key, {MESSAGE: encode(StepEvents((encode(other),)))})
        stream.wait_end()
        assert stream.text == "1 2 3 " and stream.error["code"] == "request_lost"
    wait_until(
        lambda: backstage.client.exists(tombstone_key(request.request_id)) or by == "log", description="it is cancelled"
    )


def test_nonsense_disturbs_nobody(gateways: Deployment, backstage: Backstage) -> None:
    with begun(gateways, backstage, 1, 2, gateway="gateway-1") as (stream, request):
        response_id = response_of(stream)
        for last_id in ("x", "1,1", "-1", "+1", "1_0", "1 0", "9999", "9" * 5000):
            reply = resume(gateways, response_id, last_id, "gateway-2")
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "Last-Event-ID", last_id
        assert (
            httpx.head(
                gateways.url("gateway-2") + f"/v1/streams/{response_id}", timeout=60, trust_env=False
            ).status_code
            == 405
        )
        assert resume(gateways, "cmpl-none", "1").status_code == 404
        backstage.write(request, 3, finish=3)
        stream.wait_end()
        assert stream.text == "1 2 3 " and stream.error is None
    assert takeovers(backstage, request) == []


def test_a_position_that_redis_has_lost_is_503_until_it_is_computed_again(
    gateways: Deployment, backstage: Backstage
) -> None:
    with begun(gateways, backstage, 1, 2, gateway="gateway-1") as (stream, request):
        reply = resume(gateways, response_of(stream), "3", "gateway-2")
        assert (
            reply.status_code == 503
            and reply.headers["retry-after"]
            and "lost a part of this answer" in reply.json()["error"]["message"]
        )
        backstage.write(request, 3)
        with streaming(gateways, resume=response_of(stream), last_id="3", gateway="gateway-2") as again:
            backstage.write(request, 4, finish=4, gateway="gateway-2")
            again.wait_end()
            assert again.text == "4 " and again.error is None


def test_head_takes_no_response_over(gateways: Deployment, backstage: Backstage) -> None:
    body = {"model": NAME, "input": "x", "stream": True, "max_output_tokens": 3}
    with httpx.stream(
        "POST", gateways.url("gateway-1") + "/v1/responses", json=body, timeout=60, trust_env=False
    ) as stream:
        [request] = backstage.take()
        path = f"/v1/responses/{response_of_id(request.request_id)}?stream=true"
        assert httpx.head(gateways.url("gateway-2") + path, timeout=60, trust_env=False).status_code == 405
        backstage.write(request, 1, finish=1)
        assert "response.incomplete" in stream.read().decode()
    assert takeovers(backstage, request) == []


def test_a_stream_that_has_ended_can_be_resumed_at_every_position(gateways: Deployment, backstage: Backstage) -> None:
    with begun(gateways, backstage, 1, 2, 3) as (stream, request):
        backstage.write(request, 4, finish=4)
        stream.wait_end()
    for position, text in ((0, "1 2 3 4 "), (2, "3 4 "), (3, "4 "), (4, "")):
        with streaming(gateways, resume=response_of(stream), last_id=str(position), gateway="gateway-2") as again:
            again.wait_end()
            assert (again.text, again.finish_reasons, again.error) == (text, ["length"], None), position
            assert again.last_id == "4" and "data: [DONE]" in again.lines


def test_a_failed_stream_fails_again_when_it_is_resumed(gateways: Deployment, backstage: Backstage) -> None:
    with begun(gateways, backstage, 1) as (stream, request):
        backstage.end(request, error=RequestError("no more", 500, code="gone_wrong"))
        stream.wait_end()
        assert stream.error["code"] == "gone_wrong"
    reply = resume(gateways, response_of(stream), "1")
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "gone_wrong"


def test_two_choices_of_which_one_has_ended_are_resumed(gateways: Deployment, backstage: Backstage) -> None:
    with streaming(gateways, gateway="gateway-1", n=2) as stream:
        one, two = backstage.take(2)
        backstage.write(one, 1, 2, finish=2)
        backstage.write(two, 1)
        wait_until(lambda: stream.text.count(" ") == 3, description="three tokens have come")
        with streaming(gateways, resume=response_of(stream), last_id="2,1", gateway="gateway-2") as again:
            backstage.write(two, 2, finish=2, gateway="gateway-2")
            again.wait_end()
            assert again.text == "2 " and again.finish_reasons == ["length", "length"] and again.last_id == "2,2"


def test_a_log_that_has_expired_is_404_though_its_record_lives(gateways: Deployment, backstage: Backstage) -> None:
    with begun(gateways, backstage, 1) as (stream, request):
        backstage.write(request, 2, finish=2)
        stream.wait_end()
    backstage.client.delete(log_key(request.request_id))
    reply = resume(gateways, response_of(stream), "1")
    assert reply.status_code == 404 and "too old" in reply.json()["error"]["message"]


def test_a_queued_response_can_be_resumed(gateways: Deployment, backstage: Backstage) -> None:
    with streaming(gateways, gateway="gateway-1") as stream:
        [request] = backstage.take()
        response_id = request.request_id.rpartition(".")[0]
        assert resume(gateways, response_id, "9999", "gateway-2").status_code == 400
        with streaming(gateways, resume=response_id, last_id="0", gateway="gateway-2") as again:
            stream.wait_end()
            backstage.write(request, 1, finish=1, gateway="gateway-2")
            again.wait_end()
            assert again.text == "1 "
