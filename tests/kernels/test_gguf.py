"""GGUF files against transformers on what their blocks mean: token for token, and logits to 1e-4;
and what is wrong with a file, in one line.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from bench import quality
from services.compute.backends.cpu.linear import is_packable
from services.compute.backends.matrix import Dense, Grouped
from services.compute.models.architectures import read_config
from services.compute.weights.gguf_blocks import FORMATS, has_wide_scales, to_grouped
from services.compute.weights.gguf_source import GgufRows, GgufSource
from services.compute.weights.loader import load_weights
from services.operator.cli import main
from shared.model.files import open_model
from shared.model.gguf import checkpoint, families
from shared.model.gguf.reader import BLOCKS
from shared.process.errors import StartupError
from tests.examples import examples
from tests.kernels.backends import FLOAT32, native_backend
from tests.kernels.families import CONFIGS, SIZES, Engine, assert_greedy
from tests.kernels.gguf_files import ARCHITECTURES, FLOATS, HALVES, Kind, Writer, random_blocks
from tests.kernels.test_forms import largest_error
from tests.kernels.test_models import prompts
from tests.kernels.test_native import randn

CPU = torch.device("cpu")
WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}  # rows that blocks of 256 fill
KINDS = [*FLOATS, *HALVES, Kind.MXFP4]
NUM_TOKENS = 40

SPECIAL = SIZES | {"num_hidden_layers": 7, "max_position_embeddings": 512}
MOE = SIZES | {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
FACTORS = [1.0 + number / 4 for number in range(6)]
FAMILIES: dict[str, PretrainedConfig] = {
    **{
        name: CONFIGS[name]
        for name in ("llama2", "llama3", "llama-linear", "mistral", "mistral-window", "qwen2", "qwen2-yarn", "qwen3")
    },
    **{
        name: CONFIGS[name]
        for name in ("mixtral", "qwen3-moe", "gemma", "olmo2", "olmo3", "exaone4", "exaone4-full", "seed-oss")
    },
    "qwen2-moe": Qwen2MoeConfig(**MOE | {"shared_expert_intermediate_size": 72}),
    "gpt-oss": CONFIGS["gpt-oss"],
    "hunyuan-dense": CONFIGS["hunyuan-dense"],
    "hunyuan-moe": CONFIGS["hunyuan-moe"],
    "phi3-window": CONFIGS["phi3"],
    "phi4": Phi3Config(
        **SIZES,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 250000.0, "partial_rotary_factor": 0.75},
    ),
    "granite": GraniteConfig(  # whose heads are as wide as heads and width say
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=2.5,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "smollm3": SmolLM3Config(
        **SIZES | {"num_hidden_layers": 5}, tie_word_embeddings=True
    ),  # the fourth does not rotate
    "phi3": Phi3Config(
        **SPECIAL,
        sliding_window=24,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": FACTORS,
            "short_factor": FACTORS[::-1],
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
        },
    ),
    "gemma2": Gemma2Config(
        **SPECIAL, head_dim=32, query_pre_attn_scalar=32, sliding_window=24, tie_word_embeddings=True
    ),
    "gemma3": Gemma3TextConfig(
        **SPECIAL,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=24,
        tie_word_embeddings=True,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1 if "norm" in name else 0.12)
    return model.eval()


def check_against(reference: PreTrainedModel, path: Path, *, num_prompts: int = 3) -> None:
    assert_greedy(Engine(open_model(str(path))), reference, prompts(num_prompts, SIZES["vocab_size"]), NUM_TOKENS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_means_what_the_gguf_package_says(kind: Kind, tmp_path: Path) -> None:
    model = random_model(LlamaConfig(**WIDE, tie_word_embeddings=kind != Kind.Q4_1))
    check_against(model, Writer(model, tmp_path / "model.gguf").write(kind))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", sorted(FAMILIES.keys() - {"phi3"})
)  # whose two lists of factors are for prompts of different lengths
def test_every_family_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[name])
    check_against(model, Writer(model, tmp_path / "model.gguf").write(Kind.F32), num_prompts=5)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_K, Kind.IQ4_NL, Kind.MXFP4], ids=lambda kind: kind.name)
def test_experts_are_cut_out_of_the_tensor_of_all(kind: Kind, tmp_path: Path) -> None:
    """In float32 the answers are transformers'; in bfloat16 each expert has its own blocks, kept or not."""
    model = random_model(
        Qwen3MoeConfig(
            **WIDE, head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
        )
    )
    path = Writer(model, tmp_path / "model.gguf").write(kind)
    check_against(model, path)
    source, mlp = GgufSource(path, torch.bfloat16, CPU), model.model.layers[1].mlp
    router = source.matrix("model.layers.1.mlp.gate.", (4, 256), dtype=torch.float32)
    assert torch.equal(router.dequantize(torch.float32), mlp.gate.weight)
    for number in range(4):
        gate, up = mlp.experts.gate_up_proj[number].chunk(2)
        for which, weight in (("gate", gate), ("up", up), ("down", mlp.experts.down_proj[number])):
            matrix = source.matrix(f"model.layers.1.mlp.experts.{number}.{which}_proj.", (256, 256))
            assert isinstance(matrix, Grouped) == (kind in FORMATS)
            torch.testing.assert_close(matrix.dequantize(torch.float32), weight, atol=0.002, rtol=0.01)
    with pytest.raises(
        StartupError, match=r"blk.0.ffn_up_exps.weight has the shape \(4, 256, 256\), the metadata says \(4, 128, 256\)"
    ):
        source.matrix("model.layers.0.mlp.experts.0.up_proj.", (128, 256))
    source.close()


