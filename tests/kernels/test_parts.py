"""A rank's part of a model: the rows of what all would be, in the same form, and products whose
bits are the columns of the whole layer's.
"""

import functools
import json
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from services.compute.backends.backend import Linear
from services.compute.backends.cpu.linear import NativeLinear
from services.compute.backends.matrix import Dense, Float8, Joined, Matrix
from services.compute.backends.torch.reference import quantize_weight
from services.compute.models.architectures import read_config
from services.compute.models.config import ModelConfig, Packed
from services.compute.models.moe import Expert
from services.compute.models.parts import LayerParts, MixtureParts, MlpParts, ModelParts
from services.compute.ranks.parallel.heads import heads_of
from services.compute.ranks.parallel.share import Portion, Share
from services.compute.weights.gguf_source import GgufSource
from services.compute.weights.loader import load_parts
from services.compute.weights.safetensors_source import SafetensorsSource
from services.modeltools.quantize import quantize
from shared.model.files import DEMO_MODEL, open_model
from shared.model.gguf.parts import read_model
from shared.process.errors import StartupError
from tests.examples import examples
from tests.kernels.backends import CPU, native_backend
from tests.kernels.families import reference_model
from tests.kernels.gguf_files import Kind, Writer
from tests.kernels.quantized import gptq, packed
from tests.kernels.test_formats import CASES, gptq_config
from tests.kernels.test_forms import FORMS, RESTORED, held
from tests.kernels.test_gguf import KINDS, WIDE, random_model
from tests.kernels.test_native import EPS, randn

LAYER, N, K = "model.layers.0.mlp.up_proj.", 200, 256


