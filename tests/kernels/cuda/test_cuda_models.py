"""Whole models on the CUDA backend in the interpreter: torch's tokens in float32, and a sequence's bits in any company."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2MoeConfig

from bench.gpu.models import LoadedModel, check_model, make_prompts
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.stack import CudaStack
from tests.kernels.backends import CPU, FLOAT32
from tests.kernels.families import LINEAR_ROPE, LOCAL_ROPE, reference_model

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, "head_dim": 16,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=12, query_pre_attn_scalar=20, layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE},
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES | {"num_hidden_layers": 1}, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
        mlp_only_layers=[],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
def test_tokens_are_those_of_torch_in_float32(name: str, tmp_path: Path) -> None:
    reference_model(name, tmp_path, config=CONFIGS[name])
    check = check_model(tmp_path, CudaBackend(torch.float32, CPU), lengths=(4, 19), num_tokens=3, reference=FLOAT32)
    assert check.are_tokens_equal and check.are_bits_equal and check.error is not None and check.error < 1e-5


@pytest.mark.parametrize(("quantization", "kv_group"), [("none", 0), ("w8a8", 8)])
def test_a_sequence_has_the_same_bits_in_any_company(quantization: str, kv_group: int, tmp_path: Path) -> None:
    reference_model("llama", tmp_path, config=CONFIGS["llama"])
    check = check_model(
        tmp_path, CudaBackend(torch.bfloat16, CPU), quantization=quantization, kv_group=kv_group, lengths=(4, 19), num_tokens=3, reference=None
    )  # fmt: skip
    assert check.are_bits_equal


def test_steps_of_single_tokens_are_recorded_by_bucket_and_filled_in_one_piece(tmp_path: Path) -> None:
    """Three sequences are padded to four. From the second step on, the recording of the first computes them."""
    reference_model("llama", tmp_path, config=CONFIGS["llama"])
    backend = CudaBackend(torch.float32, CPU)
    loaded = LoadedModel(tmp_path, backend)
    stack = loaded.model.stack
    assert isinstance(stack, CudaStack)
    runs = []
    stack.recordings.record = lambda forward: lambda: runs.append(1) or forward()  # type: ignore[func-returns-value]
    loaded.model.workspace_bytes(32, 8, 64)  # the buffers have their size: nothing moves any more
    generation, uploads = backend.buffers.generation, backend.buffers.num_uploads
    found = loaded.answer(make_prompts(96, (3, 4, 5)), 5)
    assert backend.buffers.generation == generation
    assert backend.buffers.num_uploads - uploads == 5  # one a step: the prompts, then four of single tokens
    assert len(stack.recordings) == 1 and len(runs) == 3
    expected = LoadedModel(tmp_path, FLOAT32).answer(make_prompts(96, (3, 4, 5)), 5)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