def test_experts_whose_gates_and_ups_are_one_tensor_and_gates_of_one_row(tmp_path: Path) -> None:
    model = random_model(FAMILIES["qwen2-moe"])
    check_against(
        model, Writer(model, tmp_path / "model.gguf", has_fused_experts=True, is_squeezed=True).write(Kind.F32)
    )


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_blocks_are_kept_as_they_are(kind: Kind) -> None:
    data = random_blocks(24, 512, kind, seed=1)
    grouped = to_grouped(torch.from_numpy(data), kind, GGML_QUANT_SIZES[kind][1])
    assert grouped.codes.shape == (24, 512) and torch.equal(
        grouped.dequantize(torch.float32), torch.from_numpy(gguf.dequantize(data, kind))
    )
    assert is_packable(grouped)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_layer_of_each_type_multiplies_by_what_the_file_means(kind: Kind, instruction_set: str) -> None:
    """Within half a step of int8 in each activation, and bfloat16's rounding; and a row's bits are
    the same in any company.
    """
    data, x = random_blocks(70, 512, kind, seed=2), randn(37, 512)
    grouped = to_grouped(torch.from_numpy(data), kind, GGML_QUANT_SIZES[kind][1])
    exact = x.double() @ torch.from_numpy(gguf.dequantize(data, kind)).double().T
    layer = native_backend().make_linear(grouped)
    found = layer(x)
    assert ((found.double() - exact).abs() <= largest_error(x, grouped, exact)).all(), instruction_set
    assert torch.equal(found, torch.cat([layer(x[row : row + 1]) for row in range(len(x))]))


def test_powers_of_two_beyond_float16_are_not_kept() -> None:
    """Unless all of their block is zero: then any scale is as good."""
    size = GGML_QUANT_SIZES[Kind.MXFP4][1]
    data = random_blocks(4, 64, Kind.MXFP4, seed=1)
    assert not has_wide_scales(torch.from_numpy(data), Kind.MXFP4, size)
    for exponent in (0, 103, 144, 254):
        data[2, size] = exponent
        data[2, size + 1 :] = 0x88
        assert not has_wide_scales(torch.from_numpy(data), Kind.MXFP4, size)
        grouped = to_grouped(torch.from_numpy(data), Kind.MXFP4, size)
        assert torch.equal(grouped.dequantize(torch.float32), torch.from_numpy(gguf.dequantize(data, Kind.MXFP4)))
        data[2, size + 5] = 0x81
        assert has_wide_scales(torch.from_numpy(data), Kind.MXFP4, size)
    for exponent in (104, 143):
        data[2, size] = exponent
        grouped = to_grouped(torch.from_numpy(data), Kind.MXFP4, size)
        assert not has_wide_scales(torch.from_numpy(data), Kind.MXFP4, size)
        assert torch.equal(grouped.dequantize(torch.float32), torch.from_numpy(gguf.dequantize(data, Kind.MXFP4)))