def ranges_of(n: int, unit: int = 1) -> st.SearchStrategy[list[range]]:
    """Some ranges of n rows, whose borders are multiples of the unit."""
    borders = st.lists(st.integers(0, n // unit), min_size=2, max_size=6, unique=True).map(sorted)
    return borders.map(
        lambda found: [range(first * unit, last * unit) for first, last in zip(found[::2], found[1::2], strict=False)]
    )


def numbers_of(rows: Sequence[range]) -> Tensor:
    return torch.tensor([number for each in rows for number in each])


def form_of(matrix: Matrix) -> str:
    """Its name, but for how many rows share an FP8 scale."""
    return f"FP8 by {matrix.group}" if isinstance(matrix, Float8) else str(matrix)


def check_rows(whole: Matrix, part: Matrix, rows: Sequence[range]) -> None:
    assert type(part) is type(whole) and form_of(part) == form_of(whole)
    assert torch.equal(part.dequantize(torch.float32), whole.dequantize(torch.float32)[numbers_of(rows)])


@functools.cache
def stored_layer(name: str, folder: Path) -> SafetensorsSource:
    """A checkpoint of one layer, as that case has it."""
    case = CASES[name]
    writer = case.writer_of(LAYER.rstrip("."))
    assert writer is not None
    folder.mkdir()
    tensors, _ = writer(torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * 0.1)
    save_file({LAYER + part: tensor.contiguous() for part, tensor in tensors.items()}, folder / "model.safetensors")
    return SafetensorsSource(folder, torch.bfloat16, CPU, case.config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layers")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@examples(20)
def test_rows_of_every_format(name: str, folder: Path, data: st.DataObject) -> None:
    source, rows = stored_layer(name, folder / name), data.draw(ranges_of(N))
    check_rows(source.matrix(LAYER, (N, K)), source.matrix(LAYER, (N, K), rows), rows)


def test_all_of_a_layer_decides_its_form(tmp_path: Path) -> None:
    """A part without the row whose scales float16 rounds, or that has a zero, is kept as the whole is."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * 0.1
    some_tiny = torch.cat([weight[:-1], weight[-1:] * 2.0**-22])
    parts = {
        "float32": packed(4, 128, dtype=torch.bfloat16)(some_tiny)[0],
        "zeros": gptq(4, 64, symmetric=True)(weight)[0],
        "none": gptq(4, 64, symmetric=True)(weight)[0],
    }
    parts["zeros"]["qzeros"][-1, -1] ^= 1 << 28  # of the last row
    configs = {"float32": CASES["w4a16-group"].config, "zeros": gptq_config(4, 64), "none": gptq_config(4, 64)}
    found = {}
    for name, tensors in parts.items():
        (tmp_path / name).mkdir()
        save_file(
            {LAYER + part: tensor.contiguous() for part, tensor in tensors.items()},
            tmp_path / name / "model.safetensors",
        )
        source = SafetensorsSource(tmp_path / name, torch.bfloat16, CPU, configs[name])
        whole, part = source.matrix(LAYER, (N, K)), source.matrix(LAYER, (N, K), [range(N - 1)])
        check_rows(whole, part, [range(N - 1)])
        found[name] = form_of(part)
    assert found == {"float32": "dense", "zeros": "4 bits in groups of 64 with zeros", "none": "4 bits in groups of 64"}


@functools.cache
def gguf_source(kind: Kind, path: Path) -> GgufSource:
    """A file with heads whose rows are in another order than transformers'."""
    Writer(random_model(LlamaConfig(**WIDE, tie_word_embeddings=True)), path).write(kind)
    return GgufSource(path, torch.bfloat16, CPU)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(data=st.data())
@examples(20)
def test_rows_of_every_type_of_gguf(kind: Kind, folder: Path, data: st.DataObject) -> None:
    source, hidden = gguf_source(kind, folder / f"{kind.name}.gguf"), WIDE["hidden_size"]
    for name, n in {"self_attn.q_proj.": hidden, "mlp.up_proj.": WIDE["intermediate_size"]}.items():
        rows = data.draw(ranges_of(n))
        layer = f"model.layers.0.{name}"
        check_rows(source.matrix(layer, (n, hidden)), source.matrix(layer, (n, hidden), rows), rows)
    shape, rows = (WIDE["vocab_size"], hidden), data.draw(ranges_of(WIDE["vocab_size"]))
    check_rows(source.tied_head(None, shape), source.tied_head(None, shape, rows), rows)


def test_all_of_a_ggufs_matrix_decides_its_form(tmp_path: Path) -> None:
    """One row has a scale that float16 can't hold: a part without that row is as dense as the whole."""
    path, n, hidden = (
        Writer(random_model(LlamaConfig(**WIDE)), tmp_path / "model.gguf").write(Kind.MXFP4),
        WIDE["intermediate_size"],
        WIDE["hidden_size"],
    )
    with path.open("r+b") as file:
        info = read_model(path).tensors["blk.0.ffn_up.weight"]
        file.seek(info.offset + (n - 1) * info.size_bytes // n)
        file.write(bytes([254, 1]))  # an exponent, and codes
    source = GgufSource(path, torch.bfloat16, CPU)
    for rows in ([range(n - 1)], [range(3), range(40, 50)]):
        assert isinstance(source.matrix("model.layers.0.mlp.up_proj.", (n, hidden), rows), Dense)
        assert not isinstance(source.matrix("model.layers.0.mlp.gate_proj.", (n, hidden), rows), Dense)


def taken(matrix: Matrix, rows: Sequence[range]) -> Matrix:
    """The rows of a matrix that is not made of blocks of rows."""
    assert not isinstance(matrix, Joined)
    tensors = {each.name: getattr(matrix, each.name) for each in fields(matrix)}
    return replace(
        matrix,
        **{
            name: part[numbers_of(rows)]
            for name, part in tensors.items()
            if isinstance(part, Tensor) and len(part) == matrix.shape[0]
        },
    )


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("form", ["dense", *FORMS])
def test_a_layer_of_some_rows_computes_their_columns(form: str) -> None:
    """Its bits are the whole layer's; and where the form is one that is packed, so are those of a
    layer restored from the whole one's parts.
    """
    backend, k = native_backend(), 300
    for is_gated, rows, unit in ((False, 1, 32), (False, 40, 32), (True, 9, 32), (False, 3, 1), (True, 37, 1)):
        outputs = 200
        n = 2 * outputs if is_gated else outputs
        matrix = Dense(randn(n, k, seed=5)) if form == "dense" else held(form, n, k, 64, seed=5)
        bias, x, norm = randn(n, seed=3), randn(rows, k), (1 + randn(k, seed=1) * 0.1).bfloat16()
        whole = backend.make_linear(matrix, bias, is_gated=is_gated)
        expected = whole(x, norm=norm, eps=EPS)
        for some in (
            [range(unit, 3 * unit)],
            [range(2 * unit), range(5 * unit, outputs)],
            [range(outputs - 1, outputs)] if unit == 1 else [range(192, 200)],
        ):
            of_both = (
                [*some, *(range(outputs + each.start, outputs + each.stop) for each in some)] if is_gated else some
            )
            columns = expected[:, numbers_of(some)]
            layer = backend.make_linear(taken(matrix, of_both), bias[numbers_of(of_both)], is_gated=is_gated)
            assert torch.equal(layer(x, norm=norm, eps=EPS), columns), (is_gated, some)
            if form in ("dense", *RESTORED):
                restored = backend.restore_linear(
                    whole.parts, n, k, is_gated=is_gated, has_bias=True, activation="silu", outputs=some
                )
                assert torch.equal(restored(x, norm=norm, eps=EPS), columns), (is_gated, some)
                assert {name: part.shape for name, part in restored.parts.items()} == {
                    name: part.shape for name, part in layer.parts.items()
                }


@pytest.mark.parametrize("quantization", ["none", "w8a8", "w4", "nf4", "fp8"])
@given(rows=ranges_of(96), seed=st.integers(0, 99))
@examples(20)
def test_rows_are_quantized_as_in_the_whole(quantization: str, rows: list[range], seed: int) -> None:
    weight = randn(96, 300, seed=seed)
    weight[::7] *= 2.0**-100  # some rows are nearly nothing
    if quantization == "none":
        layers = [native_backend().make_linear(Dense(each)) for each in (weight, weight[numbers_of(rows)])]
        x = randn(5, 300, seed=seed)
        assert torch.equal(layers[0](x)[:, numbers_of(rows)], layers[1](x))
        return
    whole, part = (quantize_weight(each, quantization, 64) for each in (weight, weight[numbers_of(rows)]))
    check_rows(whole, part, rows)
    assert torch.equal(part.codes, whole.codes[numbers_of(rows)])


Columns = list[tuple[Linear | None, list[range]]]  # of each rank: a layer, and which of the whole one's outputs it has


def check_columns(whole: Linear | None, parts: Columns, width: int, *, is_logits: bool = False) -> None:
    """Together the ranks have all outputs, some of them twice, each with the whole layer's bits.
    width: of the inputs.
    """
    assert whole is not None
    x = randn(5, width, seed=width)
    expected = whole.logits(x).clone() if is_logits else whole(x)
    for layer, rows in parts:
        assert (layer is None) == (not any(rows))
        if layer is not None:
            assert torch.equal(layer.logits(x) if is_logits else layer(x), expected[:, numbers_of(rows)])
    assert {number for _, rows in parts for each in rows for number in each} == set(range(expected.shape[1]))


def check_mlp(whole: MlpParts | Expert, parts: list[MlpParts], hidden: int, inter: int) -> None:
    shares = [Share(rank, len(parts)) for rank in range(len(parts))]
    check_columns(
        whole.gate_up, [(each.gate_up, [share.part(inter)]) for share, each in zip(shares, parts, strict=True)], hidden
    )
    check_columns(
        whole.down, [(each.down, [share.part(hidden)]) for share, each in zip(shares, parts, strict=True)], inter
    )


def check_layer(config: ModelConfig, whole: LayerParts, parts: list[LayerParts]) -> None:
    shares = [Share(rank, len(parts)) for rank in range(len(parts))]
    hidden, head_dim = config.hidden_size, config.head_dim
    heads = heads_of(config, len(parts))
    starts = (0, config.num_heads * head_dim, (config.num_heads + config.num_kv_heads) * head_dim)
    rows = [
        [
            range(start + some.start * head_dim, start + some.stop * head_dim)
            for start, some in zip(starts, (each.queries, each.kv, each.kv), strict=True)
        ]
        for each in heads
    ]
    check_columns(whole.qkv, [(each.qkv, some) for each, some in zip(parts, rows, strict=True)], hidden)
    check_columns(
        whole.output,
        [(each.output, [share.part(hidden)]) for share, each in zip(shares, parts, strict=True)],
        config.num_heads * head_dim,
    )
    for part, some in zip(parts, heads, strict=True):
        assert part.norms.q is None or torch.equal(part.norms.q, whole.norms.q)
        if whole.sinks is not None:
            assert torch.equal(
                part.sinks if part.sinks is not None else torch.empty(0),
                whole.sinks[some.queries.start : some.queries.stop],
            )
    if isinstance(whole.mlp, MlpParts):
        check_mlp(
            whole.mlp, [each.mlp for each in parts if isinstance(each.mlp, MlpParts)], hidden, config.intermediate_size
        )
        return
    mixtures = [each.mlp for each in parts if isinstance(each.mlp, MixtureParts)]
    assert (
        config.moe is not None
        and len(mixtures) == len(parts)
        and [number for each in mixtures for number in each.numbers] == [*range(config.moe.num_experts)]
    )
    for each in mixtures:
        assert each.router.linears.keys() == whole.mlp.router.linears.keys()
        for name, linear in whole.mlp.router.linears.items():
            check_columns(linear, [(each.router.linears[name], [range(linear.num_outputs)])], hidden, is_logits=True)
        assert each.router.config == whole.mlp.router.config
    for expert, found in zip(whole.mlp.experts, (expert for each in mixtures for expert in each.experts), strict=True):
        check_columns(expert.gate_up, [(found.gate_up, [range(config.moe.intermediate_size)])], hidden)
        check_columns(expert.down, [(found.down, [range(hidden)])], config.moe.intermediate_size)
    if whole.mlp.shared is not None:
        check_mlp(
            whole.mlp.shared,
            [each.shared for each in mixtures if each.shared is not None],
            hidden,
            config.moe.shared_intermediate_size,
        )
        for each in mixtures if config.moe.has_shared_gate else []:
            check_columns(whole.mlp.shared_gate, [(each.shared_gate, [range(1)])], hidden, is_logits=True)


def check_model(location: Path, *, quantization: str = "none") -> None:
    """Two ranks, and more of them than there are KV heads."""
    found = (
        open_model(str(location)).config if location.is_file() else json.loads((location / "config.json").read_text())
    )
    config, backend = read_config(found), native_backend()
    whole = load_parts(location, config, backend, Portion(), quantization=quantization)
    for size in (2, 5):
        ranks = [
            load_parts(
                location,
                config,
                backend,
                Portion(Share(rank, size), has_embedding=rank == 0),
                quantization=quantization,
            )
            for rank in range(size)
        ]
        assert [each.embedding is None for each in ranks] == [False] + [True] * (size - 1)
        assert all(torch.equal(each.norm, whole.norm) for each in ranks)
        for layer, parts in zip(whole.layers, zip(*(each.layers for each in ranks), strict=True), strict=True):
            check_layer(config, layer, list(parts))
        heads: Columns = [
            (each.lm_head, [Share(rank, size).part(config.vocab_size)]) for rank, each in enumerate(ranks)
        ]
        check_columns(whole.lm_head, heads, config.hidden_size, is_logits=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "llama-linear",
        "phi3",
        "gpt-oss",
        "qwen2-moe",
        "glm4-moe",
        "ernie4-5",
        "hunyuan-moe",
        "mixtral",
        "olmo2",
        "granite",
        "gemma3",
        "internlm3",
    ],
)
def test_ranks_have_all_of_a_model_between_them(name: str, tmp_path: Path) -> None:
    reference_model(name, tmp_path)
    check_model(tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("quantization", ["w8a8", "w4", "nf4"])
def test_ranks_have_all_of_a_quantized_model(quantization: str, tmp_path: Path) -> None:
    """Quantized while it is loaded, and packed before."""
    check_model(DEMO_MODEL, quantization=quantization)
    quantize(str(DEMO_MODEL), tmp_path, Packed(quantization, 32))
    check_model(tmp_path)


@pytest.mark.parametrize("name", ["qwen2-moe", "phi3", "llama-linear"])
def test_ranks_have_all_of_a_packed_model_of_other_families(name: str, tmp_path: Path) -> None:
    """Whose heads are of 16, so that borders are inside of pairs of tiles."""
    reference_model(name, tmp_path / "dense")
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path / "dense")
    quantize(str(tmp_path / "dense"), tmp_path / "packed", Packed("w4", 32))
    check_model(tmp_path / "packed")


def test_ranks_have_all_of_a_gguf_file(tmp_path: Path) -> None:
    check_model(Writer(random_model(LlamaConfig(**WIDE)), tmp_path / "model.gguf").write(Kind.Q4_K))


def bytes_of(parts: ModelParts) -> int:
    """The packed layers' bytes, in all."""
    total = 0
    for layer in parts.layers:
        assert isinstance(layer.mlp, MlpParts)
        for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
            assert linear is None or isinstance(linear, NativeLinear)
            total += sum(part.nbytes for part in linear.parts.values()) if linear is not None else 0
    return total


@pytest.mark.parametrize("quantization", ["none", "w4"])
def test_a_rank_has_its_part_of_the_bytes(quantization: str, tmp_path: Path) -> None:
    """The file is dense, or packed."""
    config = LlamaConfig(**WIDE | {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512})
    reference_model("wide", tmp_path / "dense", config=config)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path / "dense")
    if quantization != "none":
        quantize(str(tmp_path / "dense"), tmp_path / "packed", Packed(quantization, 32))
    folder = tmp_path / ("dense" if quantization == "none" else "packed")
    found, backend = read_config(json.loads((folder / "config.json").read_text())), native_backend()
    whole = bytes_of(load_parts(folder, found, backend, Portion()))
    for size in (2, 4):
        assert [bytes_of(load_parts(folder, found, backend, Portion(Share(rank, size)))) for rank in range(size)] == [
            whole // size
        ] * size


def test_a_stage_has_its_layers_alone() -> None:
    config, backend = read_config(open_model("demo").config), native_backend()
    whole = load_parts(DEMO_MODEL, config, backend, Portion())
    last = load_parts(
        DEMO_MODEL, config, backend, Portion(layers=range(1, config.num_layers), has_embedding=False, has_head=False)
    )
    assert last.embedding is None and last.lm_head is None and len(last.layers) == config.num_layers - 1
    for expected, found in zip(whole.layers[1:], last.layers, strict=True):
        check_layer(config, expected, [found])


def test_a_stage_of_a_gguf_file_asks_for_no_other_layers(tmp_path: Path) -> None:
    """And still refuses a tensor of its own that nobody knows."""
    path = Writer(random_model(LlamaConfig(**WIDE)), tmp_path / "model.gguf").write(Kind.Q8_0)
    config, backend = read_config(open_model(str(path)).config), native_backend()
    stage = Portion(layers=range(1), has_embedding=False, has_head=False)
    assert len(load_parts(path, config, backend, stage).layers) == 1
    without_norms = replace(config, has_pre_norms=False)
    for portion in (stage, replace(stage, share=Share(0, 2))):
        with pytest.raises(
            StartupError, match=r"blk.0.attn_norm.weight and 1 more belong to no layer that Penstock knows"
        ):
            load_parts(path, without_norms, backend, portion)
    assert len(load_parts(path, without_norms, backend, replace(stage, share=Share(1, 2))).layers) == 1
