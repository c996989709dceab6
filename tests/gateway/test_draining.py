"""SIGTERM with open responses: they end with a word on where to go on, nothing is cancelled, and
nothing is said in tracebacks.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from services.gateway.http.middleware import CutOff
from shared.wire.streams import tombstone_key
from tests.deployment import Deployment
from tests.gateway.backstage import Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.streams import BODY, begun, streaming
from tests.waiting import wait_until


def test_sigterm_hands_open_responses_over(deployment: Deployment, own: Backstage, tmp_path: Path) -> None:
    first, second = start_gateways(deployment, 2)
    whole: list[httpx.Response] = []
    url = deployment.url(first) + "/v1/completions"
    asking = threading.Thread(
        target=lambda: whole.append(
            httpx.post(url, json=BODY | {"stream": False, "stream_options": None}, timeout=60, trust_env=False)
        )
    )
    with begun(deployment, own, 1, gateway=first) as (stream, request):
        asking.start()
        own.take()
        with streaming(deployment, gateway=first) as ending:
            [short] = own.take()
            deployment.processes[first].terminate()
            wait_until(
                lambda: first not in {each.replica_id for each in deployment.registry().replicas},
                description="it has left the registry",
            )
            own.write(short, 1, finish=1)
            ending.wait_end()
            assert ending.text == "1 " and ending.error is None  # what ends within the time ends as always
        stream.wait_end()
        asking.join()
        response_id = stream.chunks[0]["id"]
        assert stream.error == {
            "message": f"the gateway is shutting down: resume with GET /v1/streams/{response_id}",
            "type": "unavailable_error",
            "param": None,
            "code": "gateway_draining",
        }
        assert stream.lines[-2] == "data: [DONE]"
        assert (
            whole[0].status_code == 503
            and whole[0].json()["error"]["code"] == "gateway_draining"
            and whole[0].headers["Retry-After"]
        )
        assert deployment.processes.pop(first).wait(60) == 0
        assert "Traceback" not in (tmp_path / f"{first}.log").read_text()
        assert not own.controls("cancel") and not own.client.exists(tombstone_key(request.request_id))
        with streaming(deployment, resume=response_id, last_id=stream.last_id, gateway=second) as again:
            own.write(request, 2, finish=2, gateway=second)
            again.wait_end()
            assert again.text == "2 " and again.finish_reasons == ["length"]


def test_a_gateway_stops_though_redis_does_not_reply(deployment: Deployment, own: Backstage) -> None:
    [gateway] = start_gateways(deployment)
    server = int(own.client.info("server")["process_id"])
    os.kill(server, signal.SIGSTOP)
    try:
        time.sleep(1.5)  # a heartbeat waits for its reply
        assert deployment.terminate(gateway, timeout_s=60) == 0
    finally:
        os.kill(server, signal.SIGCONT)


def test_a_taken_port_is_one_line(own: Backstage, deployment: Deployment) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [
            sys.executable,
            "-m",
            "services.gateway",
            "--port",
            str(taken.getsockname()[1]),
            "--redis-url",
            "unix:///nowhere",
        ]
        found = subprocess.run(command, capture_output=True, text=True, timeout=200)  # the port comes before Redis
    assert found.returncode == 2
    assert found.stderr.startswith("penstock: could not listen on 127.0.0.1:") and len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("path, code", [("/v1/completions", "gateway_draining"), ("/v1/messages", None)])
def test_what_the_server_cancels_before_its_answer_has_begun_is_told_so(path: str, code: str | None) -> None:
    """A gateway that was stopped while it drained has no time left when it goes on."""
    sent: list[Message] = []

    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.get_running_loop().create_future()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def cancel() -> None:
        scope = {"type": "http", "path": path, "headers": [], "method": "POST"}
        request = asyncio.create_task(CutOff(hang)(scope, receive, send))
        await asyncio.sleep(0)
        request.cancel()
        await request

    asyncio.run(cancel())
    start, body = sent
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"].get("code") == code
