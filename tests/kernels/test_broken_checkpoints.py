"""Files that are broken or hostile, and options that don't fit: one line and exit code 2, never a traceback."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.compute.loop.engine import build_engine
from services.compute.models.architectures import read_config
from services.compute.weights.formats.options import Options
from services.compute.weights.loader import load_weights
from services.operator.cli import main
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.examples import examples
from tests.forge import refused
from tests.kernels.backends import FLOAT32
from tests.kernels.families import Engine
from tests.kernels.mutations import change_one
from tests.kernels.quantized import (
    awq,
    compressed,
    float8,
    four_bit_floats,
    gptq,
    integers,
    layers_only,
    llm_int8,
    packed,
    scheme,
    write_checkpoint,
)
from tests.kernels.test_formats import BNB4, BNB8, CASES, awq_config, fp8_config, gptq_config
from tests.kernels.test_models import prompts

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.down_proj."
NOWHERE = "redis://127.0.0.1:1/0"


def load(folder: Path, **options: Any) -> None:
    load_weights(folder, read_config(json.loads((folder / "config.json").read_text())), FLOAT32, **options)


def one_line(error: BaseException) -> bool:
    return 20 < len(str(error)) < 800 and "\n" not in str(error)


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def drop(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(LAYER + part)


def put(part: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({LAYER + part: make(tensors[LAYER + part])})


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tensor with another number at its beginning."""
    return lambda tensor: torch.cat([torch.full((1,), value).to(tensor.dtype), tensor.flatten()[1:]]).reshape(
        tensor.shape
    )


def state(**fields: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """bitsandbytes' state with other fields."""
    return lambda tensor: torch.tensor(
        list(json.dumps(json.loads(bytes(tensor.tolist())) | fields).encode()), dtype=torch.uint8
    )


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
BROKEN: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("awq-64", drop("scales"), "no tensor .*down_proj.scales"),
    ("awq-64", drop("qweight"), "no tensor .*down_proj.qweight"),
    ("awq-64", drop("qzeros"), "no tensor .*down_proj.qzeros"),
    ("awq-64", put("qweight", lambda words: words[:-8]), r"qweight has the shape \(248, 16\); expected: \(256, 16\)"),
    ("awq-64", put("scales", lambda scales: scales[:2]), r"scales has the shape \(2, 128\); expected: \(4, 128\)"),
    ("awq-64", put("qweight", lambda words: words.short()), "qweight is int16; expected: int32"),
    ("awq-64", put("scales", first(float("nan"))), "scales holds a number that is not finite"),
    ("gptq-sym", put("g_idx", first(4)), "g_idx names a group that is not among the 4"),
    ("gptq-sym", put("g_idx", first(-1)), "g_idx names a group"),
    ("gptq-sym", put("qzeros", lambda words: words.T), r"qzeros has the shape"),
    ("gptq-act-order", drop("g_idx"), "g_idx is missing, and quantization_config says desc_act"),
    ("int8-channel", drop("weight_scale"), "no tensor .*down_proj.weight_scale"),
    ("int8-channel", put("weight_scale", lambda scales: scales[:5]), "weight_scale has the shape"),
    ("int8-asym", drop("weight_zero_point"), "no tensor .*weight_zero_point"),
    ("int4-unpacked", put("weight", first(9)), "weight holds values that are not of 4 bits"),
    (
        "w4a16-asym",
        put("weight_shape", lambda shape: shape.flip(0)),
        r"weight_shape is \[256, 128\]; expected: \[128, 256\]",
    ),
    ("w4a16-asym", drop("weight_zero_point"), "no tensor .*weight_zero_point"),
    ("w4a16-group", drop("weight_packed"), "no tensor .*down_proj.weight"),
    ("fp8-block", drop("weight_scale_inv"), "no tensor .*weight_scale_inv"),
    ("fp8-block", put("weight_scale_inv", lambda scales: scales.repeat(1, 2)), "weight_scale_inv has the shape"),
    ("fp8-tensor", put("weight_scale", lambda scales: scales.expand(2, 1)), "weight_scale has the shape"),
    ("fp8-tensor", put("weight", lambda weight: weight.float().half()), "weight is float16; expected: float8_e4m3fn"),
    ("nf4", drop(NF4_STATE), "no tensor .*quant_state"),
    ("nf4", drop("weight.absmax"), "no tensor .*weight.absmax"),
    ("nf4", put(NF4_STATE, state(shape=[1, 2])), "says that the shape is"),
    ("nf4", put(NF4_STATE, state(blocksize=0)), "blocksize 0 is not supported"),
    ("nf4", put(NF4_STATE, state(blocksize=2**40)), "blocksize 1099511627776 is not supported"),
    ("nf4", put(NF4_STATE, lambda tensor: tensor[3:]), "is not JSON"),
    ("nf4", put("weight", lambda weight: weight[:-1]), "weight has 16383 bytes; expected: 16384"),
    ("nf4-double", put(NF4_STATE, state(nested_offset="much")), "nested_offset 'much' is not a number"),
    ("nf4-double", put(NF4_STATE, state(nested_offset=10**400)), "nested_offset 1000.* is not a number"),
    ("llm-int8", drop("SCB"), "no tensor .*down_proj.SCB"),
    ("llm-int8", put("weight_format", lambda tensor: tensor + 2), "rearranged for a GPU"),
]


