"""A gateway's account of a request that has ended: in its log, in /metrics and in a trace that
another gateway goes on with. One pair of gateways.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from shared.wire.messages import Moments, RequestError, StepEvents, TokenEvent, encode
from shared.wire.streams import events
from shared.wire.token_log import write_step
from tests.collector import Collector
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.streams import BODY, streaming
from tests.waiting import wait_until

Traced = tuple[Deployment, Backstage, Collector]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Traced]:
    folder, collector = tmp_path_factory.mktemp("telemetry"), Collector().start()
    with running_redis(folder / "redis", redis_binary) as url:
        deployment, backstage = Deployment(url, folder, environment=collector.environment), Backstage(url)
        try:
            start_gateways(deployment, 2, log_format="json")
            yield deployment, backstage, collector
        finally:
            deployment.stop()
            backstage.close()
            collector.stop()


def ended(deployment: Deployment, response_id: str) -> list[Any]:
    """The lines that gateways logged of a response's end. The last line may be half written."""
    lines = [
        line
        for path in deployment.folder.glob("gateway-*.log")
        for line in path.read_text().rpartition("\n")[0].splitlines()
    ]
    said = [json.loads(line) for line in lines]
    return [each for each in said if each["event"] == "request ended" and each["response_id"] == response_id]


def write_last(backstage: Backstage, request: Any, position: int, begun_at: float) -> None:
    """A request's last token, which brings its moments: they are the test's."""
    event = TokenEvent(
        request.request_id, position, 7, "x", num_prompt_tokens=3, num_cached_tokens=1, finish_reason="length"
    )
    moments = Moments(request.request_id, position, begun_at + 1, begun_at + 3, begun_at + 7, "compute-1", "sampler-1")
    pipe = backstage.client.pipeline(transaction=False)
    write_step(
        pipe,
        backstage.model,
        [(event, encode(event))],
        [(events(request.gateway_id), StepEvents((encode(event),), (moments,)))],
    )
    assert pipe.execute() == [[]]


def test_a_request_is_a_line_and_a_span_in_its_clients_trace(traced: Traced) -> None:
    deployment, backstage, collector = traced
    trace_id, span_id = os.urandom(16).hex(), os.urandom(8).hex()
    with httpx.stream(
        "POST",
        deployment.url("gateway-1") + "/v1/completions",
        json=BODY,
        headers={"traceparent": f"00-{trace_id}-{span_id}-01"},
        timeout=60,
        trust_env=False,
    ) as reply:
        [request] = backstage.take()
        assert request.traceparent.split("-")[1] == trace_id and request.traceparent.split("-")[2] != span_id
        write_last(backstage, request, 1, request.created_at)
        assert reply.read().endswith(b"[DONE]\n\n")
    response_id = request.request_id.rpartition(".")[0]
    [line] = wait_until(lambda: ended(deployment, response_id), description="its line")
    assert (
        line["status"],
        line["finish_reason"],
        line["num_prompt_tokens"],
        line["num_cached_tokens"],
        line["num_output_tokens"],
    ) == (200, "length", 3, 1, 1)
    assert (line["queue_s"], line["prefill_s"], line["compute"], line["sampler"], line["trace_id"]) == (
        2.0,
        4.0,
        "compute-1",
        "sampler-1",
        trace_id,
    )
    wait_until(lambda: len(collector.of(trace_id)) == 3, description="its spans")
    by_name = {span.name: span for span in collector.of(trace_id)}
    root = by_name["POST /v1/completions"]
    assert (
        set(by_name) == {"POST /v1/completions", "admission", "stream"}
        and root.parent_id == span_id
        and root.service == "penstock-gateway"
    )
    assert (
        by_name["admission"].parent_id
        == by_name["stream"].parent_id
        == root.span_id
        == request.traceparent.split("-")[2]
    )
    assert root.said["http.response.status_code"] == 200 and root.said["penstock.num_output_tokens"] == 1


def test_a_trace_that_its_client_does_not_sample_is_left_out(traced: Traced) -> None:
    deployment, backstage, collector = traced
    trace_id = os.urandom(16).hex()
    with httpx.stream(
        "POST",
        deployment.url() + "/v1/completions",
        json=BODY,
        headers={"traceparent": f"00-{trace_id}-{os.urandom(8).hex()}-00"},
        timeout=60,
        trust_env=False,
    ) as reply:
        [request] = backstage.take()
        write_last(backstage, request, 1, request.created_at)
        reply.read()
    assert request.traceparent == "" and collector.of(trace_id) == []


CLAIMED = "ab" * 16
GOOD = f"00-{CLAIMED}-{'cd' * 8}-01"
HOSTILE = {
    "a version that there is not": ["ff" + GOOD[2:]],
    "upper case": [GOOD.upper()],
    "more than its version has": [GOOD + "-x"],
    "no trace": [f"00-{'0' * 32}-{'cd' * 8}-01"],
    "no span": [f"00-{CLAIMED}-{'0' * 16}-01"],
    "too short": [GOOD[:-1]],
    "too long": ["01" + GOOD[2:] + "-" + "x" * 10_000],
    "no text": ["\xff" + GOOD],
    "two": [GOOD, GOOD],
    "a hundred": [GOOD] * 100,
}


