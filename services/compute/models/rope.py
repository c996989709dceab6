"""Rope: the rotary frequencies that a config.json asks for."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from shared.process.errors import StartupError

POSITIVE = (
    "factor",
    "rope_theta",
    "alpha",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
)


@dataclass(frozen=True, slots=True)
class Rope:
    """How q and k turn with their position. Frequencies of 0 leave them as they are."""

    # [rotary_dim / 2] float32, after scaling; the dimensions from rotary_dim on are never rotated
    inv_freq: torch.Tensor
    scale: float = 1.0  # multiplies cos and sin (yarn, longrope)
    # [rotary_dim / 2] int64: of positions in time, down and across, the one that each frequency turns with
    axes: torch.Tensor | None = None


def no_rope(head_dim: int) -> Rope:
    """RoPE of a layer that does not know positions."""
    return Rope(torch.zeros(head_dim // 2))


def read_rope(
    config: dict[str, Any],
    rotary_dim: int,
    max_model_len: int,
    layer_type: str = "full_attention",
    *,
    has_alpha: bool = False,
) -> Rope:
    """The rotary frequencies of the layers of a type, from rope_parameters, or, in older
    config.json files, from rope_scaling and rope_theta.

    RoPE: Su et al., "RoFormer" (2021), equation 15. Scalings: linear (position interpolation, Chen
    et al. 2023), llama3 (Llama 3.1's model code: long wavelengths are stretched, short ones kept, a
    ramp between), yarn (Peng et al. 2023, section 3.4), longrope (Ding et al. 2024, section 3.3). A
    longrope model has two sets of factors, for sequences up to its original length and for longer
    ones. Cached keys can't change theirs while a sequence grows, so max_model_len, the longest
    sequence that this server takes, chooses for all. has_alpha: a dynamic one's alpha stretches the base
    for all lengths. Raises StartupError.
    """
    parameters = config.get("rope_parameters") or {}
    rope = dict(config.get("rope_scaling") or {}) | dict(parameters.get(layer_type, parameters) or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    for name in POSITIVE:
        _check_positive(name, rope.get(name))
    _check_positive("rope_theta", config.get("rope_theta"))
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "dynamic" and has_alpha and rope.get("alpha"):
        theta *= rope["alpha"] ** (rotary_dim / (rotary_dim - 2))
    inv_freq = theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)
    if rope.get("mrope_section"):
        return _in_sections(inv_freq, kind, rope)
    # dynamic changes nothing up to the model's own length, and the server takes nothing longer
    if kind in ("default", "dynamic"):
        return Rope(inv_freq)
    if kind == "proportional":  # the frequencies of the whole head, of which a part turns
        num_turned = int(float(rope.get("partial_rotary_factor", 1.0)) * rotary_dim // 2)
        return Rope(inv_freq * (torch.arange(len(inv_freq)) < num_turned) / float(rope.get("factor") or 1.0))
    if kind == "linear":
        return Rope(inv_freq / float(rope["factor"]))
    if kind == "llama3":
        return Rope(_llama3(inv_freq, rope))
    if kind == "yarn":
        return _yarn(inv_freq, rope, theta, config)
    if kind == "longrope":
        return _longrope(inv_freq, rope, config, max_model_len)
    raise StartupError(
        f"rope scaling {kind!r} is not supported; these are: default, dynamic, linear, llama3, proportional, yarn, "
        "longrope"
    )


def _in_sections(inv_freq: torch.Tensor, kind: Any, rope: dict[str, Any]) -> Rope:
    """With positions in time, down and across: Wang et al. 2024, "Qwen2-VL", section 2.1."""
    sections = rope["mrope_section"]
    if kind not in ("default", "mrope") or len(sections) != 3 or sum(sections) != len(inv_freq):
        raise StartupError(
            f"rope with mrope_section {sections} is supported with three parts, of all {len(inv_freq)} "
            "frequencies and no other scaling"
        )
    return Rope(inv_freq, axes=_axes(sections, is_interleaved=bool(rope.get("mrope_interleaved"))))


def _axes(sections: list[int], *, is_interleaved: bool) -> torch.Tensor:
    """The axis of each frequency: part after part, or in turns as far as the parts of the second and the
    third reach (Bai et al. 2025, "Qwen3-VL", section 2.1)."""
    if not is_interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _check_positive(name: str, value: Any) -> None:
    """Raises StartupError unless the value is absent or positive: 0 would count as absent, and a
    negative number makes frequencies that no model was trained with."""
    if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
        raise StartupError(f"the config's {name} of rope must be a positive number, got {value!r}")


def _llama3(inv_freq: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = original * inv_freq / (2 * math.pi)  # of each frequency over the original length
    # 1: short wavelength, as it was; 0: long, stretched
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (kept + (1 - kept) / factor)


def _yarn(inv_freq: torch.Tensor, rope: dict[str, Any], theta: float, config: dict[str, Any]) -> Rope:
    dim = 2 * len(inv_freq)
    original = float(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
    factor = float(rope.get("factor") or config["max_position_embeddings"] / original)

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def scale_of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = dimension_of(float(rope.get("beta_fast") or 32)), dimension_of(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    scale, mscale, mscale_all_dim = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if scale is None:
        scale = scale_of(mscale) / scale_of(mscale_all_dim) if mscale and mscale_all_dim else scale_of(1.0)
    return Rope(inv_freq * (1 - stretched + stretched / factor), float(scale))


def _longrope(inv_freq: torch.Tensor, rope: dict[str, Any], config: dict[str, Any], max_model_len: int) -> Rope:
    longest = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
    factors = torch.tensor(rope["long_factor" if max_model_len > original else "short_factor"], dtype=torch.float32)
    if factors.shape != inv_freq.shape:
        raise StartupError(
            f"rope scaling longrope has {len(factors)} factors, the model's heads have {len(inv_freq)} frequencies"
        )
    stretch, scale = float(rope.get("factor") or longest / original), rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return Rope(inv_freq / factors, float(scale))
