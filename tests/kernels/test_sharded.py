"""Rank 0, which computes while other ranks keep parts of the weights, has the bits of one process:
every way of holding weights.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from services.compute.backends.cpu.library import open_context
from services.compute.backends.cpu.linear import move_in, move_out
from services.compute.backends.matrix import Dense, Joined
from services.compute.backends.torch.reference import quantize_weight
from services.compute.models.config import Packed
from services.compute.ranks.group.commands import KeptLayers, decode, encode
from services.modeltools.quantize import quantize
from shared.model.files import open_model
from shared.process.errors import StartupError
from tests.kernels.backends import native_backend
from tests.kernels.families import SIZES, reference_model
from tests.kernels.gguf_files import Kind, Writer
from tests.kernels.teams import Team
from tests.kernels.test_gguf import random_model
from tests.kernels.test_ranks import assert_same

pytestmark = pytest.mark.skipif(open_context() is None, reason="ranks need the native kernels")


@pytest.mark.parametrize(
    "family", ["llama-linear", "gemma2", "olmo2", "phi3"]
)  # biases; norms behind layers; a norm over all heads; joined matrices
def test_families(family: str, tmp_path: Path) -> None:
    reference_model(family, tmp_path)
    assert_same(tmp_path, (2, 3), shard_weights=True)


@pytest.mark.parametrize("quantization", ["w8a8", "w4"])
def test_weights_quantized_as_they_are_read_and_a_cache_of_int8(quantization: str) -> None:
    assert_same(open_model("demo"), (2, 3), shard_weights=True, quantization=quantization, kv_group=32)


def test_a_packed_checkpoint(tmp_path: Path) -> None:
    quantize("demo", tmp_path / "packed", Packed("nf4", 32, attention_output=True))
    assert_same(open_model(str(tmp_path / "packed"), weights=True), (2,), shard_weights=True)


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wide = LlamaConfig(
        **SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}, tie_word_embeddings=True
    )
    assert_same(
        open_model(str(Writer(random_model(wide), tmp_path / "model.gguf").write(Kind.Q4_K))),
        (2, 3),
        shard_weights=True,
    )


@given(st.data())
def test_layers_of_several_forms_compute_where_their_bytes_have_moved(data: st.DataObject) -> None:
    backend, is_gated, k = native_backend(), data.draw(st.booleans()), 32 * data.draw(st.integers(1, 4))
    sizes = (
        [data.draw(st.integers(1, 70))] * 2
        if is_gated
        else data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    )
    torch.manual_seed(sum(sizes))
    weights = [torch.randn(n, k).bfloat16() for n in sizes]
    forms = [data.draw(st.sampled_from(["none", "w8a8", "w4", "nf4"])) for _ in sizes]
    matrices = [
        Dense(each) if form == "none" else quantize_weight(each, form, 32)
        for each, form in zip(weights, forms, strict=True)
    ]
    bias = torch.randn(sum(sizes)).bfloat16() if data.draw(st.booleans()) else None
    layer = backend.make_linear(Joined(tuple(matrices)) if len(matrices) > 1 else matrices[0], bias, is_gated=is_gated)
    other = backend.make_linear(Dense(torch.randn(40, k).bfloat16()))
    outline, memory = move_out([other, None, layer, other])
    [_, nothing, moved, _] = move_in(backend.context, decode(encode(KeptLayers((outline,)))).layers[0], memory.clone())
    assert nothing is None and moved is not None
    x = torch.randn(data.draw(st.integers(1, 20)), k).bfloat16()
    assert torch.equal(moved(x), layer(x))


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    reference_model("mixtral", tmp_path)
    with pytest.raises(StartupError, match="--shard-weights: a mixture of experts"):
        Team(tmp_path, 1, shard_weights=True)