def test_trace_headers_that_are_not_sound_begin_a_trace_of_their_own(traced: Traced) -> None:
    deployment, _, collector = traced

    def refused(headers: list[tuple[str, str]]) -> int:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        return httpx.post(
            deployment.url("gateway-2") + "/v1/completions", content=b"{", headers=raw, timeout=60, trust_env=False
        ).status_code

    before = {span.span_id for span in list(collector.spans)}
    assert {
        name: refused([("traceparent", each) for each in values]) for name, values in HOSTILE.items()
    } == dict.fromkeys(HOSTILE, 400)
    wait_until(lambda: len(collector.spans) - len(before) == len(HOSTILE), description="their spans")
    roots = [span for span in list(collector.spans) if span.span_id not in before]
    assert (
        len({span.trace_id for span in roots}) == len(HOSTILE)
        and not any(span.parent_id for span in roots)
        and collector.of(CLAIMED) == []
    )
    states = ["x" * 10_000, "a=b," * 100, "=", "a=1,a=2", "\x7f"]
    assert [refused([("traceparent", GOOD), ("tracestate", each)]) for each in states] == [400] * len(states)
    assert refused([("traceparent", GOOD), ("tracestate", "x" * 100_000)]) in (400, 431)
    wait_until(
        lambda: len([span for span in collector.of(CLAIMED) if span.parent_id == "cd" * 8]) >= len(states),
        description="they are in the client's trace",
    )
    assert "trouble with spans" not in deployment.logs(), "what clients send is not for the log"


def test_who_resumes_a_stream_goes_on_in_its_trace(traced: Traced) -> None:
    deployment, backstage, collector = traced
    with streaming(deployment, gateway="gateway-1") as stream:
        [request] = backstage.take()
        backstage.write(request, 1)
        stream.wait("1 ")
        response_id = request.request_id.rpartition(".")[0]
        headers = {"Last-Event-ID": stream.last_id}
        with httpx.stream(
            "GET",
            f"{deployment.url('gateway-2')}/v1/streams/{response_id}",
            headers=headers,
            trust_env=False,
            timeout=60,
        ) as resumed:
            stream.wait_end()
            backstage.write(request, 2, finish=2, gateway="gateway-2")
            resumed.read()
    wait_until(lambda: len(ended(deployment, response_id)) == 2, description="both lines")
    first, second = sorted(ended(deployment, response_id), key=lambda each: each["is_resumed"])
    assert (first["error"], first["finish_reason"], first["num_output_tokens"]) == ("resumed_elsewhere", None, 1)
    assert (second["status"], second["finish_reason"], second["num_output_tokens"], second["ttft_s"]) == (
        200,
        "length",
        1,
        None,
    )
    trace_id = request.traceparent.split("-")[1]
    wait_until(lambda: [span.name for span in collector.of(trace_id)].count("stream") == 2, description="both spans")
    streams = [span for span in collector.of(trace_id) if span.name == "stream"]
    assert [(span.replica_id, span.said["penstock.is_resumed"]) for span in streams] == [
        ("gateway-1", False),
        ("gateway-2", True),
    ]


def test_ends_are_counted_as_what_they_are(traced: Traced) -> None:
    deployment, backstage, _ = traced

    def ends() -> dict[str, float]:
        text = deployment.get("/metrics", "gateway-1").text
        names = ("penstock_request_success_total", "penstock_request_errors_total", "penstock_requests_rejected_total")
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith(names)
        }

    before = ends()
    with streaming(deployment, gateway="gateway-1", n=2) as refused:
        backstage.end(backstage.take(2)[0], error=RequestError("too long", 400, "prompt", "context_length_exceeded"))
        refused.wait_end()  # the response ends with its first error, and the other sequence with it
    with streaming(deployment, gateway="gateway-1") as left:
        [request] = backstage.take()
        backstage.write(request, 1)
        left.wait("1 ")
    wait_until(
        lambda: ends() != before and len(ended(deployment, request.request_id.rpartition(".")[0])) == 1,
        description="the client has gone",
    )
    changed = {name: value - before.get(name, 0.0) for name, value in ends().items() if value != before.get(name, 0.0)}
    assert changed == {
        f'penstock_request_success_total{{finished_reason="error",model_name="{NAME}"}}': 2.0,
        f'penstock_request_errors_total{{code="context_length_exceeded",model_name="{NAME}",status="400"}}': 2.0,
        f'penstock_request_success_total{{finished_reason="cancelled",model_name="{NAME}"}}': 1.0,
    }
    [line] = ended(deployment, request.request_id.rpartition(".")[0])
    assert (line["status"], line["finish_reason"], line["num_output_tokens"]) == (499, "cancelled", 1)


def test_metrics_outlive_redis(traced: Traced) -> None:
    """The last test of its gateways: their Redis goes."""
    deployment, backstage, _ = traced
    with suppress(redis.ConnectionError):
        backstage.client.execute_command("SHUTDOWN", "NOSAVE")
    reply = deployment.get("/metrics", "gateway-1")
    assert (
        reply.status_code == 200
        and "penstock_redis_up 0.0" in reply.text
        and "penstock_stage_queue_depth{" not in reply.text
    )
    assert f'penstock_request_success_total{{finished_reason="length",model_name="{NAME}"}}' in reply.text
