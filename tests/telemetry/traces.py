"""One request's trace, from a client's own span through every process, with the compute replica
that has it killed in the middle.
"""

import os
import signal
from pathlib import Path

import httpx

from tests.collector import Collector
from tests.deployment import MODEL, Deployment
from tests.waiting import wait_until

NUM_TOKENS = 300
KILL_AFTER = 40  # tokens


def kill_its_compute(deployment: Deployment, collector: Collector, trace_id: str) -> str:
    """Kill the replica that has the sequence, its first spans sent. Without a sampler it waits
    meanwhile, however fast it is.
    """
    [sampler] = [process for replica_id, process in deployment.processes.items() if replica_id.startswith("sampler")]
    sampler.send_signal(signal.SIGSTOP)
    wait_until(
        lambda: any(span.name == "prefill" for span in collector.of(trace_id)), description="the first spans have come"
    )
    [killed] = {span.replica_id for span in collector.of(trace_id) if span.name == "prefill"}
    deployment.kill(killed)
    sampler.send_signal(signal.SIGCONT)
    return killed


def follow(redis_url: str, folder: Path) -> None:
    """Print the tree, and require that it is whole."""
    collector = Collector().start()
    deployment = Deployment(redis_url, folder, environment=collector.environment, programs={})
    try:
        deployment.start_all(computes=2, kv_cache_memory="64MiB", max_batched_tokens=128)
        trace_id = os.urandom(16).hex()
        traceparent = f"00-{trace_id}-{os.urandom(8).hex()}-01"
        body = {
            "model": MODEL,
            "prompt": "The river " * 150,
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "ignore_eos": True,
            "seed": 1,
        }
        killed = ""
        with httpx.stream(
            "POST",
            deployment.url() + "/v1/completions",
            json=body,
            headers={"traceparent": traceparent},
            timeout=120,
            trust_env=False,
        ) as reply:
            assert reply.status_code == 200, reply.read()
            for number, _ in enumerate(each for each in reply.iter_lines() if each.startswith("data: {")):
                if number == KILL_AFTER:
                    killed = kill_its_compute(deployment, collector, trace_id)
        expected = {
            "POST /v1/completions",
            "admission",
            "tokenize",
            "queue",
            "prefill",
            "prefill chunk",
            "decode",
            "sample",
            "stream",
        }
        wait_until(
            lambda: expected <= {span.name for span in collector.of(trace_id)}, description="all spans have come"
        )
        print(f"\n{killed} was killed after {KILL_AFTER} tokens\n\n{collector.tree(trace_id)}\n", flush=True)
        spans = collector.of(trace_id)
        root = next(span for span in spans if span.name == "POST /v1/completions")
        assert root.parent_id == traceparent.split("-")[2], "the trace is the client's"
        assert len({span.replica_id for span in spans if span.name == "prefill"}) == 2, "of both compute replicas"
        [decode] = [span for span in spans if span.name == "decode"]
        assert decode.replica_id != killed and decode.said["penstock.num_output_tokens"] == NUM_TOKENS
        queues = [span for span in spans if span.name == "queue"]
        assert [span.said["penstock.was_claimed"] for span in queues] == [False, True] and queues[1].said[
            "penstock.num_logged_tokens"
        ] >= KILL_AFTER
        known = {span.span_id for span in spans}
        assert all(span.parent_id in known for span in spans if span is not root), "no span hangs in the air"
        print(f"ok: {len(spans)} spans of {len({span.service for span in spans})} services in one trace", flush=True)
    finally:
        deployment.stop()
        collector.stop()
