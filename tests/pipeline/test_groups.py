"""A replica of several processes behind a whole pipeline: its answers are those of one process, whatever dies."""

import asyncio
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from services.operator.status import Watcher
from shared.wire.transport import connect
from tests.deployment import MODEL, Deployment
from tests.pipeline.streams import stream_all
from tests.waiting import wait_until

NUM_STREAMS, NUM_TOKENS = 6, 60
GROUPS = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]
SHARDED = [{"tensor_parallel_size": 2, "shard_weights": True}]


def wait_ready(deployment: Deployment, compute: str) -> None:
    deployment.wait_live(compute)
    wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway is ready")


def ranks_of(deployment: Deployment, compute: str) -> list[psutil.Process]:
    """The processes that rank 0 has started."""
    found: list[psutil.Process] = psutil.Process(deployment.processes[compute].pid).children()
    return found


def ranks_shown(deployment: Deployment, compute: str) -> tuple[str, ...]:
    """Their places, as `penstock status` shows them."""
    with connect(deployment.redis_url) as client:
        return next(
            line.ranks for line in Watcher(client).watch(0).replicas if line.pid == deployment.processes[compute].pid
        )


@pytest.mark.more  # stages/test_group.py and stages/test_ranks_in_line.py are not
@pytest.mark.parametrize("groups", [GROUPS[:1], GROUPS[1:], SHARDED], ids=["ranks", "stages", "sharded"])
def test_groups_give_the_bytes_of_one_process_and_lose_nothing_with_a_rank(
    deployment: Deployment, groups: list[dict[str, Any]]
) -> None:
    deployment.start_all(num_threads=1)
    [alone] = [name for name in deployment.processes if name.startswith("compute")]
    expected = asyncio.run(stream_all(deployment, NUM_STREAMS, max_tokens=NUM_TOKENS))
    deployment.kill(alone)
    for number, sizes in enumerate(groups):
        group = deployment.start("compute", f"compute-group-{number}", num_threads=1, group_timeout_s=2.0, **sizes)
        wait_ready(deployment, group)
        assert ranks_shown(deployment, group) == tuple(
            f"{socket.gethostname()}:{rank.pid}" for rank in ranks_of(deployment, group)
        )
        assert asyncio.run(stream_all(deployment, NUM_STREAMS, max_tokens=NUM_TOKENS)) == expected

        async def kill_a_rank(group: str = group, number: int = number) -> None:
            rank = ranks_of(deployment, group)[-1]
            rank.send_signal(signal.SIGSTOP if number == 1 else signal.SIGKILL)
            await asyncio.to_thread(deployment.processes[group].wait, 20)
            deployment.start("compute", f"compute-again-{number}", num_threads=1, **sizes)  # noqa: B023

        assert asyncio.run(stream_all(deployment, NUM_STREAMS, max_tokens=NUM_TOKENS, disturb=kill_a_rank)) == expected
        deployment.terminate(f"compute-again-{number}")


PROMPT = "A penstock is a pipe that"
NAME, SIZES = {"type": "string", "maxLength": 20}, {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
SCHEMA = {
    "type": "object",
    "properties": {"name": NAME, "sizes": SIZES},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
TEXT = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "What is Penstock?"}], "max_tokens": 60, "seed": 7}
# of each way to ask, by name: path and body
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", TEXT | {"temperature": 0}),
    "seeded": ("/v1/completions", TEXT | {"temperature": 1.1, "top_p": 0.9, "seed": 3}),
    "n": ("/v1/completions", TEXT | {"temperature": 0.9, "n": 3, "seed": 4}),
    "logprobs": ("/v1/completions", TEXT | {"temperature": 0.8, "seed": 5, "logprobs": 5}),
    "penalties": (
        "/v1/completions",
        TEXT | {"temperature": 0.9, "seed": 6, "repetition_penalty": 1.3, "logit_bias": {"40": 2}},
    ),
    "echo": ("/v1/completions", TEXT | {"temperature": 0, "echo": True, "logprobs": 2}),
    "prompt logprobs": ("/v1/completions", TEXT | {"temperature": 0, "max_tokens": 3, "prompt_logprobs": 3}),
    "chat": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 4}),
    "schema": (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}},
    ),
    "object": ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
    "embeddings": ("/v1/embeddings", {"input": [PROMPT, "water", PROMPT * 9]}),
    "too long": ("/v1/completions", TEXT | {"prompt": PROMPT * 900}),
}
OWN = ("id", "created", "system_fingerprint", "kv_transfer_params")  # of each answer its own


def answers(deployment: Deployment) -> dict[str, Any]:
    """Status and body of each request; two of each at once, so that they meet in steps."""
    with ThreadPoolExecutor(2 * len(REQUESTS)) as pool:
        asked = [
            (name, pool.submit(deployment.post, path, {"model": MODEL, **body}))
            for name, (path, body) in [*REQUESTS.items()] * 2
        ]
    found: dict[str, Any] = {}
    for name, future in asked:
        reply = future.result()
        body = {key: value for key, value in reply.json().items() if key not in OWN}
        body.get("usage", {}).pop("prompt_tokens_details", None)  # who came first
        assert found.setdefault(name, (reply.status_code, body)) == (reply.status_code, body), name
    return found


@pytest.mark.more
def test_groups_answer_each_kind_of_request_as_one_process_does(deployment: Deployment) -> None:
    deployment.start_all(num_threads=1)
    [compute] = [name for name in deployment.processes if name.startswith("compute")]
    expected = answers(deployment)
    assert {name for name, (status, _) in expected.items() if status != 200} == {"too long"}
    for number, (speculate, sizes) in enumerate(
        [("off", GROUPS[0]), *zip(("self", "auto,self", "auto"), GROUPS, strict=True)]
    ):
        deployment.kill(compute)
        compute = deployment.start("compute", f"compute-{number}", num_threads=1, speculate=speculate, **sizes)
        wait_ready(deployment, compute)
        found = answers(deployment)
        assert {name: found[name] for name in REQUESTS if found[name] != expected[name]} == {}, (sizes, speculate)


def test_more_stages_than_layers_are_refused_before_any_rank_starts(deployment: Deployment) -> None:
    compute = deployment.start("compute", pipeline_parallel_size=40)
    assert deployment.processes[compute].wait(30) == 2
    assert (
        "penstock: --pipeline-parallel-size 40: the model has 4 layers, and each stage needs one"
        in deployment.logs().splitlines()
    )


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"dtype": "float32"}, "--tensor-parallel-size 2: not with --dtype float32 on a CPU, where torch computes it"),
        (
            {"model_impl": "transformers"},
            "--model-impl transformers: that library runs a model whole; ranks divide models that run on our own "
            "executor",
        ),
    ],
)
@pytest.mark.more
def test_a_model_that_no_group_can_run_is_refused_in_one_line(
    settings: dict[str, str], line: str, deployment: Deployment
) -> None:
    compute = deployment.start("compute", tensor_parallel_size=2, **settings)
    assert deployment.processes[compute].wait(60) == 2
    told = [each for each in deployment.logs().splitlines() if each.startswith("penstock: ")]
    assert len(told) == 1 and line in told[0]
