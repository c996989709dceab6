"""Files whose tensors have another form than transformers' parameters: written here as llama.cpp's
converter writes them, read by the modules, whose logits are those of the original model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from services.compute.backends.torch.backend import TorchBackend
from services.compute.models.architectures import is_native
from services.compute.models.config import Packed
from services.compute.ranks.place import ALONE
from services.compute.speculation.draft_models import load_other
from services.compute.weights.library_modules import KernelLinear, load_library_modules
from services.modeltools.quantize import quantize
from shared.model.files import open_model
from shared.model.gguf.checkpoint import unpack_metadata
from shared.process.errors import StartupError
from tests.kernels.families import Engine, assert_greedy
from tests.kernels.gguf_files import add_tokenizer
from tests.kernels.test_models import prompts
from tests.models.blueprints import text
from tests.models.cases import CASES
from tests.models.compare import randomize

BLUEPRINTS = {name: blueprint for name, (_, blueprint) in CASES.items()} | {
    "llama4": text("llama4_text", num_local_experts=4, num_experts_per_tok=1, head_dim=16, intermediate_size_mlp=96,
        interleave_moe_layer_step=2),
    "nemotron_h": text("nemotron_h", length_name="", layers_block_type=["mamba", "mlp", "mamba", "attention"],
        head_dim=16, ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, chunk_size=32),
}  # fmt: skip
DELTA = {"conv_kernel": 4, "state_size": 16, "group_count": 2, "time_step_rank": 4, "inner_size": 64}
MAMBA = {"conv_kernel": 4, "state_size": 16, "group_count": 1, "time_step_rank": 8, "inner_size": 128}
HEADS_32 = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 8}
HEADS_16 = {"attention.key_length": 16, "attention.value_length": 16}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
RMS_5, RMS_6 = ({"attention.layer_norm_rms_epsilon": epsilon} for epsilon in (1e-5, 1e-6))
# by a case's name: the architecture, and the metadata beyond those of all
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen35", {f"ssm.{key}": each for key, each in DELTA.items()} | HEADS_32 | RMS_6),
    "qwen3_5_moe": ("qwen35moe", {f"ssm.{key}": each for key, each in DELTA.items()} | HEADS_32 | EXPERTS | RMS_6
        | {"expert_shared_feed_forward_length": 32}),
    "qwen3_next": ("qwen3next", {f"ssm.{key}": each for key, each in DELTA.items()} | HEADS_32 | EXPERTS | RMS_6
        | {"expert_shared_feed_forward_length": 32}),
    "granite4_h": ("granitehybrid", {f"ssm.{key}": each for key, each in MAMBA.items()} | RMS_6
        | {"attention.head_count_kv": [0, 0, 2, 0], "expert_count": 4, "expert_used_count": 2, "attention.scale": 0.3,
        "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.5, "expert_shared_feed_forward_length": 48}),
    "nemotron_h_nano": ("nemotron_h_moe", {f"ssm.{key}": each for key, each in MAMBA.items()} | HEADS_16 | EXPERTS
        | {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": [0, 0, 0, 2], "ssm.group_count": 2,
        "feed_forward_length": [0, 32, 0, 0], "expert_shared_feed_forward_length": 32}),
    "falcon_h1": ("falcon-h1", {f"ssm.{key}": each for key, each in MAMBA.items()} | RMS_5),
    "lfm2": ("lfm2", RMS_5 | {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3, "rope.freq_base": 1e6}),
    "lfm2_moe": ("lfm2moe", EXPERTS | RMS_5 | {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3,
        "leading_dense_block_count": 1, "expert_gating_func": 2, "rope.freq_base": 1e6}),
    "llama4": ("llama4", {"feed_forward_length": 96, "expert_count": 4, "expert_used_count": 1, "rope.freq_base": 5e5,
        "expert_feed_forward_length": 112, "interleave_moe_layer_step": 2} | HEADS_16 | RMS_5),
    "nemotron_h": ("nemotron_h", {f"ssm.{key}": each for key, each in MAMBA.items()} | HEADS_16
        | {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": [0, 0, 0, 2], "ssm.group_count": 2,
        "feed_forward_length": [0, 112, 0, 0]}),
    "ernie4_5": ("ernie4_5", HEADS_16 | RMS_5 | {"rope.freq_base": 5e5}),
    "ernie4_5_moe": ("ernie4_5-moe", EXPERTS | HEADS_16 | RMS_5 | {"rope.freq_base": 5e5, "expert_shared_count": 1,
        "leading_dense_block_count": 1}),
    "glm4_moe": ("glm4moe", EXPERTS | HEADS_16 | RMS_5 | {"rope.dimension_count": 8, "expert_shared_count": 1,
        "leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
        "expert_gating_func": 2}),
    "minimax_m2": ("minimax-m2", EXPERTS | HEADS_32 | RMS_6 | {"rope.dimension_count": 16, "expert_gating_func": 2,
        "expert_feed_forward_length": 112}),
    "olmoe": ("olmoe", RMS_5 | {"expert_count": 8, "expert_used_count": 2}),
    # its alpha is in the base
    "hunyuan_dense": ("hunyuan-dense", HEADS_16 | RMS_5 | {"rope.freq_base": 1e4 * 50.0 ** (16 / 14)}),
    "hunyuan_moe": ("hunyuan-moe", HEADS_16 | RMS_5 | {"expert_count": 4, "expert_used_count": 2,
        "expert_feed_forward_length": 112, "expert_shared_count": 1}),
    "gemma4_dense31b": ("gemma4", RMS_6 | {"attention.key_length": 32, "attention.value_length": 32,
        "attention.key_length_swa": 16, "attention.value_length_swa": 16, "attention.head_count_kv": [2, 2, 2, 1],
        "attention.sliding_window": 24, "attention.sliding_window_pattern": [True, True, True, False],
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0}),
    "gpt2": ("gpt2", {"feed_forward_length": 256, "attention.layer_norm_epsilon": 1e-5}),
}  # fmt: skip
# ends of parameters' names, and their tensors; the forms of these (of the values, and whether it is DeltaNet's)
NAMES = {
    "A_log": "ssm_a",
    ".D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "mixer.norm.weight": "ssm_norm.weight",
    "correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "moe.router.weight": "ffn_gate_inp.weight",
    "layer_scalar": "layer_output_scale.weight",
}
FORMS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "A_log": lambda values, is_delta: -values.exp() if is_delta else -values.exp()[:, None],
    ".D": lambda values, _: values[:, None],
    "conv1d.weight": lambda values, _: values.squeeze(1),
    "conv.conv.weight": lambda values, _: values.squeeze(1),
    "mixer.norm.weight": lambda values, _: values.view(2, -1),
}


def write(name: str, model: Any, path: Path, outtype: gguf.GGMLQuantizationType) -> Path:
    architecture, metadata = FILES[name]
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    numbers = {"context_length": 512, "embedding_length": 64, "attention.head_count": 4, "feed_forward_length": 112}
    if architecture != "gpt2":
        numbers["attention.head_count_kv"] = 2
    for key, value in (numbers | {"block_count": config.num_hidden_layers} | metadata).items():
        add = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}[
            type(value)
        ]
        add(f"{architecture}.{key}", value)
    add_tokenizer(writer, config.vocab_size)
    number = next(number for number, each in gguf.MODEL_ARCH_NAMES.items() if each == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    if architecture == "gemma4":  # of a head's 16 frequencies in layers that see all, 4
        writer.add_tensor("rope_freqs.weight", torch.tensor([1.0] * 4 + [1e30] * 12).numpy())
    tied = config.tie_word_embeddings
    for full_name, tensor in model.state_dict().items():
        if full_name == "lm_head.weight" and tied:
            continue
        for last, values in turned(architecture, full_name, tensor.float()):
            published = last.replace("model.layers", "backbone.layers") if "mixer." in last else last
            found = names.get_name(published, (".weight", ".bias")) or last
            kind = outtype if values.dim() > 1 and values.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(found, gguf.quantize(values.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def turned(architecture: str, name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file that a parameter becomes, by names of the library or of the file."""
    last, number = name.rpartition(".")[2], next((part for part in name.split(".") if part.isdecimal()), "")
    start, is_delta = f"blk.{number}.", "linear_attn" in name
    if is_delta and architecture != "qwen3next":
        values = tiled(name, values)
    if architecture.startswith("qwen3") and name.endswith("norm.weight") and not is_delta:
        values = values + 1
    if found := next((each for each in NAMES if name.endswith(each)), None):
        yield start + NAMES[found], FORMS.get(found, lambda values, _: values)(values, is_delta)
    elif "experts." in name and last in ("gate_up_proj", "up_proj", "down_proj"):
        whole = values.transpose(1, 2) if architecture == "llama4" else values
        parts = whole.chunk(2, dim=1) if last == "gate_up_proj" else (whole,)
        for which, part in zip(("gate", "up") if last == "gate_up_proj" else (last[:-5],), parts, strict=True):
            yield f"{start}ffn_{which}_exps.weight", part
    elif name.endswith("in_proj_qkvz.weight"):
        of_keys = values.view(2, -1, values.shape[1]).split([16, 16, 32, 32], dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in of_keys)
        yield from ((start + "attn_qkv.weight", torch.cat([q, k, v])), (start + "attn_gate.weight", z))
    elif name.endswith("shared_mlp.input_linear.weight"):
        yield from zip((start + "ffn_gate_shexp.weight", start + "ffn_up_shexp.weight"), values.chunk(2), strict=True)
    else:
        is_turned = architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_fc.weight", ".c_proj.weight"))
        yield name, values.T if is_turned else values


