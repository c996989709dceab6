"""GGUF files that run on transformers' modules: token for token what the library computes of the
weights that the blocks mean, in float32; in bfloat16 by the kernels, from the file's own blocks."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.matrix import Joined
from services.compute.models.transformers_model import TransformersModel
from services.compute.weights.library_attention import LayerOfJoint
from services.compute.weights.library_modules import FileEmbedding, KernelExperts, KernelHead, KernelLinear, KernelMlp
from shared.model.files import open_model
from shared.process.errors import StartupError
from tests.kernels.families import SIZES, Engine, assert_greedy
from tests.kernels.gguf_files import Kind, Writer
from tests.kernels.gguf_library_files import LibraryWriter
from tests.kernels.test_gguf import CPU, cache, random_model  # noqa: F401
from tests.kernels.test_gguf import FAMILIES as NATIVE
from tests.kernels.test_models import prompts


class MixedWriter(Writer):
    """Values in another form than queries and keys."""

    def tensor(self, name: str, parameter: torch.Tensor, kind: Kind, *, seed: int) -> None:
        super().tensor(name, parameter, Kind.Q4_0 if "v_proj" in name and kind != Kind.F32 else kind, seed=seed)


WIDE = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
MLA = WIDE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}
KINDS_OF_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
SPARSITY = [0.9, 0.9, 0.0, 0.0, 0.0, 0.0]
CONFIGS: dict[str, PretrainedConfig] = {
    "deepseek-v2-lite": transformers.DeepseekV2Config(**MLA, q_lora_rank=None, rope_parameters=dict(YARN)),
    "deepseek-v2": transformers.DeepseekV2Config(
        **MLA, q_lora_rank=32, n_group=4, topk_group=2, topk_method="group_limited_greedy"
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **MLA, q_lora_rank=32, n_group=4, topk_group=2, norm_topk_prob=True, rope_parameters=dict(YARN)
    ),
    "gemma3n": transformers.Gemma3nTextConfig(
        **WIDE | {"num_hidden_layers": 6},
        vocab_size_per_layer_input=SIZES["vocab_size"],
        hidden_size_per_layer_input=32,
        head_dim=32,
        sliding_window=24,
        num_kv_shared_layers=2,
        laurel_rank=32,
        layer_types=KINDS_OF_LAYERS,
        activation_sparsity_pattern=SPARSITY,
    ),
    "glm4": transformers.Glm4Config(
        **WIDE,
        head_dim=16,
        attention_bias=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "glm4-all": transformers.Glm4Config(
        **WIDE,
        head_dim=16,
        attention_bias=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
    ),
    "command-r": transformers.CohereConfig(**WIDE, logit_scale=0.5, use_qk_norm=True),
    "cohere2": transformers.Cohere2Config(**WIDE | {"num_hidden_layers": 5}, logit_scale=0.5, sliding_window=24),
    "starcoder2": transformers.Starcoder2Config(**WIDE, use_bias=True),
    "stablelm": transformers.StableLmConfig(
        **WIDE,
        use_qkv_bias=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    ),
    "stablelm-parallel": transformers.StableLmConfig(
        **WIDE,
        use_parallel_residual=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
}


def run(path: Path, dtype: torch.dtype = torch.float32) -> Engine:
    return Engine(open_model(str(path)), model_impl="transformers", dtype=dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, Kind.F32) for name in CONFIGS), *((name, Kind.Q8_0) for name in list(CONFIGS)[::2])]
)
def test_every_family_is_read_as_it_was(name: str, kind: Kind, tmp_path: Path) -> None:
    model = random_model(CONFIGS[name])
    path = LibraryWriter(model, tmp_path / "model.gguf").write(kind)
    assert_greedy(run(path), model, prompts(5, SIZES["vocab_size"]), 40)


def test_keys_and_values_are_expanded_by_one_tensor_in_old_files(tmp_path: Path) -> None:
    model = random_model(CONFIGS["deepseek-v2-lite"])
    writer = LibraryWriter(model, tmp_path / "model.gguf")
    writer.is_old = True
    assert_greedy(run(writer.write(Kind.Q8_0)), model, prompts(3, SIZES["vocab_size"]), 20)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "phi4", "qwen2-moe", "hunyuan-dense", "hunyuan-moe"])
def test_a_family_with_an_executor_runs_on_the_librarys_modules_too(name: str, tmp_path: Path) -> None:
    model = random_model(NATIVE[name])
    assert_greedy(
        run(Writer(model, tmp_path / "model.gguf").write(Kind.F32)), model, prompts(3, SIZES["vocab_size"]), 20
    )


def test_layers_and_embeddings_stay_in_the_files_blocks(tmp_path: Path) -> None:
    """Routers decide in float32, as the library has it."""
    model = random_model(CONFIGS["deepseek-v3"])
    path = LibraryWriter(model, tmp_path / "model.gguf").write(Kind.Q8_0)
    engine = run(path, torch.bfloat16)
    modules = modules_of(engine)
    layer = modules.model.layers[1]
    assert all(isinstance(each, KernelLinear) for each in (layer.self_attn.q_b_proj, layer.self_attn.o_proj))
    assert isinstance(layer.mlp.shared_experts, KernelMlp)
    assert isinstance(layer.mlp.experts, KernelExperts) and isinstance(modules.lm_head, KernelHead)
    assert (
        isinstance(modules.model.embed_tokens, FileEmbedding)
        and layer.self_attn.kv_b_proj.weight.dtype == torch.bfloat16
    )
    assert (layer.mlp.gate.weight.dtype, layer.mlp.gate.e_score_correction_bias.dtype) == (torch.float32, torch.float32)
    assert all(parameter.device == CPU for parameter in modules.parameters())
    check_nearness(engine, model)


def test_an_embedding_is_scaled_and_read_from_the_file(tmp_path: Path) -> None:
    model = random_model(CONFIGS["gemma3n"])
    engine = run(LibraryWriter(model, tmp_path / "model.gguf").write(Kind.Q8_0), torch.bfloat16)
    embeddings = modules_of(engine).model.embed_tokens, modules_of(engine).model.embed_tokens_per_layer
    assert all(isinstance(each, FileEmbedding) for each in embeddings)
    ids = torch.tensor([[3, 0, 511]])
    for mine, theirs in zip(embeddings, (model.model.embed_tokens, model.model.embed_tokens_per_layer), strict=True):
        torch.testing.assert_close(mine(ids).float(), theirs(ids), rtol=0.02, atol=1e-3)
    check_nearness(engine, model)


@torch.inference_mode()
def check_nearness(engine: Engine, reference: PreTrainedModel) -> None:
    """Logits of prompts in bfloat16 are as near to float32's as int8 activations leave them."""
    given = prompts(3, SIZES["vocab_size"])
    engine.generate(given, 1)
    for number, prompt in enumerate(given):
        expected = reference(torch.tensor([prompt])).logits[0, -1]
        assert torch.cosine_similarity(engine.logits[number][0], expected, dim=0) > 0.99


