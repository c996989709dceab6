"""A model whose layers keep states of its sequences, behind the real pipeline."""

import shutil
from pathlib import Path

import pytest
import transformers
from msgspec.structs import replace

from services.compute.loop.engine import build_engine
from services.compute.sequence.batch import ScheduledBatch
from shared.model.constraint import Constraint
from shared.model.files import DEMO_MODEL, open_model
from shared.process.settings import ComputeSettings
from tests.kernels.families import reference_model
from tests.models.cases import CASES
from tests.models.served import serve
from tests.stages.line_of_stages import LineOfStages, ask, delay_masks, hurried


def test_a_recurrent_model_goes_on_after_a_crash_with_the_tokens_of_the_library(
    tmp_path: Path, redis_binary: Path | None
) -> None:
    _, blueprint = CASES["qwen3_5"]
    assert all(serve("qwen3_5", blueprint, tmp_path, redis_binary))


def test_a_late_mask_makes_no_token_be_computed_again(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.Mamba2Config(
        vocab_size=2048, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=1
    )
    reference_model("mamba2", tmp_path, config=config)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    settings = ComputeSettings(num_threads=1, max_num_seqs=8, max_model_len=256)
    line = LineOfStages(redis_url, engine=build_engine(settings, open_model(str(tmp_path), weights=True)))
    runner, num_tokens = line.compute.executor, 0
    run = runner.run

    def counted(batch: ScheduledBatch, *drawn: object) -> object:
        nonlocal num_tokens
        num_tokens += batch.num_tokens
        return run(batch, *drawn)

    monkeypatch.setattr(runner, "run", counted)
    asked = ask("guided.0", "Say it, " * 30, max_tokens=12, seed=1)
    asked = replace(asked, constraint=Constraint("regex", r"([a-z]{1,5} ){9,19}end"))
    with hurried(), line.running():
        in_time = line.answer(asked)
        num_expected = num_tokens
        for is_slow in (False, True):
            num_tokens = 0
            line.forget_logs()
            with monkeypatch.context() as patch:
                delay_masks(patch, 0.02, is_slow=is_slow)
                assert line.answer(asked) == in_time
            assert num_tokens == num_expected > 100
