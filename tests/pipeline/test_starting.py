"""A request for a model that was served before waits while its replicas are started, as an operator
with scale to zero lets it.
"""

import json
import threading
from typing import Any

import httpx
import pytest

from shared.wire.streams import prompts, requests, served_key
from tests.deployment import MODEL, Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.more  # gateway/test_starting.py and stages/test_waiting_requests.py are not
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name a river."}],
    "max_tokens": 40,
    "seed": 7,
    "temperature": 1.0,
}
STAGES = ("tokenizer", "compute", "sampler")


def stream_of(deployment: Deployment, gateway: str, lines: list[str], **body: Any) -> threading.Thread:
    """Read a stream's lines in a thread, as they come."""

    def read() -> None:
        with httpx.stream(
            "POST",
            deployment.url(gateway) + "/v1/chat/completions",
            json=ASKED | {"stream": True} | body,
            timeout=120,
            trust_env=False,
        ) as reply:
            assert reply.status_code == 200, reply.read()
            lines.extend(reply.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def data_of(lines: list[str]) -> list[str]:
    """The events without what differs from response to response."""
    return [line.split('"choices":', 1)[1] for line in lines if line.startswith("data: {")]


def test_requests_wait_for_the_replicas_that_are_started_and_are_answered_with_the_same_bytes(
    deployment: Deployment,
) -> None:
    """The whole pipeline is gone, and the gateway was replaced. A stream and a batch come; then a
    tokenizer, and then the rest.
    """
    settings = {"dtype": "float32", "max_model_len": 64, "ping_interval_s": 0.3, "wait_for_replicas_s": 100}
    deployment.start_all(**settings)
    [first] = deployment.ports
    warm: list[str] = []
    stream_of(deployment, first, warm, max_tokens=500).join()
    assert not any(line.startswith(":") for line in warm)
    with deployment.redis() as client:
        wait_until(
            lambda: all(client.exists(served_key(stage, MODEL)) for stage in STAGES),
            description="the replicas are remembered",
        )
        assert {
            deployment.terminate(replica_id) for replica_id in list(deployment.processes) if replica_id != first
        } == {0}
        second = deployment.start("gateway", "gateway-second", **settings)
        deployment.kill(first)
        del deployment.ports[first]
        wait_until(
            lambda: deployment.get("/ready", second).status_code == 200,
            description="the gateway is ready without a pipeline",
        )
        assert deployment.get("/health", second).status_code == 200
        assert deployment.post("/v1/chat/completions", ASKED | {"model": "never-served"}).status_code == 404
        assert deployment.get("/v1/models", second).json()["data"][0]["max_model_len"] == 64
        assert (
            deployment.get("/api/ps", second).json()["models"]
            == []
            != deployment.get("/api/tags", second).json()["models"]
        )
        cold: list[str] = []
        asking = stream_of(deployment, second, cold, max_tokens=500)
        wait_until(lambda: cold.count(": starting") >= 2, description="the stream says that a replica is being started")
        assert client.xinfo_groups(requests(MODEL).key)[0]["lag"] == 1, "what wakes the stages"
        deployment.start("jobs", **settings)
        line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": ASKED}
        with deployment.client(second) as asked:
            file = asked.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
            batch = asked.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            wait_until(
                lambda: client.xinfo_groups(requests(MODEL).key)[0]["lag"] == 2, description="a batch wakes them, too"
            )
        deployment.start("tokenizer", **settings)
        wait_until(
            lambda: client.xinfo_groups(prompts(MODEL).key)[0]["lag"] == 2, description="the prompts wait for compute"
        )
        deployment.start("sampler", **settings)
        deployment.start("compute", **settings)
        asking.join()
        assert data_of(cold) == data_of(warm), "cut by the length that compute had, too"
        with deployment.client(second) as asked:
            wait_until(
                lambda: asked.batches.retrieve(batch.id).status == "completed", description="the batch is answered"
            )
        again: list[str] = []
        stream_of(deployment, second, again, max_tokens=500).join()
        assert data_of(again) == data_of(warm) and not any(line.startswith(":") for line in again)