def test_the_form_of_a_matrix_follows_the_type_and_the_dtype(tmp_path: Path) -> None:
    model = random_model(LlamaConfig(**WIDE, tie_word_embeddings=True))
    shape = (WIDE["intermediate_size"], WIDE["hidden_size"])
    for kind, dtype, expected in (
        (Kind.Q4_1, torch.float32, Dense),
        (Kind.Q4_1, torch.bfloat16, Grouped),
        (Kind.Q4_K, torch.bfloat16, Grouped),
        (Kind.Q6_K, torch.bfloat16, Grouped),
        (Kind.IQ3_S, torch.bfloat16, Dense),
        (Kind.F16, torch.bfloat16, Dense),
    ):
        source = GgufSource(Writer(model, tmp_path / f"{kind.name}.gguf").write(kind), dtype, CPU)
        assert isinstance(source.matrix("model.layers.0.mlp.up_proj.", shape), expected)
        shape_of_embedding = (WIDE["vocab_size"], WIDE["hidden_size"])
        embedding, dense = (
            source.embedding(shape_of_embedding),
            source.dense("model.embed_tokens.weight", shape_of_embedding),
        )
        assert isinstance(source.tied_head(embedding, shape_of_embedding), expected)
        assert isinstance(embedding, torch.Tensor if expected is Dense else GgufRows)
        source.close()
        ids = torch.tensor([3, 0, 3, WIDE["vocab_size"] - 1])
        assert embedding[ids].dtype == dtype and torch.equal(embedding[ids], dense[ids])  # the file stays open for it


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.IQ3_S, Kind.F16], ids=lambda kind: kind.name)
def test_only_what_is_dequantized_anyway_is_quantized_anew(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Writer(random_model(LlamaConfig(**WIDE)), tmp_path / "model.gguf").write(kind)
    command = ["quantize", str(path), str(tmp_path / "out"), "--quantization", "w8a8"]
    if kind == Kind.Q4_K:
        assert main(command) == 2
        message = f"--quantization w8a8: {path} is quantized already (GGUF, Q4_K) and keeps its form"
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
        load_weights(path, read_config(open_model(str(path)).config), native_backend())
        command += ["--calibrate", "default", "--calibration-tokens", "2560"]  # for which it is dequantized
    assert main(command) == 0
    assert open_model(str(tmp_path / "out")).config["quantization_config"]["quantization"] == "w8a8"


@pytest.mark.more
def test_the_quality_bench_measures_a_file_in_the_modes_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Writer(random_model(LlamaConfig(**WIDE)), tmp_path / "model.gguf").write(Kind.Q4_1)
    monkeypatch.setattr("sys.argv", ["quality", "--model", str(path), "--tokens", "256", "--format-tokens", "256"])
    quality.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["modes"]) == [
        "bf16",
        "float32",
        "bf16, KV int8 by 64",
        "bf16, KV int8 by 8",
        "activations in bf16",
    ]
    assert result["modes"]["bf16"]["agreement"] == 1.0
    assert set(result["fp8_over_int8"]) == {"qkv", "output", "gate and up", "down", "LM head"}


