"""Events are a fast path: whatever becomes of them, a stream ends with its whole text or with one clear error."""

from pathlib import Path

import pytest

from shared.wire.messages import StepEvents, TokenEvent, encode
from shared.wire.streams import events, log_key
from tests.deployment import Deployment
from tests.gateway.backstage import Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.streams import begun, streaming
from tests.waiting import wait_until


def test_lost_events_are_found_in_the_log_and_the_reader_is_announced_again(
    gateways: Deployment, backstage: Backstage
) -> None:
    with begun(gateways, backstage, 1) as (stream, request):
        backstage.write(request, 2, 3, gateway=None)
        stream.wait("1 2 3 ")
        wait_until(
            lambda: [each for each in backstage.controls("attach") if request.request_id in each.request_ids],
            description="it attaches again",
        )
        backstage.write(request, 4, finish=4, gateway=None)
        stream.wait_end()
        assert stream.text == "1 2 3 4 " and stream.finish_reasons == ["length"]


def test_a_stream_no_event_of_which_ever_comes_ends(gateways: Deployment, backstage: Backstage) -> None:
    with streaming(gateways) as stream:
        [request] = backstage.take()
        backstage.write(request, *range(1, 30), finish=29, gateway=None)
        stream.wait_end()
        assert stream.text == "".join(f"{position} " for position in range(1, 30))


def test_a_hole_between_events_is_filled_from_the_log_at_once(gateways: Deployment, backstage: Backstage) -> None:
    with begun(gateways, backstage, 1) as (stream, request):
        backstage.write(request, 2, 3, gateway=None)
        backstage.write(request, 4)
        backstage.write(request, 1, 2, 3, is_logged=False)  # late, and twice
        backstage.write(request, 5, finish=5)
        stream.wait_end()
        assert stream.text == "1 2 3 4 5 ", stream.lines


def test_an_end_counts_after_all_tokens_before_it(gateways: Deployment, backstage: Backstage) -> None:
    with begun(gateways, backstage, 1) as (stream, request):
        backstage.write(request, 2, 3, gateway=None)
        backstage.end(request)
        stream.wait_end()
        assert stream.text == "1 2 3 " and stream.error["code"] == "cancelled"


def test_an_end_below_what_was_read_ends_the_stream(gateways: Deployment, backstage: Backstage) -> None:
    """Redis lost the end of its log, and the request was given up there."""
    with begun(gateways, backstage, 1, 2, 3) as (stream, request):
        [(first_id, first), *_] = backstage.client.xrange(key := log_key(request.request_id))
        backstage.client.delete(key)
        backstage.client.xadd(key, first, id=first_id)
        backstage.end(request, gateway=None)
        stream.wait_end()
        assert stream.text == "1 2 3 " and stream.error["code"] == "cancelled"


def test_a_log_with_a_gap_is_one_clear_error(gateways: Deployment, backstage: Backstage) -> None:
    with begun(gateways, backstage, 1) as (stream, request):
        with backstage.client.pipeline(
            transaction=True
        ) as pipe:  # or the gateway might look between the two, and have read it whole
            backstage.queue(pipe, request, 2, 3, 4)
            pipe.xdel(log_key(request.request_id), "3-0")
            pipe.execute()
        stream.wait_end()
        assert stream.error["code"] == "request_lost" and "gap" in stream.error["message"]


