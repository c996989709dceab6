"""Ranks that divide every layer give the bits of one process: every family, every way of holding
weights, any number of ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from services.compute.backends.cpu.library import open_context
from services.compute.models.config import Packed
from services.modeltools.quantize import quantize
from shared.model.files import ModelFiles, open_model
from tests.kernels.families import CONFIGS, HYBRIDS, SIZES, Engine, reference_model
from tests.kernels.gguf_files import Kind, Writer
from tests.kernels.quantized import awq, layers_only, write_checkpoint
from tests.kernels.teams import Team
from tests.kernels.test_formats import awq_config
from tests.kernels.test_gguf import random_model

pytestmark = pytest.mark.skipif(open_context() is None, reason="ranks need the native kernels")

PROMPTS = [list(range(3, 40)), list(range(90, 95)), [7]]
NUM_TOKENS = 6


def generate(engine: Engine) -> tuple[list[list[int]], list[torch.Tensor]]:
    tokens = engine.generate(PROMPTS, NUM_TOKENS)
    return tokens, [torch.stack(engine.logits[number]) for number in range(len(PROMPTS))]


def assert_same(
    model: Path | ModelFiles, sizes: tuple[int, ...], *, shard_weights: bool = False, **options: Any
) -> None:
    """A team of each size computes the logits of one process, bit by bit."""
    alone = Engine(model, dtype=torch.bfloat16, max_batched_tokens=16, **options)
    tokens, logits = generate(alone)
    for size in sizes:
        with Team(model, size, shard_weights=shard_weights, **options) as team:
            together = Engine(
                alone, dtype=torch.bfloat16, max_batched_tokens=16
            )  # with another scheduler, whose prefix cache is empty
            together.runner = team.runner
            found_tokens, found = generate(together)
        assert found_tokens == tokens
        for one, other in zip(found, logits, strict=True):
            assert torch.equal(one, other), f"{size} ranks"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "family", [name for name in sorted(CONFIGS.keys() - HYBRIDS.keys()) if not name.startswith("gemma4")]
)
def test_every_family(family: str, tmp_path: Path) -> None:
    reference_model(family, tmp_path)
    assert_same(tmp_path, (2, 3))


@pytest.mark.parametrize("quantization", ["w8a8", "w4", "nf4"])
def test_weights_quantized_as_they_are_read_and_a_cache_of_int8(quantization: str) -> None:
    assert_same(open_model("demo"), (2, 4), quantization=quantization, kv_group=32)


def test_a_packed_checkpoint(tmp_path: Path) -> None:
    quantize("demo", tmp_path / "packed", Packed("w4", 32, attention_output=True))
    assert_same(open_model(str(tmp_path / "packed"), weights=True), (2, 4))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_gguf_file(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wide = LlamaConfig(
        **SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}, tie_word_embeddings=True
    )
    assert_same(open_model(str(Writer(random_model(wide), tmp_path / "model.gguf").write(kind))), (2, 3))


def test_weights_that_are_quantized_already(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers_only(awq(32)), awq_config(32))
    assert_same(tmp_path, (2, 4))


@pytest.mark.parametrize("kv_group", [0, 8])
def test_kv_heads_that_several_ranks_have(kv_group: int, tmp_path: Path) -> None:
    """Nine query heads and three KV heads: two ranks have five and four, six have two and one of
    each KV head's, and of ten one has none.
    """
    reference_model(
        "llama3",
        tmp_path,
        config=LlamaConfig(**SIZES | {"hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3}),
    )
    assert_same(tmp_path, (2, 6, 10), kv_group=kv_group)
