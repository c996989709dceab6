"""ModelConfig: what the executor needs of a config.json, for every supported family."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from shared.errors import StartupError

PACKED_METHOD = "penstock"  # quantization_config's quant_method

ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class Packed:
    """How a checkpoint's layers are quantized and packed; what `penstock quantize` writes into config.json as quantization_config."""

    quantization: str
    group: int
    attention_output: bool = False  # whether attention's output projection is quantized too
    lm_head: bool = False  # whether the LM head has four bits, too, where the layers have; else it has eight

    @property
    def of_output(self) -> str:
        """The quantization of attention's output projection."""
        return self.quantization if self.attention_output else "none"

    @property
    def of_head(self) -> str:
        """The quantization of the LM head. In four bits it costs more than any other layer."""
        return self.quantization if self.lm_head or self.quantization == "none" else "w8a8"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-like decoder. The families differ in has_qkv_bias, has_qk_norm and the sliding window only."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    has_qkv_bias: bool  # Qwen2
    has_output_bias: bool  # Llama with attention_bias
    has_mlp_bias: bool
    has_qk_norm: bool  # Qwen3: RMSNorm over each head of q and k
    is_tied: bool  # the LM head is the embedding
    sliding_windows: tuple[int | None, ...]  # per layer: how many tokens back attention sees
    inv_freq: torch.Tensor  # [head_dim / 2] float32, rotary frequencies after scaling
    rotary_scale: float  # multiplies cos and sin (yarn; 1 otherwise)
    packed: Packed | None = None


def read_config(config: dict[str, Any]) -> ModelConfig:
    """The parsed config.json as a ModelConfig. Raises StartupError for what the executor can't run."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise StartupError(f"architecture {architecture} is not supported; these are: {', '.join(sorted(ARCHITECTURES))}")
    if config.get("hidden_act", "silu") != "silu":
        raise StartupError(f"hidden_act {config['hidden_act']!r} is not supported, only silu")
    quantized = config.get("quantization_config")
    if quantized and quantized.get("quant_method") != PACKED_METHOD:
        raise StartupError("this checkpoint is quantized; only float32 and bfloat16 ones, and those of penstock quantize, can be loaded")
    try:
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        inv_freq, rotary_scale = rotary_frequencies(config, head_dim)
        has_attention_bias = bool(config.get("attention_bias", False))
        return ModelConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            has_qkv_bias=architecture == "Qwen2ForCausalLM" or has_attention_bias,
            has_output_bias=has_attention_bias,
            has_mlp_bias=bool(config.get("mlp_bias", False)),
            has_qk_norm=architecture == "Qwen3ForCausalLM",
            is_tied=bool(config.get("tie_word_embeddings", False)),
            sliding_windows=sliding_windows(config, architecture),
            inv_freq=inv_freq,
            rotary_scale=rotary_scale,
            packed=_packed(quantized) if quantized else None,
        )
    except KeyError as error:
        raise StartupError(f"config.json has no {error.args[0]}") from None


def _packed(quantized: dict[str, Any]) -> Packed:
    """quantization_config as penstock quantize wrote it; at first it packed the LM head like the layers, and did not say so."""
    return Packed(quantized["quantization"], quantized["group"], quantized.get("attention_output", False), quantized.get("lm_head", True))


def sliding_windows(config: dict[str, Any], architecture: str) -> tuple[int | None, ...]:
    """Per layer, how many tokens attention sees, this one included. Mistral: all layers alike; Qwen: by layer_types, when switched on."""
    window: int | None = config.get("sliding_window")
    num_layers: int = config["num_hidden_layers"]
    if window is None or architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.get("layer_types") or ["sliding_attention" if layer >= config.get("max_window_layers", 28) else "full" for layer in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def rotary_frequencies(config: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """inv_freq [head_dim / 2] and the scale of cos and sin.

    RoPE: Su et al., "RoFormer" (2021), equation 15. Scalings: linear (position interpolation, Chen et al. 2023), llama3 (Llama 3.1's
    model code: long wavelengths are stretched, short ones kept, a ramp between), yarn (Peng et al. 2023, section 3.4).
    """
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "default":
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rope, theta, head_dim, config)
    raise StartupError(f"rope scaling {kind!r} is not supported; these are: default, linear, llama3, yarn")


def _llama3(inv_freq: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = original * inv_freq / (2 * math.pi)  # of each frequency over the original length
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: short wavelength, as it was; 0: long, stretched
    return inv_freq * (kept + (1 - kept) / factor)


def _yarn(inv_freq: torch.Tensor, rope: dict[str, Any], theta: float, head_dim: int, config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    factor = float(rope["factor"])
    original = float(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(float(rope.get("beta_fast") or 32))), 0)
    high = min(math.ceil(dimension_of(float(rope.get("beta_slow") or 1))), head_dim - 1)
    stretched = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    scale = rope.get("attention_factor")
    return inv_freq * (1 - stretched + stretched / factor), float(scale) if scale is not None else 0.1 * math.log(factor) + 1.0
