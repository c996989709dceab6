"""A real compute process that could not see for a while: what happened to others meanwhile is not held against them."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from shared.wire.registry import LEASE_S, announce
from shared.wire.replica import Replica
from shared.wire.streams import replica_key
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.stages.test_deaths import events, request, start_fragile, submit, wait_for_all
from tests.waiting import wait_until

GRACE_S = 6.0
GATEWAY = Replica("gateway", "gateway-1", "here", 1, 0.0)


@contextmanager
def announced(deployment: Deployment, replica: Replica) -> Iterator[None]:
    """The replica renews its lease."""
    is_over = threading.Event()

    def renew() -> None:
        with deployment.redis() as client:
            while True:
                announce(client, replica)
                if is_over.wait(0.5):
                    return

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.more
def test_compute_that_was_stopped_cancels_no_request_whose_gateway_comes_back(
    tmp_path: Path, redis_binary: Path | None
) -> None:
    """When compute goes on, the gateway's lease is out, and was not for longer than the grace; then it comes back."""
    with running_redis(tmp_path / "redis", redis_binary) as url:
        deployment = Deployment(url, tmp_path)
        try:
            compute = start_fragile(
                deployment, "compute-0", FRAGILE_STEP_S="0.05", PENSTOCK_READER_TIMEOUT_S=str(GRACE_S)
            )
            deployment.start("sampler", "sampler-1")
            deployment.wait_live("sampler-1", compute)
            client, asked = (
                deployment.redis(),
                [replace(request("read", number, 200), gateway_id="gateway-1") for number in range(4)],
            )
            with announced(deployment, GATEWAY):
                submit(client, asked)
                wait_until(lambda: all(events(client, each) for each in asked), description="they have begun")
                time.sleep(2.0)  # of beats: compute has seen the gateway
            deployment.processes[compute].send_signal(signal.SIGSTOP)
            before = [len(events(client, each)) for each in asked]
            time.sleep(max(LEASE_S, GRACE_S) + 2.0)
            assert not client.exists(replica_key("gateway", "gateway-1")), "its lease is out"
            deployment.processes[compute].send_signal(signal.SIGCONT)
            wait_until(lambda: client.exists(replica_key("compute", compute)), description="compute sees again")
            wait_until(
                lambda: all(len(events(client, each)) > count for each, count in zip(asked, before, strict=True)),
                description="it goes on",
            )
            time.sleep(2.0)  # of looks at a registry without the gateway
            with announced(deployment, GATEWAY):
                wait_for_all(deployment, asked)
            assert [events(client, each)[-1].finish_reason for each in asked] == ["length"] * len(asked)
        finally:
            for process in deployment.processes.values():
                process.kill()
                process.wait()