@pytest.mark.parametrize(("name", "edit", "message"), BROKEN)
def test_a_broken_layer_is_named(name: str, edit: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES[name].writer_of, CASES[name].config)
    change(tmp_path, edit)
    with pytest.raises(StartupError, match=message) as raised:
        load(tmp_path)
    assert one_line(raised.value)


CONFIGS: list[tuple[Any, str]] = [
    ("awq", "quantization_config is not an object"),
    ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not supported; these are: auto-round, awq, bitsandbytes"),
    ({"bits": 4}, "quant_method None is not supported"),
    ({"quant_method": ["awq"]}, "is not supported"),
    (awq_config(64, bits=3), "bits 3 is not supported; it must be 4"),
    (awq_config(64, bits="4"), "bits '4' is not supported; it must be an integer of 32 bits"),
    (awq_config(0), "group_size 0 is not supported; it must be a positive integer"),
    (awq_config(64, version="gemv"), "version 'gemv' is not supported; it must be gemm"),
    (gptq_config(5, 64), "bits 5 is not supported; it must be 2 or 4 or 8"),
    (gptq_config(4, -7), "group_size -7 is not supported"),
    (gptq_config(4, 64, checkpoint_format="marlin"), "checkpoint_format 'marlin' is not supported"),
    (gptq_config(4, 64, sym="yes"), "sym 'yes' is not supported"),
    (gptq_config(4, 64, dynamic={"+:(": {}}), "is not a regular expression"),
    (gptq_config(4, 64, dynamic={"+:([a-z0-9_.]+)+!": {}}), "may take for ever"),
    (gptq_config(4, 64, dynamic={"-:" + "(a|b.|a)" * 30: {}}), "may take for ever"),
    ({"quant_method": "auto-round", "bits": 4}, "quantization_config has no packing_format"),
    (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:nv_fp"},
        "packing_format 'auto_round:nv_fp' is not supported",
    ),
    ({"quant_method": "gptq", "group_size": 64}, "quantization_config has no bits"),
    (compressed(layout="int-quantized"), "config_groups quantize no weights"),
    (compressed(scheme(8, "channel"), layout="marlin-24"), "format 'marlin-24' is not supported"),
    (
        compressed(scheme(4, "tensor", kind="float"), layout="float-quantized"),
        "num_bits 4 is not supported; it must be 8",
    ),
    (compressed(scheme(3, "channel"), layout="pack-quantized"), "num_bits 3 is not supported"),
    (compressed(scheme(4, "group", group=0), layout="pack-quantized"), "group_size 0 is not supported"),
    (compressed(scheme(4, "group"), layout="pack-quantized"), "weights has no group_size"),
    (compressed(scheme(8, "channel"), layout="int-quantized", ignore=("re:*",)), "is not a regular expression"),
    (compressed(scheme(8, "channel"), layout="int-quantized", ignore=("re:(.+)+!",)), "may take for ever"),
    (
        {
            **compressed(scheme(8, "channel"), layout="int-quantized"),
            "sparsity_config": {"format": "sparse-24-bitmask"},
        },
        "sparsity_config is not supported",
    ),
    ({**compressed(layout="int-quantized"), "config_groups": {"W8A8": ["Linear"]}}, "W8A8 .* must be an object"),
    (fp8_config(weight_block_size=[128]), "weight_block_size .* must be 2 positive integers"),
    (fp8_config(weight_block_size=[0, 128]), "weight_block_size .* must be 2 positive integers"),
    ({"quant_method": "bitsandbytes"}, "one of load_in_4bit and load_in_8bit must be true"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_a_configuration_that_is_not_supported_is_named(config: Any, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers_only(awq(64)), config)
    with pytest.raises(StartupError, match=message) as raised:
        load(tmp_path)
    assert one_line(raised.value)


@pytest.mark.parametrize(
    "pattern",
    [
        rf"model\.layers\.(?:{'|'.join(map(str, range(64)))})\..*",
        r".*\.(?:self_attn|mlp)\.(?:[qkvo]|gate|up|down)_proj$",
        r"^(?!.*mlp\.experts).*$",
        r"model\.layers\.([0-9]|[1-5][0-9])\.mlp\.experts\.\d+\.(gate|up|down)_proj",
        r".*mlp.*experts.*gate_proj.*",
    ],
)
def test_patterns_that_people_write_are_read(pattern: str) -> None:
    assert Options({}).pattern(pattern) == pattern


def test_the_config_and_the_file_must_agree(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "none", layers_only(awq(64)), None)
    with pytest.raises(StartupError, match="config.json has no quantization_config that says how"):
        load(tmp_path / "none")
    write_checkpoint(tmp_path / "int8", layers_only(integers(8, "channel")), None)
    with pytest.raises(StartupError, match="_proj.weight is int8, and config.json has no quantization_config"):
        load(tmp_path / "int8")
    ignored = compressed(scheme(8, "channel"), layout="int-quantized", ignore=("lm_head", "re:.*down_proj"))
    write_checkpoint(tmp_path / "ignored", layers_only(integers(8, "channel")), ignored)
    with pytest.raises(StartupError, match="down_proj.weight_scale is there, and quantization_config names no scheme"):
        load(tmp_path / "ignored")
    left_out = gptq_config(4, 64, dynamic={"-:.*down_proj": {}})
    write_checkpoint(tmp_path / "left_out", layers_only(gptq(4, 64, symmetric=True)), left_out)
    with pytest.raises(StartupError, match="`dynamic` leaves this layer out"):
        load(tmp_path / "left_out")


def test_older_checkpoints_say_it_in_another_file(tmp_path: Path) -> None:
    config = gptq_config(4, 64)
    write_checkpoint(tmp_path / "new", layers_only(gptq(4, 64, symmetric=True)), config)
    write_checkpoint(tmp_path / "old", layers_only(gptq(4, 64, symmetric=True)), None)
    described = {
        "bits": 4,
        "group_size": 64,
        "damp_percent": 0.01,
        "desc_act": False,
        "sym": True,
        "true_sequential": True,
    }
    (tmp_path / "old" / "quantize_config.json").write_text(json.dumps(described))
    some = prompts(2, 512)
    assert Engine(tmp_path / "old").generate(some, 8) == Engine(tmp_path / "new").generate(some, 8)
    for text, message in (
        ("[]", "expected an object"),
        ("{", "quantize_config.json"),
        ("[" * 100_000, "quantize_config.json"),
    ):
        (tmp_path / "old" / "quantize_config.json").write_text(text)
        with pytest.raises(StartupError, match=message):
            load(tmp_path / "old")


def test_a_quantized_checkpoint_keeps_its_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, layers_only(awq(64)), awq_config(64))
    with pytest.raises(
        StartupError,
        match=r"--quantization w8a8: .* is quantized already \(AWQ, 4 bits in groups of 64\) and keeps its form",
    ):
        load(tmp_path, quantization="w8a8")
    with pytest.raises(StartupError, match="--quantize-attention-output: .* is quantized already"):
        load(tmp_path, attention_output=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["quantize", str(tmp_path), str(tmp_path / "out"), "--quantization", "w4"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "--quantization w4" in lines[-1] and not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("truncated", "can't be read"),
        ("header", "can't be read"),
        ("pickle", "pytorch_model.bin is a pickle"),
        ("outside", "not a safetensors file in the folder"),
    ],
)
def test_files_that_can_not_be_loaded_are_refused_with_one_line(broken: str, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers_only(awq(64)), awq_config(64))
    (tmp_path / "tokenizer.json").write_text("{}")
    break_file(tmp_path, broken)
    settings = ComputeSettings(model=str(tmp_path), redis_url=NOWHERE)
    with pytest.raises(StartupError, match=message) as raised:
        build_engine(settings, open_model(settings.model, weights=True))
    assert one_line(raised.value)


def break_file(folder: Path, broken: str) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    if broken == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif broken == "header":  # it says that it is longer than the file
        file.write_bytes((2**62).to_bytes(8, "little") + content[8:])
    elif broken == "pickle":
        file.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": 1}))
    else:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"model.embed_tokens.weight": "../../etc/passwd.safetensors"}})
        )


