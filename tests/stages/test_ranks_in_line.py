"""Ranks in the pipeline: the logs are byte for byte those of one process, with grammars, stop strings,
penalties, several choices, drafts, preemption, and several steps in the stages of a model at once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from msgspec.structs import replace
from safetensors.torch import save_file
from tokenizers import Tokenizer

from services.compute.execution.executor import DrawnTokens
from services.compute.execution.model_runner import ModelRunner
from services.compute.loop.engine import Engine, build_engine
from services.compute.ranks.group.ends import open_group
from services.compute.sequence.batch import ScheduledBatch
from services.operator.model_store import DEFAULT_MODEL
from shared.model.files import PULLED_MODELS, ModelFiles, open_model
from shared.process.settings import ComputeSettings
from shared.process.stage_settings import environment_of
from shared.wire.messages import encode
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.deployment import free_port
from tests.kernels.families import Engine as OfflineEngine
from tests.kernels.teams import Team
from tests.stages.line_of_stages import FILES, LineOfStages, crowd, hurried
from tests.stages.test_heads import HIDDEN, write_linear_head
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


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.more), 3])
def test_ranks_that_divide_every_layer(
    redis_url: str, expected: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def grouped_engine(files: ModelFiles, **options: Any) -> Iterator[Engine]:
    """The engine of a group's head."""
    cores = os.sched_getaffinity(0)
    settings = ComputeSettings(
        replica_id="compute-1", dtype="bfloat16", num_threads=1, prefix_caching=False, publish_interval_ms=10, **options
    )
    others = [start(settings, rank) for rank in range(1, settings.num_ranks)] if settings.master else []
    group = open_group(settings)
    assert group is not None
    try:
        with group:
            yield build_engine(settings, files, group)
            group.close()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.sched_setaffinity(0, cores)
        for each in others:
            assert each.wait(20) == 0


@contextmanager
def grouped_line(redis_url: str, **sizes: Any) -> Iterator[LineOfStages]:
    """A line whose compute leads a group."""
    with (
        grouped_engine(
            FILES, redis_url=redis_url, model="demo", kv_cache_memory="64MiB", max_num_seqs=8, **sizes
        ) as engine,
        LineOfStages(redis_url, engine=engine).running() as line,
    ):
        yield line


