"""The parts of a config.json that all families share, for the readers of architectures.py and hybrid.py."""

import math
from dataclasses import replace
from typing import Any

from services.compute.models.config import ModelConfig
from services.compute.models.rope import read_rope
from shared.process.errors import StartupError

Config = dict[str, Any]  # a parsed config.json

FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types

# As config.json calls it, and what it is: SiLU, or GELU by tanh (Hendrycks and Gimpel 2016, section 2).
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def rotary_share(config: Config) -> float:
    """How much of a head's dimensions rotates."""
    by_size = config["rotary_dim"] / config["head_dim"] if config.get("rotary_dim") else 1.0
    rope = config.get("rope_parameters") or {}
    share: float = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or by_size
    if not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor is {share}, not a share")
    return share


def llama(config: Config, max_model_len: int, *, share: float = 1.0) -> ModelConfig:
    """The configuration that all families share, and nothing else. share: of a head's dimensions,
    how many are rotated."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise StartupError(f"hidden_act {activation!r} is not supported; these are: {', '.join(ACTIVATIONS)}")
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    has_attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],
        has_qkv_bias=has_attention_bias,
        has_output_bias=bool(config.get("attention_out_bias", has_attention_bias)),
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        attention_scale=1.0 / math.sqrt(head_dim),
        ropes=(read_rope(config, int(head_dim * share), max_model_len),),
        rope_of_layer=(0,) * num_layers,
        sliding_windows=(None,) * num_layers,
    )


def granite(config: Config, max_model_len: int) -> ModelConfig:
    """Llama with multipliers."""
    return replace(
        llama(config, max_model_len),
        embedding_multiplier=config.get("embedding_multiplier", 1.0),
        residual_multiplier=config.get("residual_multiplier", 1.0),
        attention_scale=config.get("attention_multiplier", 1.0),
        logits_multiplier=1.0 / config.get("logits_scaling", 1.0),
    )


def layer_kinds(config: Config, other: str, *, pattern: int) -> list[str]:
    """The kind of each layer: as config.json says, or each pattern-th sees all, and those between are another."""
    return config.get("layer_types") or [
        other if (layer + 1) % pattern else FULL for layer in range(config["num_hidden_layers"])
    ]