def tiled(name: str, values: Tensor) -> Tensor:
    """Heads of values in turns of the keys' heads: 2 keys, 2 heads of 16 for each."""
    if "out_proj" in name:
        columns: Tensor = values.unflatten(1, (2, 2, -1))
        return columns.transpose(1, 2).flatten(1)
    rest = 64 if "in_proj_qkv." in name or "conv1d" in name else 0
    is_each = "in_proj_a" in name or "in_proj_b" in name or values.dim() == 1 and "norm" not in name
    if "linear_attn.norm" in name:
        return values
    heads: Tensor = values[rest:].unflatten(0, (2, 2, 1 if is_each else 16))
    return torch.cat([values[:rest], heads.transpose(0, 1).flatten(0, 2)])


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.from_pretrained(unpack_metadata(path))
    return load_library_modules(path, TorchBackend(dtype, torch.device("cpu")), Packed("none", 32), config)


def original(name: str) -> Any:
    blueprint = BLUEPRINTS[name]
    config = blueprint.config()
    model = blueprint.model_class(config)._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model)
    return model


@pytest.mark.parametrize("name", FILES)
@torch.inference_mode()
def test_logits_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = original(name)
    ids = torch.randint(2, 512, (1, 70))
    found = load(write(name, model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32))
    torch.testing.assert_close(
        found(ids, use_cache=False).logits, model(ids, use_cache=False).logits, rtol=1e-4, atol=2e-4
    )


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
@torch.inference_mode()
def test_a_matrix_in_another_order_keeps_its_blocks(name: str, tmp_path: Path) -> None:
    """Its inputs or its results are put in order instead."""
    torch.manual_seed(3)
    model = original(name)
    found = load(write(name, model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0), torch.bfloat16)
    layer = found.model.layers[0].linear_attn
    x = torch.randn(3, 64)
    for each in ("in_proj_qkv" if name == "qwen3_5" else "in_proj_qkvz", "out_proj"):
        kept = getattr(layer, each)
        assert isinstance(kept, KernelLinear)
        expected = getattr(model.model.layers[0].linear_attn, each)(x)
        assert torch.cosine_similarity(kept(x.bfloat16()).float().flatten(), expected.flatten(), dim=0) > 0.999


