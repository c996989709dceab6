"""Models that can't draft are refused in one line, and what they need counts in the engine's memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from services.compute.loop.engine import build_engine
from services.compute.speculation.draft_models import check_tokenizer
from services.modeltools.make_model import make_model
from shared.model.files import open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings, load_settings

DEMO = open_model("demo")


def settings(*flags: str) -> ComputeSettings:
    return load_settings(
        ComputeSettings,
        ["--model", "demo", "--dtype", "bfloat16", "--kv-cache-memory", "16MiB", "--num-threads", "1", *flags],
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--speculate", "draft"], "need each other"),
        (["--draft-model", "demo"], "need each other"),
        (["--speculate", "auto", "--self-draft", "demo"], "is for --speculate self"),
    ],
)
def test_settings_that_miss_each_other(flags: list[str], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        settings(*flags)


def test_a_tokenizer_of_other_tokens(tmp_path: Path) -> None:
    ours = Tokenizer.from_file(str(DEMO.folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    Tokenizer(WordLevel({token: token_id + 1 for token, token_id in ours.items()} | {"new": 0}, unk_token="new")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(
        StartupError,
        match=(
            f"^--draft-model other: its tokenizer does not fit that of {DEMO.name}: 0 of {len(ours)} tokens are the "
            "same$"
        ),
    ):
        check_tokenizer("other", replace(DEMO, folder=tmp_path), DEMO)
    check_tokenizer("demo", DEMO, DEMO)


def test_a_model_of_four_bits_has_nothing_to_draft_with() -> None:
    with pytest.raises(StartupError, match="^--speculate self: .* is quantized itself"):
        build_engine(settings("--speculate", "self", "--quantization", "w4"), DEMO)


def test_another_model_does_not_draft_on_the_targets_cache(tmp_path: Path) -> None:
    make_model(tmp_path / "other", shape="tiny", dtype="bfloat16", seed=0)
    with pytest.raises(StartupError, match="^--self-draft .*: it is another model than .*, with another "):
        build_engine(settings("--speculate", "self", "--self-draft", str(tmp_path / "other")), DEMO)


def test_the_caches_memory_is_divided() -> None:
    """A draft model of the target's shape takes half of the blocks; the target's own weights in four bits take none."""
    alone, itself, other = (
        build_engine(settings(*flags), DEMO)
        for flags in ([], ["--speculate", "self"], ["--speculate", "auto,draft", "--draft-model", "demo"])
    )
    assert [each.name for each in itself.proposers] == ["self"] and [each.name for each in other.proposers] == ["draft"]
    assert itself.scheduler.block_manager.num_blocks == alone.scheduler.block_manager.num_blocks
    assert other.scheduler.block_manager.num_blocks == alone.scheduler.block_manager.num_blocks // 2
    assert itself.proposers[0].runner.kv_cache is itself.runner.kv_cache