@pytest.mark.parametrize(
    "speculate", ["lookup", pytest.param("off", marks=pytest.mark.more), pytest.param("self", marks=pytest.mark.more)]
)
def test_stages(redis_url: str, expected: dict[str, Any], speculate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with grouped_line(redis_url, pipeline_parallel_size=2, speculate=speculate) as line:
        assert answers(line) == expected
        step, numbers = line.compute.step, set[int]()

        def counted() -> None:
            step()
            numbers.add(len(line.compute.in_model))

        monkeypatch.setattr(line.compute, "step", counted)
        crowd(line, monkeypatch)
        assert answers(line) == expected
        assert numbers == {0, 1}, "a step stays in the stages while the next is scheduled"


@pytest.mark.more
@pytest.mark.parametrize(
    "sizes", [(2, 1), (1, 2), (1, 3), (2, 2)], ids=lambda sizes: f"{sizes[0]} ranks, {sizes[1]} stages"
)
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_ranks_whose_head_is_shared_with_heads_that_draft(
    redis_url: str, expected: dict[str, Any], kind: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    """Heads without an LM head use the model's, of which each rank has a part; and an EAGLE head reads
    the states of all stages."""
    folder = tmp_path / "heads"
    if kind == "eagle":
        write_linear_head(folder, torch.zeros(HIDDEN, 2 * HIDDEN), torch.ones(HIDDEN))
    else:
        folder.mkdir()
        shapes = {"weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}
        save_file(
            {f"blocks.0.layers.0.{part}": torch.randn(shape) for part, shape in shapes.items()},
            folder / "model.safetensors",
        )
    ranks, stages = sizes
    with grouped_line(
        redis_url, tensor_parallel_size=ranks, pipeline_parallel_size=stages, heads=str(folder), speculate=kind
    ) as line:
        assert answers(line) == expected
        assert line.compute.speculation.total.num_draft_tokens > 0


@pytest.mark.more
@pytest.mark.parametrize(("sizes", "taps"), [((1, 2), (3, 0, 2)), ((1, 3), (4, 1, 2)), ((2, 2), (0, 1, 4))], ids=str)
def test_what_an_eagle_head_reads_in_stages(sizes: tuple[int, int], taps: tuple[int, ...], tmp_path: Path) -> None:
    """Bit by bit what it reads of one process, in the order of its taps, each step's when it is asked for."""
    folder, (ranks, stages) = (
        write_linear_head(tmp_path / "head", torch.zeros(HIDDEN, 2 * HIDDEN), torch.ones(HIDDEN), taps),
        sizes,
    )
    alone = OfflineEngine(FILES, dtype=torch.bfloat16, max_batched_tokens=16)
    alone.runner.model.tap(taps)
    noted: dict[str, list[torch.Tensor]] = {}

    def note(name: str, runner: ModelRunner) -> None:
        run, found = runner.run, noted.setdefault(name, [])

        def noting(batch: ScheduledBatch, drawn: DrawnTokens | None = None) -> Any:
            hidden = run(batch, drawn)
            found.append(runner.tapped_states(batch, hidden, range(batch.num_tokens)))
            return hidden

        runner.run = noting  # type: ignore[method-assign]

    note("alone", alone.runner)
    prompts = [list(range(5, 45)), [7, 8, 9], [300]]
    tokens = alone.generate(prompts, 8)
    with grouped_engine(
        FILES,
        model="demo",
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        kv_cache_memory="16MiB",
        heads=str(folder),
        speculate="eagle",
    ) as engine:
        together = OfflineEngine(alone, dtype=torch.bfloat16, max_batched_tokens=16)
        together.runner = engine.runner
        note("together", together.runner)
        assert together.generate(prompts, 8) == tokens
    assert len(noted["alone"]) > 7 and all(
        torch.equal(*each) for each in zip(noted["alone"], noted["together"], strict=True)
    )


@pytest.mark.more
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3},  # one has no heads
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "shard_weights": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_ranks_of_hosts(redis_url: str, expected: dict[str, Any], options: dict[str, Any], host: str) -> None:
    """Their memory is their own, and results go through torch.distributed."""
    with grouped_line(redis_url, master=f"{host}:{free_port()}", rank=0, **options) as line:
        assert answers(line) == expected


@pytest.mark.parametrize(
    ("size", "options"),
    [(2, {}), *(pytest.param(*case, marks=pytest.mark.more) for case in [(3, {}), (2, {"speculate": "self"})])],
)
def test_ranks_that_keep_the_weights(
    redis_url: str, expected: dict[str, Any], size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with grouped_line(redis_url, tensor_parallel_size=size, shard_weights=True, **options) as line:
        assert answers(line) == expected
        crowd(line, monkeypatch)
        assert answers(line) == expected


@pytest.mark.more
@pytest.mark.parametrize("speculate", ["off", "self"])
def test_stages_of_ranks(redis_url: str, expected: dict[str, Any], speculate: str) -> None:
    with grouped_line(redis_url, tensor_parallel_size=2, pipeline_parallel_size=2, speculate=speculate) as line:
        assert answers(line) == expected


@pytest.mark.more
@pytest.mark.skipif(
    not (PULLED_MODELS / DEFAULT_MODEL).is_dir(), reason=f"penstock pull {DEFAULT_MODEL} brings the model"
)
@pytest.mark.parametrize(
    "sizes", [(2, 1), (4, 1), (1, 2), (2, 2)], ids=lambda sizes: f"{sizes[0]} ranks, {sizes[1]} stages"
)
def test_smollm2(sizes: tuple[int, int]) -> None:
    files = open_model(DEFAULT_MODEL)
    text = "The pipeline is durable: what one process has begun, another goes on with. " * 12
    ids = Tokenizer.from_file(str(files.folder / "tokenizer.json")).encode(text).ids
    prompts = [ids, ids[:40], ids[5:9], ids[100:]]
    alone = OfflineEngine(files, dtype=torch.bfloat16, max_batched_tokens=64)
    tokens = alone.generate(prompts, 24)
    ranks, stages = sizes
    with grouped_engine(
        files, model=DEFAULT_MODEL, tensor_parallel_size=ranks, pipeline_parallel_size=stages, kv_cache_memory="256MiB"
    ) as engine:
        together = OfflineEngine(alone, dtype=torch.bfloat16, max_batched_tokens=64)
        together.runner = engine.runner
        assert together.generate(prompts, 24) == tokens
    for number in range(len(prompts)):
        assert torch.equal(torch.stack(together.logits[number]), torch.stack(alone.logits[number]))