def test_what_the_library_alone_runs_is_not_quantized_and_drafts_nothing(tmp_path: Path) -> None:
    path, reason = tmp_path / "model.gguf", "architecture GPT2LMHeadModel is not supported"
    write("gpt2", original("gpt2"), path, gguf.GGMLQuantizationType.F32)
    with pytest.raises(StartupError, match=f"^{reason}"):
        quantize(str(path), tmp_path / "out", Packed("w8a8", 32))
    backend = TorchBackend(torch.float32, torch.device("cpu"))
    with pytest.raises(StartupError, match=f"^--draft-model {path}: {reason}"):
        load_other(str(path), open_model("demo"), backend, None, ALONE, 1)


def test_what_a_file_lacks_of_a_layout_is_said_by_name(tmp_path: Path) -> None:
    path = write("qwen3_next", original("qwen3_next"), tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.attn_gate.weight", b"blk.1.attn_gote.weight"))
    with pytest.raises(
        StartupError, match=r"the file has no tensor blk.1.attn_gate.weight \(model.layers.1.linear_attn.in_proj_qkvz"
    ):
        load(path)


@pytest.mark.parametrize("name", [name for name in FILES if name in CASES and CASES[name][0] == "native"])
@torch.inference_mode()
def test_our_own_executor_reads_files_of_its_architectures(name: str, tmp_path: Path) -> None:
    """In float32 its tokens are the library's; in bfloat16 matrices stay in the file's blocks, and int8
    activations may choose another expert now and then."""
    torch.manual_seed(3)
    model = original(name)
    files = open_model(str(write(name, model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)), weights=True)
    assert is_native(files, "auto")
    some = prompts(5, 512)
    assert_greedy(Engine(files), model, some, 20)
    blocks = open_model(str(write(name, model, tmp_path / "q8.gguf", gguf.GGMLQuantizationType.Q8_0)), weights=True)
    assert Engine(blocks).generate(some, 20) == Engine(blocks, model_impl="transformers").generate(some, 20)
    engine = Engine(blocks, dtype=torch.bfloat16)
    engine.generate(some, 1)
    expected = [model(torch.tensor([prompt])).logits[0, -1] for prompt in some]
    nearness = [torch.cosine_similarity(engine.logits[number][0], each, dim=0) for number, each in enumerate(expected)]
    assert torch.stack(nearness).median() > 0.98
