"""More whole models on the CUDA backend in the interpreter, for `make verify SUITE=cuda-kernels`:
minutes. pytest does not find this file by itself.
"""

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Olmo2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
)

from bench.gpu.models import check_model
from bench.gpu.recordings import check_recordings
from services.compute.backends.cuda import graphs as graphs_module
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.loop import warm_up as warm_up_module
from tests.kernels.backends import CPU, FLOAT32
from tests.kernels.cuda.test_cuda_models import CONFIG, SIZES, check_drafts
from tests.kernels.families import LINEAR_ROPE, LOCAL_ROPE, reference_model

WINDOWS = {"sliding_window": 12, "query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "gemma2": Gemma2Config(**SIZES, **WINDOWS, attn_logit_softcapping=5.0, final_logit_softcapping=8.0),
    "gemma3": Gemma3TextConfig(
        **SIZES, **WINDOWS, rope_parameters={"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE}
    ),
    "gemma4": Gemma4TextConfig(
        **SIZES,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    "gemma4-per-layer": Gemma4TextConfig(
        **SIZES,
        layer_types=["full_attention", "full_attention"],
        global_head_dim=32,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=64,
        num_kv_shared_layers=1,
    ),
    "gpt-oss": GptOssConfig(**SIZES, sliding_window=12, num_local_experts=3, num_experts_per_tok=2),
    "olmo2": Olmo2Config(**SIZES),
    "qwen3-5": Qwen3_5TextConfig(
        **SIZES | {"head_dim": 32},
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[1],
    ),
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_tokens_are_those_of_torch_in_float32(name: str, tmp_path: Path) -> None:
    reference_model(name, tmp_path, config=CONFIGS[name])
    check = check_model(tmp_path, CudaBackend(torch.float32, CPU), lengths=(4, 19), num_tokens=4, reference=FLOAT32)
    assert check.are_tokens_equal and check.are_bits_equal and check.error is not None and check.error < 1e-5


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize(("quantization", "kv_group"), [("none", 0), ("w8a8", 8)])
def test_a_sequence_has_the_same_bits_in_any_company(
    name: str, quantization: str, kv_group: int, tmp_path: Path
) -> None:
    reference_model(name, tmp_path, config=CONFIGS[name])
    backend = CudaBackend(torch.bfloat16, CPU)
    assert check_model(
        tmp_path, backend, quantization=quantization, kv_group=kv_group, lengths=(4, 19), num_tokens=3, reference=None
    ).are_bits_equal


def test_every_mode_keeps_its_bits(tmp_path: Path) -> None:
    reference_model("llama", tmp_path, config=CONFIG)
    for quantization in ("none", "w4", "nf4", "fp8"):
        check = check_model(
            tmp_path,
            CudaBackend(torch.bfloat16, CPU),
            quantization=quantization,
            lengths=(4, 33, 17),
            num_tokens=4,
            reference=None,
        )
        assert check.are_bits_equal, quantization


def test_as_many_drafts_as_a_step_may_have_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_model("llama", tmp_path, config=CONFIG)
    check_drafts(tmp_path, monkeypatch, longest=17)


def test_a_server_makes_all_its_recordings_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here of up to three sequences: of one, two and four tokens, with holes and without. As
    bench.gpu does it on a device, of 256.
    """
    reference_model("llama", tmp_path, config=CONFIG)
    for module in (graphs_module, warm_up_module):
        monkeypatch.setattr(module, "MAX_TOKENS", 3)
    check = check_recordings(
        tmp_path, CudaBackend(torch.bfloat16, CPU), max_num_seqs=3, max_batched_tokens=20, longest=600
    )
    assert check.holds and check.num_recordings == 6