def test_garbage_among_the_events_becomes_dead_letters_and_nothing_else(
    gateways: Deployment, backstage: Backstage
) -> None:
    with begun(gateways, backstage, 1, gateway="gateway-1") as (stream, request):
        key = events("gateway-1").key
        good = encode(TokenEvent(request.request_id, 2, 7, "2 "))
        backstage.client.xadd(key, {b"\xff": b"\xff"})
        backstage.client.xadd(key, {"m": b"\xc1", "r": b"\xff\xfe"})
        backstage.client.xadd(key, {"m": encode(StepEvents(())), "e": b"junk", "p": b"1"})
        backstage.client.xadd(key, {"m": encode(StepEvents(())), "e": good, "p": b"one"})
        backstage.client.xadd(key, {"m": encode(StepEvents((b"\x00junk", good)))})
        stream.wait("1 2 ")
        backstage.client.xadd("control", {"m": b"\xc1", b"\xff": b"\xff"})
        wait_until(lambda: backstage.client.xlen("dead-letter") >= 5, description="five dead letters")
        backstage.client.delete("dead-letter")
        assert gateways.get("/health", "gateway-1").json()["reader"]["problem"] is None


def test_a_flushed_redis_is_one_clear_error_for_queued_and_running(deployment: Deployment, own: Backstage) -> None:
    start_gateways(deployment)
    with begun(deployment, own, 1) as (running, _), streaming(deployment) as queued:
        own.take()
        own.client.flushall()
        for stream in (running, queued):
            stream.wait_end()
            assert stream.error["code"] == "request_lost", stream.lines


def test_a_request_that_only_compute_remembers_is_one_clear_error_when_compute_is_gone(
    deployment: Deployment, own: Backstage
) -> None:
    """Redis was emptied before its first token: the log is whole, but neither record nor entry
    would bring the request back.
    """
    start_gateways(deployment)
    with streaming(deployment) as stream:
        [request] = own.take()
        with own.client.pipeline(
            transaction=True
        ) as pipe:  # or the gateway might look when all is gone, and not wait for a token
            pipe.flushall()
            own.queue(pipe, request, 1, 2, gateway=request.gateway_id)  # and then whoever computed it dies
            pipe.execute()
        stream.wait("1 2 ")
        stream.wait_end()
        assert stream.error["code"] == "request_lost", stream.lines
    last = wait_until(
        lambda: (end := own.client.xrevrange(log_key(request.request_id), count=1)) and b"e" in end[0][1] and end[0],
        description="its log ends",
    )
    assert last[0] == b"2-1"


def test_a_redis_that_refuses_writes_is_waited_out_and_shown(deployment: Deployment, own: Backstage) -> None:
    start_gateways(deployment)
    with begun(deployment, own, 1) as (stream, request):
        own.client.config_set("min-replicas-to-write", 1)
        wait_until(
            lambda: "NOREPLICAS" in str(deployment.get("/health").json()["problems"]), description="/health says why"
        )
        assert deployment.get("/health").status_code == 503
        assert deployment.get("/ready").status_code == 503
        refused = deployment.post("/v1/completions", {"model": own.model, "prompt": "x"})
        assert (
            refused.status_code == 503
            and refused.headers["Retry-After"]
            and refused.json()["error"]["code"] == "redis_unavailable"
        )
        resumed = deployment.get(f"/v1/streams/{stream.chunks[0]['id']}")
        assert resumed.status_code == 503 and resumed.headers["Retry-After"]
        assert stream.error is None
        own.client.config_set("min-replicas-to-write", 0)
        own.write(request, 2, finish=2)
        stream.wait_end()
        assert stream.text == "1 2 " and stream.error is None
        wait_until(lambda: deployment.get("/ready").status_code == 200, description="ready again")


@pytest.mark.parametrize("key", ["events", "log"])
def test_what_no_waiting_mends_ends_the_process(
    deployment: Deployment, own: Backstage, tmp_path: Path, key: str
) -> None:
    """A key of another type, say: the process says so and exits with 1, to be replaced, rather than go deaf."""
    [gateway] = start_gateways(deployment)
    with streaming(deployment):
        [request] = own.take()
        own.client.delete(name := events(gateway).key if key == "events" else log_key(request.request_id))
        own.client.set(name, "nonsense")
        assert deployment.processes.pop(gateway).wait(60) == 1
    assert "WRONGTYPE" in (tmp_path / f"{gateway}.log").read_text()
