"""Replicas that come and go in the middle of streams: no token moves, none is lost."""

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.deployment import Deployment
from tests.pipeline.streams import stream_all
from tests.waiting import wait_until

NUM_STREAMS, FEW_STREAMS, NUM_TOKENS = 24, 8, 70


@pytest.mark.more
def test_replicas_that_leave_join_and_are_killed_in_the_middle_of_streams_move_no_token(deployment: Deployment) -> None:
    """First a sampler and a tokenizer leave and others join; then a sampler is killed; then
    compute; then compute leaves.
    """
    deployment.start_all(tokenizers=2, samplers=2, dtype="float32")
    undisturbed = asyncio.run(stream_all(deployment, NUM_STREAMS, max_tokens=NUM_TOKENS))
    assert len(set(undisturbed)) > NUM_STREAMS // 2
    exit_codes = []

    async def replace() -> None:
        ids = [
            next(each for each in deployment.processes if each.startswith(stage)) for stage in ("sampler", "tokenizer")
        ]
        deployment.start("sampler", "sampler-new")
        deployment.start("tokenizer", "tokenizer-new")
        exit_codes.extend(
            await asyncio.gather(*(asyncio.to_thread(deployment.terminate, replica_id) for replica_id in ids))
        )

    assert asyncio.run(stream_all(deployment, NUM_STREAMS, max_tokens=NUM_TOKENS, disturb=replace)) == undisturbed
    assert exit_codes == [0, 0]
    deployment.wait_live("sampler-new", "tokenizer-new")
    texts = asyncio.run(stream_all(deployment, NUM_STREAMS, max_tokens=20))
    assert all(text and whole.startswith(text) for text, whole in zip(texts, undisturbed, strict=True))
    assert_shared(deployment)

    async def kill_sampler() -> None:
        deployment.kill("sampler-2")

    assert (
        asyncio.run(stream_all(deployment, FEW_STREAMS, max_tokens=NUM_TOKENS, disturb=kill_sampler))
        == undisturbed[:FEW_STREAMS]
    )

    async def replace_compute() -> None:
        deployment.kill(next(each for each in deployment.processes if each.startswith("compute")))
        deployment.start("compute", "compute-next", dtype="float32")

    assert (
        asyncio.run(stream_all(deployment, FEW_STREAMS, max_tokens=NUM_TOKENS, disturb=replace_compute))
        == undisturbed[:FEW_STREAMS]
    )

    async def hand_over() -> None:
        deployment.start("compute", "compute-third", dtype="float32")
        await asyncio.to_thread(deployment.wait_live, "compute-third")
        assert await asyncio.to_thread(deployment.terminate, "compute-next") == 0

    assert asyncio.run(stream_all(deployment, FEW_STREAMS, max_tokens=400, disturb=hand_over))[0].startswith(
        undisturbed[0]
    )


def assert_shared(deployment: Deployment) -> None:
    """Rendezvous hashing gave both samplers some of the sequences."""
    wait_until(lambda: num_deciding(deployment) == 2, description="both samplers say that they have decided tokens")


def num_deciding(deployment: Deployment) -> int:
    """Samplers that have announced tokens of their own: each does when its second is over."""
    return sum((each.load.tokens or 0) > 0 for each in deployment.registry().of("sampler"))


def test_cpu_stages_run_without_torch_and_compute_without_triton(demo: Deployment) -> None:
    """Triton is loaded where there is a GPU."""
    import torch

    for replica_id, process in demo.processes.items():
        files = {Path(each.path).name for each in psutil.Process(process.pid).memory_maps()}
        has_torch = any(name.startswith("libtorch") for name in files)
        assert has_torch == replica_id.startswith("compute"), replica_id
        assert not any(name.startswith("libtriton") for name in files) or torch.cuda.is_available(), replica_id