def test_compute_ends_with_that_line_and_exit_code_2(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers_only(awq(64)), awq_config(64))
    (tmp_path / "tokenizer.json").write_text("{}")
    break_file(tmp_path, "truncated")
    said = refused("services.compute", tmp_path, model=str(tmp_path), redis_url=NOWHERE)
    lines = [line for line in said.splitlines() if line.startswith("penstock: ")]
    assert len(lines) == 1 and "can't be read" in lines[0]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "files",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/../../model.safetensors",
        7,
        None,
        "model.bin",
        "absent.safetensors",
        "\0.safetensors",
        "\ud800.safetensors",
        "\n.safetensors",
    ],
)
def test_an_index_stays_in_its_folder(files: object, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, layers_only(awq(64)), awq_config(64))
    shutil.copy(folder / "model.safetensors", tmp_path)
    names = load_file(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    load(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, files)}))
    with pytest.raises(StartupError) as raised:
        load(folder)
    assert one_line(raised.value)
    for text in ("[]", "{}", '{"weight_map": 3}', "[" * 100_000, "\xff"):
        index.write_bytes(text.encode("latin-1"))
        with pytest.raises(StartupError, match="can't be read"):
            load(folder)


MUTATED = {
    "awq": (awq(64), awq_config(64)),
    "gptq": (gptq(4, 64, symmetric=False), gptq_config(4, 64, sym=False)),
    "gptq-act-order": (gptq(8, 64, symmetric=True, act_order=True), gptq_config(8, 64, desc_act=True)),
    "packed": (
        packed(4, 32, symmetric=False),
        compressed(scheme(4, "group", group=32, symmetric=False), layout="pack-quantized"),
    ),
    "fp8": (float8("block", scale_name="weight_scale_inv"), fp8_config(weight_block_size=[128, 128])),
    "nf4": (four_bit_floats("nf4", 64, nested=True), BNB4),
    "llm-int8": (llm_int8, BNB8),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in MUTATED}
    for name, folder in folders.items():
        write_checkpoint(folder, layers_only(MUTATED[name][0]), MUTATED[name][1])
    return {name: (folder, load_file(folder / "model.safetensors")) for name, folder in folders.items()}


