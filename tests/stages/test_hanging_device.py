"""A device that hangs without an error: its process ends when the step has taken too long, and
another goes on with its requests.
"""

import time
from pathlib import Path

import pytest

from shared.process.settings import ComputeSettings
from shared.wire import registry
from shared.wire.stage import Stage
from tests.conftest import running_redis
from tests.deployment import Deployment, free_port
from tests.stages.test_deaths import (
    answers,
    events,
    leases_end_with_processes,
    request,
    start_fragile,
    submit,
    undisturbed,
    wait_for_all,
)
from tests.waiting import wait_until

STEP_TIMEOUT_S = 3.0
WORD = "a step does not end, ending the process"


def test_a_step_that_does_not_end_ends_its_process_and_another_goes_on(
    tmp_path: Path, redis_binary: Path | None
) -> None:
    with running_redis(tmp_path / "redis", redis_binary) as url:
        deployment = Deployment(url, tmp_path)
        try:
            hanging = start_fragile(
                deployment, "compute-0", FRAGILE_HANGS="1", PENSTOCK_STEP_TIMEOUT_S=str(STEP_TIMEOUT_S)
            )
            deployment.start("sampler", "sampler-1")
            deployment.wait_live("sampler-1", hanging)
            client, running = deployment.redis(), [request("by", number, 40) for number in range(3)]
            submit(client, running)
            wait_until(lambda: all(events(client, each) for each in running), description="they have begun")
            asked = [*running, request("hangs", 1, 12, is_poison=True)]
            began_at = time.monotonic()
            submit(client, asked[-1:])
            time.sleep(STEP_TIMEOUT_S / 2)
            assert hanging in {each.replica_id for each in deployment.registry().replicas}, (
                "a step may take that long: it keeps its requests"
            )
            assert deployment.processes[hanging].wait(60) == 1, deployment.logs()
            assert STEP_TIMEOUT_S - 1 <= time.monotonic() - began_at < STEP_TIMEOUT_S + 30
            assert (tmp_path / f"{hanging}.log").read_text().count(WORD) == 1
            start_fragile(deployment, "compute-1", FRAGILE_TOKEN="-1")
            with leases_end_with_processes(deployment):
                wait_for_all(deployment, asked)
            assert answers(client, asked) == undisturbed(deployment, asked)
        finally:
            for process in deployment.processes.values():
                process.kill()
                process.wait()


class EndedError(Exception):
    """In place of the process's end."""


def end(code: int) -> None:
    raise EndedError(code)


def test_only_a_step_beyond_its_own_bound_ends_compute(
    tmp_path: Path, redis_binary: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of minutes are slow, not stuck: their replica is alive."""
    monkeypatch.setattr(registry.os, "_exit", end)
    with running_redis(tmp_path / "redis", redis_binary) as url:
        settings = ComputeSettings(redis_url=url)
        compute, other = Stage("compute", settings, step_timeout_s=3600.0), Stage("sampler", settings)
        for each in (compute, other):
            each._alive_at -= 2 * registry.STUCK_AFTER_S
            each._served_at -= 2 * registry.STUCK_AFTER_S
            each._heartbeat.beat()
        assert {each.stage for each in compute.registry.replicas} == {"compute"}
        compute._alive_at -= 3600.0
        with pytest.raises(EndedError):
            compute._heartbeat.beat()
        for each in (compute, other):
            each._heartbeat.transport.close()


def test_waiting_for_redis_is_no_step() -> None:
    """However long it is away: it is asked again and again, and each time is a sign of life."""
    waiting = Stage("compute", ComputeSettings(redis_url=f"redis://127.0.0.1:{free_port()}/0"), step_timeout_s=300.0)
    idle_s: list[float] = []

    def ask() -> None:
        idle_s.append(waiting.describe().idle_s)
        waiting._alive_at -= 200.0
        if len(idle_s) < 4:
            waiting.transport.client.ping()

    waiting.transport.persist(ask)
    assert len(idle_s) == 4 and max(idle_s) < 100.0