def test_all_parts_of_a_matrix_are_on_the_models_device(tmp_path: Path) -> None:
    path = Writer(random_model(LlamaConfig(**WIDE)), tmp_path / "model.gguf").write(Kind.Q4_K)
    source = GgufSource(path, torch.bfloat16, torch.device("meta"))
    matrix = source.matrix("model.layers.0.mlp.up_proj.", (WIDE["intermediate_size"], WIDE["hidden_size"]))
    source.close()
    assert isinstance(matrix, Grouped) and matrix.steps is not None and matrix.minima is not None
    assert {each.device.type for each in (matrix.codes, matrix.scales, matrix.steps, matrix.minima)} == {"meta"}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_configuration_is_the_one_that_was_written(name: str, tmp_path: Path) -> None:
    """All fields of transformers' own config.json, but for Llama 3's and Hunyuan's rope, which the file
    has as numbers: there the frequencies are the same.
    """
    config = FAMILIES[name]
    path = Writer(random_model(config), tmp_path / "model.gguf").write(Kind.F32)
    found, expected = open_model(str(path)).config, config.to_dict()
    family = families.FAMILIES[ARCHITECTURES[config.model_type]]
    assert found["architectures"][0] in (family.architecture, *family.others)
    ours = {
        "architectures",
        "dtype",
        "bos_token_id",
        "pad_token_id",
        "rope_parameters",
        "mlp_bias",
        "hidden_act",
        "attention_bias",
        "head_dim",
    }
    ours |= {
        "attention_out_bias",
        "partial_rotary_factor",
    }  # no config.json has the first, and the second is one which transformers keeps among the rope parameters
    ours |= {"model_type"} if name == "mistral" else set()  # without a window it is a Llama
    ours |= {
        "mlp_only_layers",
        "decoder_sparse_step",
        "num_experts",
        "qkv_bias",
        "no_rope_layers",
        "logits_scaling",
    }  # of some, and compared as answers
    ours |= (
        {"original_max_position_embeddings"} if name in ("phi3-window", "phi4") else set()
    )  # which count in longrope only
    assert {key: value for key, value in found.items() if key not in ours} == {
        key: expected[key] for key in found if key not in ours
    }
    for key in ("hidden_act", "attention_bias", "mlp_bias", "head_dim"):
        assert found.get(key) == expected.get(key, found.get(key))
    assert found["eos_token_id"] == 1 and found["dtype"] == "float32"
    if name in ("llama3", "hunyuan-dense"):
        architecture = {"architectures": found["architectures"]}
        [rope], [expected_rope] = read_config(found).ropes, read_config(expected | architecture).ropes
        torch.testing.assert_close(rope.inv_freq, expected_rope.inv_freq, rtol=1e-5, atol=0)
        assert rope.scale == 1.0
    else:
        assert_rope(found["rope_parameters"], expected["rope_parameters"])


def assert_rope(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_rope(found[key], value)
        elif key != "partial_rotary_factor" or value != 1.0:  # which is left out
            assert found[key] == pytest.approx(value), key


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.MXFP4], ids=lambda kind: kind.name)
def test_bfloat16_is_close(kind: Kind, tmp_path: Path) -> None:
    """A CPU serves the same likeliest tokens but for near ties, and logits within 5% of their spread."""
    model = random_model(LlamaConfig(**WIDE))
    path = Writer(model, tmp_path / "model.gguf").write(kind)
    [prompt] = prompts(1, SIZES["vocab_size"], seed=3)
    engine = Engine(open_model(str(path)), dtype=torch.bfloat16)
    [tokens] = engine.generate([prompt], NUM_TOKENS)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert (torch.stack(engine.logits[0]) - logits).pow(2).mean().sqrt() < 0.05 * logits.std()


@pytest.mark.parametrize("biases", ["qkv", "o", "qkvo", "k"])
def test_biases_are_read_where_the_file_has_them_or_the_file_is_refused(biases: str, tmp_path: Path) -> None:
    model = random_model(LlamaConfig(**WIDE, attention_bias=True))
    for layer in model.model.layers:
        for each in "qkvo":
            if each not in biases:  # a bias of zeros is the same as none
                torch.nn.init.zeros_(getattr(layer.self_attn, f"{each}_proj").bias)
    left_out = [
        name for name, parameter in model.named_parameters() if name.endswith(".bias") and not bool(parameter.any())
    ]
    path = Writer(model, tmp_path / "model.gguf", frozenset(left_out)).write(Kind.F32)
    if biases == "k":
        with pytest.raises(StartupError, match="blk.0.attn_k.bias and 1 more belong to no layer that Penstock knows"):
            load(path)
    else:
        check_against(model, path, num_prompts=1)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = random_model(CONFIGS["llama3"])
    return Writer(model, tmp_path_factory.mktemp("gguf") / "model.gguf").write(Kind.F16).read_bytes()