def random_bytes(like: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.randint(
        0, 256, (like.numel() * like.element_size(),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return drawn.view(like.dtype).reshape(like.shape)


@given(st.data())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_checkpoint_loads_or_is_refused(
    originals: dict[str, tuple[Path, Tensors]], data: st.DataObject
) -> None:
    """A tensor gone, or with another shape, dtype or content: nothing but StartupError, in one line."""
    folder, tensors = originals[data.draw(st.sampled_from(sorted(originals)))]
    name = data.draw(st.sampled_from(sorted(name for name in tensors if name.startswith("model.layers.0."))))
    tensor = tensors[name]
    kinds = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn]
    mutations: dict[str, Callable[[], torch.Tensor | None]] = {
        "gone": lambda: None,
        "flat": tensor.flatten,
        "empty": lambda: tensor.flatten()[:0],
        "shorter": lambda: tensor[:-1] if tensor.dim() else tensor,
        "other dtype": lambda: tensor.float().to(data.draw(st.sampled_from(kinds))),
        "other bytes": lambda: random_bytes(tensor, seed=data.draw(st.integers(0, 2**32))),
    }
    mutated = mutations[data.draw(st.sampled_from(sorted(mutations)))]()
    save_file(
        tensors | {name: mutated} if mutated is not None else {each: tensors[each] for each in tensors if each != name},
        folder / "model.safetensors",
    )
    try:
        load(folder)
    except StartupError as error:
        assert one_line(error)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_found_before_the_first_request(number: float, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    change(folder, put("weight", first(number)))
    settings = ComputeSettings(model=str(folder), num_threads=1, kv_cache_memory="16MiB", redis_url=NOWHERE)
    with pytest.raises(StartupError, match="its results are NaN or infinite") as raised:
        build_engine(settings, open_model(str(folder), weights=True))
    assert one_line(raised.value)


GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": 1}
SMALL: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "1MiB", "dtype": "float32", "redis_url": NOWHERE}


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("gpt2", {"n_layer": 10**9}, "n_layer is 1000000000, not an integer from 1 to 4096"),
        ("gptj", {"n_embd": 1 << 30}, "n_embd is 1073741824, not an integer from 1 to 1048576"),
        ("mpt", {"n_layers": 10**9}, "n_layers is 1000000000, not an integer from 1 to 4096"),
        ("mpt", {"d_model": 1 << 30}, "d_model is 1073741824, not an integer from 1 to 1048576"),
        ("bloom", {"n_layer": -1}, "n_layer is -1, not an integer from 1 to 4096"),
        ("cohere2", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not an integer from 1 to 4096"),
        ("unheard-of", {"vocab_size": 1 << 30}, "vocab_size is 1073741824, not an integer from 1 to 16777216"),
    ],
)
def test_the_sizes_of_a_library_model_are_bounded_before_they_take_memory(
    kind: str, sizes: dict[str, int], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 512} | sizes))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=words) as raised:
        build_engine(ComputeSettings(**SMALL, model_impl="transformers"), open_model(str(tmp_path)))
    assert one_line(raised.value)


