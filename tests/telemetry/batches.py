"""A batch whose worker is killed: what is told of it while nobody works at it, and the traces of its lines."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.collector import Collector
from tests.deployment import MODEL, Deployment
from tests.waiting import wait_until

KILL_AFTER = 15  # lines
TOKENS_OF = [16] * (KILL_AFTER + 5) + [
    200
] * 40  # by line: the long ones take seconds, and the counts that the kill waits for are up to a second old
NUM_LINES, NUM_TOKENS = len(TOKENS_OF), sum(TOKENS_OF)
WORKER = {"batch_requests": 8, "busy_batch_requests": 8}
TIMEOUT_S = 180.0
LINE = {"batch line", "admission", "tokenize", "queue", "prefill", "decode", "sample"}


def run(deployment: Deployment, while_away: Callable[[], None], **headers: str) -> dict[str, Any]:
    """Have a batch answered by two workers, the second begun when the first has been killed, and
    `while_away` called between. Returns the batch.
    """
    bodies = [
        {"model": MODEL, "prompt": f"Line {number}", "max_tokens": count, "ignore_eos": True}
        for number, count in enumerate(TOKENS_OF)
    ]
    lines = [
        {"custom_id": f"{number:03}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    unshared = httpx.Limits(max_keepalive_connections=0)  # one that was idle for long may just be closed
    with httpx.Client(base_url=deployment.url(), timeout=60, trust_env=False, limits=unshared) as client:

        def found(batch_id: str) -> dict[str, Any]:
            time.sleep(0.2)
            return dict(client.get(f"/v1/batches/{batch_id}").raise_for_status().json())

        deployment.wait_live(deployment.start("jobs", "jobs-1", **WORKER))
        content = "\n".join(map(json.dumps, lines))
        file = (
            client.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
            .raise_for_status()
            .json()
        )
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        batch_id = client.post("/v1/batches", json=asked, headers=headers).raise_for_status().json()["id"]
        wait_until(
            lambda: found(batch_id)["request_counts"]["completed"] >= KILL_AFTER,
            description="some lines are answered",
            timeout_s=TIMEOUT_S,
        )
        deployment.kill("jobs-1")
        assert found(batch_id)["status"] == "in_progress", "the worker was killed after the batch's end"
        while_away()
        deployment.start("jobs", "jobs-2", **WORKER)
        wait_until(
            lambda: found(batch_id)["status"] == "completed", description="the batch is answered", timeout_s=TIMEOUT_S
        )
        return found(batch_id)


def follow_batch(redis_url: str, folder: Path) -> None:
    """Print the traces of the batch and of a line, and require that every line's is whole."""
    collector = Collector().start()
    deployment = Deployment(redis_url, folder, environment=collector.environment, programs={})
    trace_id = os.urandom(16).hex()
    try:
        deployment.start_all()
        batch = run(deployment, lambda: None, traceparent=f"00-{trace_id}-{os.urandom(8).hex()}-01")
        output = httpx.get(
            f"{deployment.url()}/v1/files/{batch['output_file_id']}/content", timeout=60, trust_env=False
        ).text
        keys = [json.loads(each)["response"]["request_id"] for each in output.splitlines()]
        wait_until(
            lambda: any(span.name == "batch run" for span in collector.of(trace_id)), description="the batch's run"
        )
        wait_until(
            lambda: all({span.name for span in collector.of(key)} >= LINE for key in keys),
            description="every line's spans",
            timeout_s=60,
        )
        print(
            f"\njobs-1 was killed after {KILL_AFTER} "
            f"lines\n\n{collector.tree(trace_id)}\n\n{collector.tree(keys[-1])}\n",
            flush=True,
        )
        [last] = [span for span in collector.of(trace_id) if span.name == "batch run" and span.said["penstock.is_over"]]
        assert (last.replica_id, last.said["penstock.num_completed"], last.said["penstock.num_failed"]) == (
            "jobs-2",
            NUM_LINES,
            0,
        )
        assert [span.parent_id for span in collector.of(trace_id) if span.name == "write output"] == [last.span_id]
        for key in keys:
            spans = collector.of(key)
            roots = [span for span in spans if span.name == "batch line"]
            assert {(span.span_id, span.parent_id, span.links) for span in roots} == {(key[:16], "", (trace_id,))}, (
                "the same, whoever answered"
            )
            assert {span.parent_id for span in spans if span not in roots} <= {span.span_id for span in spans}, (
                "no span hangs in the air"
            )
        twice = sum(len([span for span in collector.of(key) if span.name == "batch line"]) > 1 for key in keys)
        print(
            f"ok: {len(keys)} lines, each a whole trace; {twice} of them were read again by the second worker",
            flush=True,
        )
    finally:
        deployment.stop()
        collector.stop()
