"""Heads in the pipeline: useless, harmful or good, the logs are byte for byte those without, and so is the fingerprint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.compute.engine import build_engine
from services.compute.speculation.make import make_proposers
from services.compute.speculation.medusa import MedusaProposer
from services.operator.cli import main
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings, UpSettings, load_settings
from tests.conftest import running_redis
from tests.stages.line_of_stages import FILES, LineOfStages, hurried
from tests.stages.test_speculation import answer, speculate

HIDDEN = FILES.config["hidden_size"]
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory": "16MiB", "num_threads": 1}


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[LineOfStages]:
    with running_redis(tmp_path_factory.mktemp("heads"), redis_binary) as url, hurried():
        line = LineOfStages(url)
        with line.running():
            yield line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    flags = ["--tokens", "8000", "--vocabulary", "400", "--epochs", "5", "--temperature", "0.7", "--num-threads", "1"]
    assert main(["train-heads", "demo", str(out), *flags]) == 0
    return out


@pytest.fixture(scope="module")
def useless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random blocks on the model's own head."""
    out = tmp_path_factory.mktemp("useless")
    sizes = {"weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}
    tensors = {f"blocks.{head}.layers.{layer}.{part}": torch.randn(size) for head in range(4) for layer in (0, 1) for part, size in sizes.items()}
    save_file(tensors, out / "model.safetensors")
    return out


def proposer(line: LineOfStages, heads: Path) -> MedusaProposer:
    """The heads as an engine loads them, for the model that the pipeline runs."""
    [loaded] = build_engine(ComputeSettings(heads=str(heads), speculate="medusa", **SETTINGS), FILES).proposers
    assert isinstance(loaded, MedusaProposer)
    executor = line.compute.executor
    return MedusaProposer(loaded.heads, executor, executor.row_search)


def logs(line: LineOfStages, *proposers: MedusaProposer) -> tuple[dict[str, Any], int]:
    """The logs of all requests, and how many drafts stood."""
    speculation = speculate(line, *proposers)
    return answer(line), speculation.total.num_accepted_tokens


def test_logs_are_the_same_with_heads(line: LineOfStages, useless: Path, trained: Path) -> None:
    expected, _ = logs(line)
    found, _ = logs(line, proposer(line, useless))
    assert found == expected
    heads = proposer(line, trained)
    found, num_accepted = logs(line, heads)
    assert found == expected and num_accepted > 0
    assert heads._states == {}, "who has ended is forgotten"


def test_auto_takes_heads_that_are_given_and_the_fingerprint_knows_nothing_of_them(trained: Path, line: LineOfStages) -> None:
    plain, given = (build_engine(ComputeSettings(heads=heads, **SETTINGS), FILES) for heads in ("", str(trained)))
    assert plain.fingerprint == given.fingerprint and plain.proposers == ()
    assert [each.name for each in make_proposers(given.speculators, line.compute.constraints, given.proposers)] == ["grammar", "prediction", "lookup", "medusa"]
    assert build_engine(ComputeSettings(heads=str(trained), speculate="off", **SETTINGS), FILES).proposers == ()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(["--speculate", "medusa"], "--speculate medusa needs --heads"), (["--speculate", "lookup", "--heads", "x"], "--speculate lookup does not use --heads")],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], reason: str) -> None:
    for settings in (ComputeSettings, UpSettings):
        with pytest.raises(StartupError, match=reason):
            load_settings(settings, flags)


def test_heads_of_another_model_are_refused(useless: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    for heads, reason in ((tmp_path, "another model's heads"), (tmp_path / "none", "no such folder")):
        with pytest.raises(StartupError, match=reason):
            build_engine(ComputeSettings(heads=str(heads), **SETTINGS), FILES)