def test_a_library_model_is_refused_for_nan_queries_and_for_missing_drafts(
    tmp_path: Path,
) -> None:
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    files = open_model(str(tmp_path))
    for options in ({"heads": "/nope"}, {"draft_model": "/nope", "speculate": "draft"}):
        with pytest.raises(StartupError, match="no( such)? folder") as raised:
            build_engine(ComputeSettings(**SMALL, **options), files)
        assert "/nope" in str(raised.value) and one_line(raised.value)
    change(tmp_path, lambda tensors: tensors["transformer.h.1.attn.c_attn.weight"][:, :64].fill_(float("nan")))
    with pytest.raises(StartupError, match="its logits are not finite"):
        build_engine(ComputeSettings(**SMALL), files)


NUMBERS = st.integers(-2, 200) | st.sampled_from([2**31 - 1, 2**62, 10**30]) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5), lambda each: st.lists(each, max_size=3)
)


@given(st.data())
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_configuration_is_read_or_refused(
    originals: dict[str, tuple[Path, Tensors]], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(MUTATED)))
    folder, tensors = originals[name]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantized = json.loads(json.dumps(MUTATED[name][1]))
    change_one(quantized, data, VALUES)
    try:
        load_weights(folder, read_config(config | {"quantization_config": quantized}), FLOAT32)
    except StartupError as error:
        assert one_line(error)


@given(st.binary(max_size=400))
@example(b"{}")
@example(b'{"__metadata__": {}}')
@examples(60)
def test_a_mutated_header_is_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    folder = tmp_path_factory.mktemp("header")
    (folder / "model.safetensors").write_bytes(len(noise).to_bytes(8, "little") + noise)
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 8,
    }
    config = read_config({"architectures": ["LlamaForCausalLM"]} | sizes)
    with pytest.raises(StartupError, match="can't be read") as raised:
        load_weights(folder, config, FLOAT32)
    assert "\n" not in str(raised.value)
