"""Clients that go away, gateways that die, Redis that restarts, messages that nobody can read, and
a server that is full.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.operator.redis_server import start_server
from shared.model.sampling_params import SamplingParams
from shared.wire.load import Load
from shared.wire.messages import GenerateRequest, encode
from shared.wire.streams import REPLICAS, replica_key
from tests.conftest import running_redis, unfinished
from tests.deployment import MODEL, Deployment
from tests.pipeline.streams import compute_load, stream_all
from tests.waiting import wait_until

LONG = {"model": MODEL, "prompt": "The", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
LONG["stream_options"] = {"include_position": True}
MANY = 32  # answers at once: they take far longer than their client stays
QUEUE = f"requests:{MODEL}"


def test_a_client_that_goes_away_frees_compute(demo: Deployment) -> None:
    before = compute_load(demo).output_tokens or 0
    with httpx.stream(
        "POST", demo.url() + "/v1/completions", json=LONG | {"n": MANY}, timeout=60, trust_env=False
    ) as response:
        for line in response.iter_lines():
            if line.startswith("id: 5"):
                break
    load = wait_until(
        lambda: ((now := compute_load(demo)).output_tokens or 0) >= before + 5 and now.running == 0 and now,
        description="it has left",
    )
    assert (load.output_tokens or 0) - before < MANY * 900 and load.kv_cache_usage == 0


def test_a_client_that_goes_away_before_a_whole_answer_frees_compute(demo: Deployment) -> None:
    before = compute_load(demo).output_tokens or 0
    body = json.dumps(LONG | {"stream": False, "stream_options": None, "n": MANY}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", next(iter(demo.ports.values()))), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        wait_until(
            lambda: ((now := compute_load(demo)).output_tokens or 0) > before and (now.running or 0) > 0,
            description="compute is at it",
        )
    load = wait_until(lambda: (now := compute_load(demo)).running == 0 and now, description="they have left")
    assert (load.output_tokens or 0) - before < MANY * 900


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Deployment]:
    """A deployment that is soon full, and soon gives up who does not read; for tests that leave one
    replica of each stage; the last leaves less.
    """
    folder = tmp_path_factory.mktemp("limited")
    with running_redis(folder / "redis", redis_binary) as url:
        limits = {
            "PENSTOCK_MAX_REQUESTS": "2",
            "PENSTOCK_MAX_TOKENS_IN_FLIGHT": "1000",
            "PENSTOCK_READER_TIMEOUT_S": "0.5",
        }
        deployment = Deployment(url, folder, limits)
        try:
            yield deployment.start_all(dtype="float32")
        finally:
            deployment.stop()


def the(deployment: Deployment, stage: str) -> str:
    """The id of the one replica of this stage."""
    [replica_id] = [each for each in deployment.processes if each.startswith(stage)]
    return replica_id


def test_a_queued_request_is_cancelled_before_it_runs(limited: Deployment) -> None:
    """With compute gone, requests wait in its stream; cancelled there, they never reach a new compute."""
    deployment, compute = limited, the(limited, "compute")
    client = deployment.redis()
    announced = client.get(replica_key("compute", compute))
    deployment.kill(compute)
    client.set(
        replica_key("compute", compute), announced, ex=600
    )  # its lease runs on: while it does, requests are accepted
    client.sadd(REPLICAS, f"compute:{compute}")
    wait_until(
        lambda: deployment.get("/ready").status_code == 200, description="compute is alive, as the gateway has it"
    )
    body = LONG | {"max_tokens": 3}
    with httpx.stream("POST", deployment.url() + "/v1/completions", json=body, timeout=60, trust_env=False) as response:
        assert response.status_code == 200
        assert next(response.iter_lines()).startswith(":")  # a ping: the request waits
        wait_until(lambda: client.xlen(f"prompts:{MODEL}") == 1, description="it waits for compute")
    wait_until(lambda: client.keys("cancelled:*"), description="a tombstone stands")
    assert client.xlen(f"prompts:{MODEL}") == 1
    client.srem(REPLICAS, f"compute:{compute}")
    client.delete(replica_key("compute", compute))
    deployment.wait_live(deployment.start("compute", "compute-next", dtype="float32"))
    wait_until(lambda: client.xlen(f"prompts:{MODEL}") == 0, description="the queue is empty")
    wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway has seen the new compute")
    assert deployment.post("/v1/completions", body | {"stream": False, "stream_options": None}).status_code == 200

    def after_three_tokens() -> Load | None:
        return next(
            (each.load for each in deployment.registry().of("compute") if (each.load.output_tokens or 0) >= 3), None
        )

    load = wait_until(after_three_tokens, description="compute says that it has computed something")
    assert (load.prompt_tokens, load.output_tokens) == (1, 3), "of the second request, and of no other"


def start_gateway(deployment: Deployment, replica_id: str, **settings: object) -> str:
    """One more, ready."""
    deployment.wait_live(deployment.start("gateway", replica_id, **settings))
    wait_until(lambda: deployment.get("/ready", replica_id).status_code == 200, description=f"{replica_id} is ready")
    return replica_id


def test_a_stream_is_resumed_at_another_gateway(demo: Deployment) -> None:
    deployment, first, second = demo, start_gateway(demo, "gateway-first"), start_gateway(demo, "gateway-second")
    body = LONG | {"max_tokens": 300, "stream_options": {"include_usage": True, "include_position": True}}
    whole = read_stream(
        httpx.post(deployment.url(second) + "/v1/completions", json=body, timeout=60, trust_env=False).text
    )
    received, last_id, response_id = "", "", ""
    url, is_killed = deployment.url(first) + "/v1/completions", False
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response,
    ):  # none, if all had been sent
        for line in response.iter_lines():
            if line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                response_id = event["id"]
                received += event["choices"][0]["text"]
            if last_id == "20" and line == "":
                deployment.kill(first)
                is_killed = True
    assert is_killed
    resumed = httpx.get(
        deployment.url(second) + f"/v1/streams/{response_id}",
        headers={"Last-Event-ID": last_id},
        timeout=60,
        trust_env=False,
    )
    assert resumed.status_code == 200
    assert received + read_stream(resumed.text) == whole
    assert '"completion_tokens":300' in resumed.text
    assert deployment.terminate(second) == 0


def test_resuming_what_is_unknown_or_wrong_is_refused(demo: Deployment) -> None:
    assert demo.get("/v1/streams/nope").status_code == 404
    reply = demo.post("/v1/completions", LONG | {"stream": False, "stream_options": None, "max_tokens": 3})
    wrong = httpx.get(
        demo.url() + f"/v1/streams/{reply.json()['id']}", headers={"Last-Event-ID": "x"}, timeout=10, trust_env=False
    )
    assert wrong.status_code == 400
    assert "positions" in wrong.json()["error"]["message"]


def read_stream(text: str) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


@pytest.mark.more
def test_redis_restarts_in_the_middle_of_streams(tmp_path: Path, redis_binary: Path | None) -> None:
    folder = tmp_path / "redis"
    with running_redis(folder, redis_binary) as url:
        deployment = Deployment(url, tmp_path, has_users=False)
        try:
            worker = deployment.start("jobs")
            deployment.start_all(dtype="float32")
            deployment.wait_live(worker)
            undisturbed = asyncio.run(stream_all(deployment, 4, max_tokens=200))
            restarted = []

            async def restart() -> None:
                with deployment.redis() as client:
                    pid = client.info("server")["process_id"]
                os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(1.0)
                restarted.append(start_server(folder, binary=redis_binary))

            assert asyncio.run(stream_all(deployment, 4, max_tokens=200, disturb=restart)) == undisturbed
            assert len(deployment.processes) == 5 and all(each.poll() is None for each in deployment.processes.values())
            told = (tmp_path / f"{worker}.log").read_text()
            assert (
                "redis can't serve" in told and "celery" not in told.lower()
            )  # one voice tells of it, and of no library's inner life
        finally:
            deployment.stop()
            for process in restarted:
                process.kill()
                process.wait()


def test_an_emptied_redis_stops_no_process(demo: Deployment) -> None:
    deployment = demo
    with deployment.redis() as client:
        client.flushall()
    deployment.wait_live(*deployment.processes)
    wait_until(
        lambda: deployment.get("/ready").status_code == 200,
        description="the gateway knows that everybody is back in the registry",
    )
    assert (
        deployment.post(
            "/v1/completions", LONG | {"stream": False, "stream_options": None, "max_tokens": 3}
        ).status_code
        == 200
    )
    assert all(process.poll() is None for process in deployment.processes.values())


def test_a_poison_message_fails_its_request_and_nothing_else(demo: Deployment) -> None:
    client = demo.redis()
    client.delete("dead-letter")
    client.xadd(QUEUE, {"m": b"\xc1 not msgpack", "r": "poison.0", "g": "gateway-none"})
    client.xadd(f"prompts:{MODEL}", {"m": b"\x93\x01\x02\x03", "r": "poison.1", "g": ""})
    letters = wait_until(
        lambda: (found := client.xrange("dead-letter")) and len(found) == 2 and found, description="two dead letters"
    )
    assert {values[b"stream"].decode() for _, values in letters} == {QUEUE, f"prompts:{MODEL}"}
    assert all(values[b"error"] and values[b"deliveries"] == b"1" for _, values in letters)
    for request_id in ("poison.0", "poison.1"):
        assert wait_until(lambda key=f"log:{request_id}": client.xlen(key), description="the log says so") == 1
    client.xadd("candidates:sampler-1", {"m": b"\xc1"})
    wait_until(lambda: client.xlen("dead-letter") == 3, description="a third dead letter")
    assert (
        demo.post("/v1/completions", LONG | {"stream": False, "stream_options": None, "max_tokens": 3}).status_code
        == 200
    )
    client.delete("events:gateway-none")


def test_a_request_that_kills_whoever_takes_it_up_becomes_a_dead_letter(demo: Deployment) -> None:
    """Delivered over and over to consumers that died, it is given up with a clear error instead of
    going round for ever.
    """
    client = demo.redis()
    client.delete("dead-letter")
    for replica_id in list(demo.processes):
        if replica_id.startswith("tokenizer"):
            demo.terminate(replica_id)
    message = encode(GenerateRequest("killer.1", None, MODEL, SamplingParams(max_tokens=1), prompt="x"))
    entry_id = client.xadd(QUEUE, {"m": message, "r": "killer.1", "g": ""})
    client.xreadgroup("tokenizer", "dead-replica", {QUEUE: ">"})
    client.execute_command("XCLAIM", QUEUE, "tokenizer", "dead-replica", 0, entry_id, "IDLE", 60_000, "RETRYCOUNT", 5)
    demo.wait_live(demo.start("tokenizer"))
    letter = wait_until(lambda: client.xrange("dead-letter"), description="a dead letter")[0][1]
    assert b"5 replicas in turn" in letter[b"error"]
    assert wait_until(lambda: client.xlen("log:killer.1"), description="the log says so") == 1
    client.xgroup_delconsumer(QUEUE, "tokenizer", "dead-replica")


def test_a_request_that_nobody_reads_any_more_is_cancelled(limited: Deployment) -> None:
    """The gateway that submitted it is gone, and no other has resumed it."""
    client = limited.redis()
    params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    for number in range(32):  # enough of them that none ends by itself first
        request = GenerateRequest(f"orphan.{number}", "gateway-gone", MODEL, params, prompt="The")
        client.xadd(QUEUE, {"m": encode(request), "r": request.request_id, "g": "gateway-gone"})
    last = wait_until(
        lambda: (end := client.xrevrange("log:orphan.0", count=1)) and end[0][0].endswith(b"-1") and end[0],
        description="it has ended",
    )
    assert b"cancelled" in last[1][b"m"]
    assert client.xlen("log:orphan.0") < 1000
    assert client.ttl("log:orphan.0") > 0
    wait_until(lambda: not unfinished(limited), description="the others have ended")


def test_a_full_server_says_429_and_a_missing_stage_503(limited: Deployment) -> None:
    deployment = limited
    body = {"model": MODEL, "prompt": "The", "max_tokens": 5}
    too_many = deployment.post("/v1/completions", body | {"n": 3})
    assert too_many.status_code == 429
    assert too_many.headers["Retry-After"] == "2"
    assert too_many.json()["error"]["code"] == "server_full"
    assert deployment.post("/v1/completions", body | {"max_tokens": 5000}).status_code == 429
    assert deployment.post("/v1/completions", body).status_code == 200
    assert deployment.terminate(the(deployment, "tokenizer")) == 0
    wait_until(lambda: deployment.get("/ready").status_code == 503, description="not ready")
    missing = deployment.post("/v1/completions", body)
    assert missing.status_code == 503
    assert "no tokenizer" in missing.json()["error"]["message"] and missing.headers["Retry-After"]
    assert deployment.get("/health").status_code == 200
    deployment.kill(the(deployment, "compute"))
    wait_until(lambda: deployment.get("/health").status_code == 503, description="no compute, no health")


def test_validation_names_the_field(demo: Deployment) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    cases = [
        (chat | {"tools": [{"type": "function"}]}, "tools[0].function"),
        (chat | {"temperature": "hot"}, "temperature"),
        (chat | {"top_p": -0.5}, "top_p"),
        (chat | {"n": 0}, "n"),
        (chat | {"n": 1000}, "n"),
        (chat | {"stop": ["x"] * 17}, "stop"),
        (chat | {"top_logprobs": 3}, "top_logprobs"),
        (chat | {"logprobs": True, "top_logprobs": 21}, "logprobs"),
        (chat | {"logit_bias": {"a": 1}}, "logit_bias"),
        (chat | {"logit_bias": {"99999": 1}}, "logit_bias"),
        (chat | {"max_tokens": 0}, "max_tokens"),
        (chat | {"stream_options": {"include_usage": True, "include_position": True}}, "stream_options"),
        (chat | {"messages": []}, "messages"),
        (chat | {"messages": [{"role": "user"}]}, "messages[0].content"),
        (chat | {"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ]
    for body, field in cases:
        reply = demo.post("/v1/chat/completions", body)
        assert reply.status_code == 400, (field, reply.text)
        assert reply.json()["error"]["param"] == field, reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert demo.post("/v1/completions", {"model": MODEL, "prompt": []}).json()["error"]["param"] == "prompt"
    assert demo.post("/v1/completions", {"model": MODEL, "prompt": [99999]}).json()["error"]["param"] == "prompt"


def test_odd_http_gets_the_error_shape(demo: Deployment) -> None:
    url = demo.url() + "/v1/chat/completions"
    not_json = httpx.post(url, content=b"{nope", headers={"Content-Type": "application/json"}, trust_env=False)
    assert not_json.status_code == 400 and "not JSON" in not_json.json()["error"]["message"]
    assert httpx.get(url, trust_env=False).json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(demo.url() + "/nope", trust_env=False).status_code == 404
    too_long = httpx.post(url, content=b"x" * (33 << 20), headers={"Content-Type": "application/json"}, trust_env=False)
    assert too_long.status_code == 413 and "longer than" in too_long.json()["error"]["message"]


def test_request_ids_are_echoed_and_metrics_count(demo: Deployment) -> None:
    reply = demo.post(
        "/v1/completions",
        {"model": MODEL, "prompt": "x", "max_tokens": 2, "user": "tester"},
        **{"X-Request-Id": "abc-123"},
    )
    assert reply.headers["X-Request-Id"] == "abc-123"
    assert len(demo.get("/health").headers["X-Request-Id"]) == 32
    health = wait_until(
        lambda: (
            (found := demo.get("/health").json())
            and all(each["steps"] > 0 for each in found["compute"].values())
            and found
        ),
        description="compute has announced its steps",
    )
    assert health["status"] == "ok" and health["compute"]
    metrics = demo.get("/metrics").text
    assert 'penstock_request_success_total{finished_reason="length",model_name="penstock-demo"}' in metrics
    assert 'penstock_replicas{stage="sampler"} 1.0' in metrics
    values = {
        name: float(value) for name, value in re.findall(r"^(penstock_\w+\{[^}]*\}) (\S+)$", metrics, re.MULTILINE)
    }
    [(name, steps)] = [(name, value) for name, value in values.items() if name.startswith("penstock_steps_total")]
    labels = name.removeprefix("penstock_steps_total").strip("{}")
    assert values[f"penstock_iteration_tokens_total_count{{{labels}}}"] == steps > 0
    assert values[f"penstock_prefix_cache_queries_total{{{labels}}}"] > 0
    for part in ("schedule", "forward", "reduce", "publish", "wait"):
        name = labels.replace(",replica", f',part="{part}",replica')
        assert 0 <= values[f"penstock_step_seconds_total{{{name}}}"] < 600


def test_redis_url_errors_are_one_line(tmp_path: Path) -> None:
    deployment = Deployment("unix:///nonexistent/redis.sock", tmp_path, has_users=False)
    replica_id = deployment.start("sampler", redis_timeout_s=0.5)
    assert deployment.processes[replica_id].wait(120) == 2
    log = (tmp_path / f"{replica_id}.log").read_text().strip()
    assert log.startswith("penstock: Redis does not answer") and len(log.splitlines()) == 1


def test_a_missing_model_is_one_line(redis_url: str, tmp_path: Path) -> None:
    for stage in ("tokenizer", "compute", "sampler"):
        deployment = Deployment(redis_url, tmp_path)
        replica_id = deployment.start(stage, model="./no-such-folder")
        assert deployment.processes[replica_id].wait(120) == 2
        log = (tmp_path / f"{replica_id}.log").read_text().strip()
        assert log.startswith("penstock: no folder './no-such-folder'") and len(log.splitlines()) == 1
