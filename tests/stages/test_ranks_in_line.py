"""Ranks in the pipeline: the logs are byte for byte those of one process, with grammars, stop strings, penalties, several choices, drafts, preemption, and
several steps in the stages of a model at once."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from services.compute.batch import ScheduledBatch
from services.compute.engine import build_engine
from services.compute.group.launch import open_group
from services.compute.scheduling.new_step import NewStep
from shared.process.settings import ComputeSettings, environment_of
from shared.wire.messages import encode
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.deployment import free_port
from tests.kernels.teams import Team
from tests.stages.line_of_stages import FILES, LineOfStages, hurried
from tests.stages.test_speculation import REQUESTS


def answers(line: LineOfStages) -> dict[str, list[Any]]:
    """The logs' events; how much of its prompt a choice found computed depends on when the one before it came."""
    logs = line.answer(*REQUESTS, timeout_s=300).items()
    found = {name: [encode(replace(event, num_cached_tokens=0)) for event in parse_log(log)] for name, log in logs}
    line.forget_logs()
    return found


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("ranks"), redis_binary) as url, hurried():
        yield url


@pytest.fixture(scope="module")
def expected(redis_url: str) -> dict[str, Any]:
    with LineOfStages(redis_url).running() as line:
        return answers(line)


def crowd(line: LineOfStages, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on sequences lose their blocks at times."""
    scheduler, rng = line.compute.scheduler, random.Random(3)
    schedule = scheduler.schedule

    def crowded() -> ScheduledBatch | None:
        if len(scheduler.running) > 1 and rng.random() < 0.2:
            scheduler._preempt(rng.choice(list(scheduler.running.values())), NewStep())
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", crowded)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_divide_every_layer(redis_url: str, expected: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    line = LineOfStages(redis_url)
    with Team(FILES, size, num_blocks=line.compute.scheduler.block_manager.num_blocks) as team:
        line.compute.executor = team.runner
        with line.running():
            assert answers(line) == expected
            crowd(line, monkeypatch)
            assert answers(line) == expected


def start(settings: ComputeSettings, rank: int) -> "subprocess.Popen[bytes]":
    """A rank that is started by hand."""
    environment = environment_of(settings) | {"PENSTOCK_RANK": str(rank)}
    return subprocess.Popen([sys.executable, "-m", "services.compute"], env=os.environ | environment)


@contextmanager
def grouped_line(redis_url: str, **sizes: Any) -> Iterator[LineOfStages]:
    """A line whose compute leads a group of other processes."""
    cores = os.sched_getaffinity(0)
    settings = ComputeSettings(
        redis_url=redis_url, replica_id="compute-1", model="demo", dtype="bfloat16", kv_cache_memory="64MiB", num_threads=1, prefix_caching=False,
        max_num_seqs=8, publish_interval_ms=10, **sizes,
    )  # fmt: skip
    others = [start(settings, rank) for rank in range(1, settings.num_ranks)] if settings.master else []
    group = open_group(settings)
    assert group is not None
    try:
        with group:
            with LineOfStages(redis_url, engine=build_engine(settings, FILES, group)).running() as line:
                yield line
            group.close()
    finally:
        torch.distributed.destroy_process_group()
        os.sched_setaffinity(0, cores)
        for each in others:
            assert each.wait(20) == 0


@pytest.mark.parametrize("speculate", ["off", "lookup", pytest.param("self", marks=pytest.mark.more)])
def test_stages(redis_url: str, expected: dict[str, Any], speculate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with grouped_line(redis_url, pipeline_parallel_size=2, speculate=speculate) as line:
        assert answers(line) == expected
        stages, step, numbers = line.compute.stages, line.compute.stages.step, set[int]()

        def counted(*arguments: Any) -> None:
            step(*arguments)
            numbers.add(len(stages.steps))

        monkeypatch.setattr(stages, "step", counted)
        crowd(line, monkeypatch)
        assert answers(line) == expected
        assert numbers == {0, 1}, "a step stays in the stages while the next is scheduled"


def test_ranks_of_hosts(redis_url: str, expected: dict[str, Any]) -> None:
    """Their memory is their own, and results go through torch.distributed."""
    with grouped_line(redis_url, tensor_parallel_size=2, master=f"127.0.0.1:{free_port()}", rank=0) as line:
        assert answers(line) == expected


@pytest.mark.more
@pytest.mark.parametrize("speculate", ["off", "self"])
def test_stages_of_ranks(redis_url: str, expected: dict[str, Any], speculate: str) -> None:
    with grouped_line(redis_url, tensor_parallel_size=2, pipeline_parallel_size=2, speculate=speculate) as line:
        assert answers(line) == expected