def modules_of(engine: Engine) -> PreTrainedModel:
    executor = engine.runner.model
    assert isinstance(executor, TransformersModel)
    return executor.model


@pytest.mark.parametrize(
    ("name", "left_out", "message"),
    [
        ("glm4", "model.layers.1.self_attn.k_proj.bias", r"model.gguf: the file has no tensor blk.1.attn_k.bias"),
        ("cohere2", "model.layers.0.input_layernorm.weight", "the file has no tensor blk.0.attn_norm.weight"),
        ("gemma3n", "model.embed_tokens_per_layer.weight", "it lacks a tensor laurel_l or per_layer_token_embd"),
        (
            "deepseek-v3",
            "model.layers.2.mlp.experts.down_proj",
            r"the file has no tensor blk.2.ffn_down_exps.weight \(of experts\)",
        ),
    ],
)
def test_what_a_file_lacks_is_said_by_name(name: str, left_out: str, message: str, tmp_path: Path) -> None:
    path = LibraryWriter(random_model(CONFIGS[name]), tmp_path / "model.gguf", frozenset({left_out})).write(Kind.F32)
    with pytest.raises(StartupError, match=message):
        run(path)


def test_a_size_that_lies_takes_no_memory(tmp_path: Path) -> None:
    """The file's tensors contradict it before anything is made."""
    path = LibraryWriter(random_model(CONFIGS["cohere2"]), tmp_path / "model.gguf").write(Kind.F32)
    reader = gguf.GGUFReader(path, "r+")
    field = reader.fields["cohere2.feed_forward_length"]
    field.parts[field.data[0]][0] = 2**31 - 1
    reader.data.flush()
    with pytest.raises(
        StartupError, match=r"blk.0.ffn_gate.weight has the shape \(96, 64\), the metadata says \(2147483647, 64\)"
    ):
        run(path)


def test_tensors_of_no_known_layer_are_refused(tmp_path: Path) -> None:
    """A StableLM whose queries have norms is another model."""
    writer = LibraryWriter(random_model(CONFIGS["stablelm"]), tmp_path / "model.gguf")
    writer.writer.add_tensor("blk.1.attn_q_norm.weight", torch.ones(16).numpy())
    with pytest.raises(StartupError, match="blk.1.attn_q_norm.weight belong to no layer that Penstock knows"):
        run(writer.write(Kind.F32))


def test_projections_that_only_apart_keep_their_form_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = MixedWriter(random_model(transformers.Qwen3Config(**WIDE, head_dim=16)), tmp_path / "model.gguf").write(
        Kind.Q8_0
    )

    def query() -> Any:
        return modules_of(run(path, dtype=torch.bfloat16)).model.layers[0].self_attn.q_proj

    assert isinstance(query(), LayerOfJoint)
    keeps = CpuBackend.is_kept
    monkeypatch.setattr(
        CpuBackend, "is_kept", lambda self, matrix: not isinstance(matrix, Joined) and keeps(self, matrix)
    )
    assert isinstance(query(), KernelLinear)
