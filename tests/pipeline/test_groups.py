"""A replica of several processes behind a whole pipeline: its answers are those of one process, whatever dies."""

import asyncio
import signal

import psutil

from tests.deployment import Deployment
from tests.pipeline.streams import stream_all
from tests.waiting import wait_until

NUM_STREAMS, NUM_TOKENS = 6, 60
GROUPS = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}]


def wait_ready(deployment: Deployment, compute: str) -> None:
    deployment.wait_live(compute)
    wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway is ready")


def ranks_of(deployment: Deployment, compute: str) -> list[psutil.Process]:
    """The processes that rank 0 has started."""
    found: list[psutil.Process] = psutil.Process(deployment.processes[compute].pid).children()
    return found


def test_groups_give_the_bytes_of_one_process_and_lose_nothing_with_a_rank(deployment: Deployment) -> None:
    deployment.start_all(num_threads=1)
    [alone] = [name for name in deployment.processes if name.startswith("compute")]
    expected = asyncio.run(stream_all(deployment, NUM_STREAMS, max_tokens=NUM_TOKENS))
    deployment.kill(alone)
    for number, sizes in enumerate(GROUPS):
        group = deployment.start("compute", f"compute-group-{number}", num_threads=1, group_timeout_s=2.0, **sizes)
        wait_ready(deployment, group)
        assert asyncio.run(stream_all(deployment, NUM_STREAMS, max_tokens=NUM_TOKENS)) == expected

        async def kill_a_rank(group: str = group, number: int = number) -> None:
            rank = ranks_of(deployment, group)[-1]
            rank.send_signal(signal.SIGSTOP if number == 1 else signal.SIGKILL)
            await asyncio.to_thread(deployment.processes[group].wait, 20)
            deployment.start("compute", f"compute-again-{number}", num_threads=1, **sizes)  # noqa: B023

        assert asyncio.run(stream_all(deployment, NUM_STREAMS, max_tokens=NUM_TOKENS, disturb=kill_a_rank)) == expected
        deployment.terminate(f"compute-again-{number}")
