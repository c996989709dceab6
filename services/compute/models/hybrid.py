"""Readers of config.json for families whose layers keep states in place of keys and values, all but some."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.compute.backends.torch.recurrent import RecurrenceConfig
from services.compute.models.config import ModelConfig
from services.compute.models.llama import FULL, Config, granite, layer_kinds, llama, rotary_share
from services.compute.models.mixtures import gated_qwen_mixture, lfm2_mixture, mixture_of_all_layers, num_experts_of
from services.compute.models.rope import no_rope
from shared.process.errors import StartupError

LINEAR, CONVOLUTION = "linear_attention", "conv"  # of layer_types
# what a config.json leaves out
_GATED_DELTA_NET: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}
_LFM2: dict[str, Any] = {
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "num_dense_layers": 2,
    "norm_topk_prob": True,
    "use_expert_bias": True,
}


_GRANITE: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "time_step_limit": (0.0, math.inf),
}
_DEFAULTS = {"Granite": _GRANITE, "Lfm2": _LFM2, "Qwen": _GATED_DELTA_NET}  # by an architecture's first letters
KINDS = {"mamba": LINEAR, "attention": FULL}  # other words for the same layers


def _gated_delta_net(config: Config, max_model_len: int) -> ModelConfig:
    """Gated delta-net (Yang et al. 2025), and in each fourth layer attention with a gate."""
    kinds = layer_kinds(config, LINEAR, pattern=config.get("full_attention_interval", 4))
    return replace(
        _with_states(llama(config, max_model_len, share=rotary_share(config)), kinds, LINEAR),
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
    )


def _with_states(read: ModelConfig, kinds: list[str], recurrent: str) -> ModelConfig:
    """The configuration of a model whose layers of one kind keep states; the others attend to all."""
    if unknown := sorted(set(kinds) - {FULL, recurrent}):
        raise StartupError(f"layers of the type {unknown[0]} are not supported; these are: {FULL}, {recurrent}")
    if FULL not in kinds:
        raise StartupError(f"layer_types: none of the {len(kinds)} layers is {FULL}; one at least is needed here")
    return replace(
        read,
        recurrent_layers=frozenset(number for number, kind in enumerate(kinds) if kind == recurrent),
        rope_of_layer=(0,) * len(kinds),
        sliding_windows=(None,) * len(kinds),
    )


def _qwen3_5_moe(config: Config, max_model_len: int) -> ModelConfig:
    """All layers have a mixture, of weights that sum to 1."""
    sizes = {"intermediate_size": config["moe_intermediate_size"], "norm_topk_prob": True, "mlp_only_layers": []}
    return _qwen3_next(config | sizes | {"decoder_sparse_step": 1}, max_model_len)


def _qwen3_next(config: Config, max_model_len: int) -> ModelConfig:
    return replace(_gated_delta_net(config, max_model_len), moe=gated_qwen_mixture(config))


def _lfm2(config: Config, max_model_len: int) -> ModelConfig:
    """LFM2: a short convolution in place of attention, in most layers. Some files say how wide the MLP is before
    two thirds of it are taken, and rounded up."""
    if config.get("conv_bias"):
        raise StartupError("config.json: conv_bias is not supported; --model-impl transformers runs such models")
    width = config["block_ff_dim" if "block_ff_dim" in config else "intermediate_size"]
    multiplier, multiple = config["block_ffn_dim_multiplier"], config["block_multiple_of"]
    if config["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if multiplier is not None:
            width = -(-int(multiplier * width) // multiple) * multiple
    attending = config.get("full_attn_idxs")
    kinds = config.get("layer_types") or [
        FULL if attending is None or number in attending else CONVOLUTION
        for number in range(config["num_hidden_layers"])
    ]
    names = {
        "rms_norm_eps": config["norm_eps"],
        "intermediate_size": width,
        "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
    }
    read = replace(_with_states(llama(config | names, max_model_len), kinds, CONVOLUTION), has_qk_norm=True)
    if not read.recurrent_layers:
        return read
    channels, kernel = read.hidden_size, config["conv_L_cache"]
    return replace(read, recurrence=RecurrenceConfig("convolution", 1, 1, 1, channels, kernel))


def _lfm2_moe(config: Config, max_model_len: int) -> ModelConfig:
    read = _lfm2(config | {"block_auto_adjust_ff_dim": False}, max_model_len)
    return replace(read, moe=lfm2_mixture(config))


def _lfm2_vl(config: Config, max_model_len: int) -> ModelConfig:
    """The text part of a model that sees."""
    return (_lfm2_moe if config.get("model_type") == "lfm2_moe" else _lfm2)(config, max_model_len)


def _granite_hybrid(config: Config, max_model_len: int) -> ModelConfig:
    """Granite 4: Mamba-2 in most layers, or in none; a mixture with an expert that all tokens have, or that alone."""
    if config.get("mamba_proj_bias"):
        raise StartupError("config.json: mamba_proj_bias is not supported; --model-impl transformers runs such models")
    kinds = [KINDS.get(kind, kind) for kind in config.get("layer_types") or [LINEAR] * config["num_hidden_layers"]]
    shared = config["shared_intermediate_size"]
    moe = mixture_of_all_layers(config, has_normalized_weights=True) if num_experts_of(config) else None
    read = _with_states(granite(config | {"intermediate_size": shared}, max_model_len), kinds, LINEAR)
    rotates = config.get("position_embedding_type") == "rope"
    read = replace(
        read,
        ropes=read.ropes if rotates else (no_rope(read.head_dim),),
        moe=None if moe is None else replace(moe, shared_intermediate_size=shared),
    )
    if not read.recurrent_layers:
        return read
    size, num_heads = config["mamba_d_head"], config["mamba_n_heads"]
    size = config["mamba_expand"] * read.hidden_size // num_heads if size == "auto" else size
    # transformers writes infinity as an object
    low, high = (float(each["__float__"] if isinstance(each, dict) else each) for each in config["time_step_limit"])
    recurrence = RecurrenceConfig(
        "mamba2",
        num_heads=num_heads,
        num_key_heads=config["mamba_n_groups"],
        key_dim=config["mamba_d_state"],
        value_dim=size,
        kernel=config["mamba_d_conv"],
        norm_group=num_heads * size // config["mamba_n_groups"],
        is_gate_first=True,
        step_limit=(low, high),
    )
    return replace(read, recurrence=recurrence)


HYBRIDS: dict[str, Callable[[Config, int], ModelConfig]] = {
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "Lfm2ForCausalLM": _lfm2,
    "Lfm2MoeForCausalLM": _lfm2_moe,
    "Lfm2VlForConditionalGeneration": _lfm2_vl,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _gated_delta_net,
    "Qwen3_5ForConditionalGeneration": _gated_delta_net,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe,
}
HYBRID_DEFAULTS = {
    name: next((found for start, found in _DEFAULTS.items() if name.startswith(start))) for name in HYBRIDS
}
