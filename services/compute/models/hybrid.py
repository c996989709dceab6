"""Readers of config.json for families whose layers keep states in place of keys and values, all but some."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.compute.backends.torch.recurrent import RecurrenceConfig
from services.compute.models.config import ModelConfig
from services.compute.models.llama import FULL, Config, layer_kinds, llama, rotary_share
from services.compute.models.mixtures import gated_qwen_mixture
from shared.process.errors import StartupError

LINEAR = "linear_attention"  # of layer_types
# what a config.json leaves out, of all these families
GATED_DELTA_NET: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}


def _gated_delta_net(config: Config, max_model_len: int) -> ModelConfig:
    """Gated delta-net (Yang et al. 2025), and in each fourth layer attention with a gate."""
    kinds = layer_kinds(config, LINEAR, pattern=config.get("full_attention_interval", 4))
    if unknown := sorted(set(kinds) - {FULL, LINEAR}):
        raise StartupError(f"layers of the type {unknown[0]} are not supported; these are: {FULL}, {LINEAR}")
    if FULL not in kinds:
        raise StartupError(f"layer_types: none of the {len(kinds)} layers is {FULL}; one at least is needed here")
    return replace(
        llama(config, max_model_len, share=rotary_share(config)),
        norm_offset=1.0,
        has_qk_norm=True,
        has_attention_gate=True,
        recurrence=RecurrenceConfig(
            "delta",
            num_heads=config["linear_num_value_heads"],
            num_key_heads=config["linear_num_key_heads"],
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            kernel=config["linear_conv_kernel_dim"],
            is_tiled=bool(config.get("linear_value_heads_tiled", False)),
        ),
        recurrent_layers=frozenset(number for number, kind in enumerate(kinds) if kind == LINEAR),
        rope_of_layer=(0,) * len(kinds),
        sliding_windows=(None,) * len(kinds),
    )


def _qwen3_5_moe(config: Config, max_model_len: int) -> ModelConfig:
    """All layers have a mixture, of weights that sum to 1."""
    sizes = {"intermediate_size": config["moe_intermediate_size"], "norm_topk_prob": True, "mlp_only_layers": []}
    return _qwen3_next(config | sizes | {"decoder_sparse_step": 1}, max_model_len)


def _qwen3_next(config: Config, max_model_len: int) -> ModelConfig:
    return replace(_gated_delta_net(config, max_model_len), moe=gated_qwen_mixture(config))


HYBRIDS: dict[str, Callable[[Config, int], ModelConfig]] = {
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _gated_delta_net,
    "Qwen3_5ForConditionalGeneration": _gated_delta_net,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe,
}