def load(path: Path) -> None:
    files = open_model(str(path))
    load_weights(files.weights, read_config(files.config), FLOAT32)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_broken_file_is_one_line(data: st.DataObject, small_file: bytes, tmp_path: Path) -> None:
    """Bytes of the head changed, a length that lies, a tail cut off: it loads, or it is refused in one line."""
    changed = bytearray(small_file)
    head = small_file.index(b"blk.0.") + 3000
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, head))
        new = data.draw(
            st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8, (2**62).to_bytes(8, "little")])
        )
        changed[at : at + len(new)] = new
    cut = data.draw(st.just(len(changed)) | st.integers(0, len(changed)))
    path = tmp_path / "model.gguf"
    path.write_bytes(changed[:cut])
    try:
        load(path)
    except StartupError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 800


def test_what_is_wrong_is_named(small_file: bytes, tmp_path: Path) -> None:
    def refused(content: bytes, message: str) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        with pytest.raises(StartupError, match=message):
            load(path)

    refused(b"", "model.gguf: the file is empty")
    refused(b"hello, this is no model at all", "not a GGUF file")
    refused(small_file[:-1000], "is it complete")
    refused(small_file[:2000], "middle of its metadata")
    refused(small_file.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"), "no tensor blk.1.attn_q.weight")
    refused(small_file.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"), "'mamba' is not supported")
    refused(small_file.replace(b"block_count\4\0\0\0\3", b"block_count\4\0\0\0\1"), "blk.1.*belong to no layer")
    refused(small_file.replace(b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03"), "big-endian")
    refused(small_file.replace(b"gpt-2", b"gpt-9"), "pre-tokenizer 'gpt-9'")
    at = small_file.index(b"block_count") + len(b"block_count") + 4
    refused(
        small_file[:at] + b"\xff" * 4 + small_file[at + 4 :], "block_count is 4294967295; at most 4096 layers are read"
    )
    name = b"blk.1.ffn_up.weight"
    at = small_file.index(name) + len(name) + 4 + 16
    refused(small_file[:at] + (77).to_bytes(4, "little") + small_file[at + 4 :], "unknown type, number 77")
    refused(small_file[: at + 4] + (2**40).to_bytes(8, "little") + small_file[at + 12 :], "beyond the end of the file")
    refused(
        small_file[: at - 16] + (2**40).to_bytes(8, "little") + small_file[at - 8 :], "is it complete|has the shape"
    )
    place = at + 4
    offset = int.from_bytes(small_file[place : place + 8], "little")
    for wrong, message in (
        (offset + 4, "'blk.1.ffn_up.weight' does not begin at a multiple of 32"),
        (offset - 64, "'blk.1.ffn_up.weight' overlap"),
        (0, "overlap"),
    ):
        refused(small_file[:place] + wrong.to_bytes(8, "little") + small_file[place + 8 :], message)


def test_the_sizes_of_types_are_the_gguf_packages() -> None:
    assert {int(kind): size for kind, size in GGML_QUANT_SIZES.items() if int(kind) in BLOCKS} == BLOCKS


def test_a_folder_of_metadata_is_whoever_was_first_s(tmp_path: Path) -> None:
    """Another process's metadata stays. A folder of anything else is no success."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    checkpoint._write(theirs, {"config.json": {"ours": True}})
    assert (theirs / "config.json").read_text() == "{}"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").touch()
    with pytest.raises(OSError):
        checkpoint._write(foreign, {"config.json": {}})
    assert not list(tmp_path.glob(f"{checkpoint.ASIDE}*"))
