"""Rotary positions of a GGUF file, as rope_parameters of a config.json."""

import struct
from typing import Any

from shared.model.gguf.reader import GgufHead
from shared.process.errors import StartupError

F32 = 0  # ggml's number of the type


def make_rope(head: GgufHead, prefix: str, head_dim: int) -> dict[str, Any]:
    """rope_parameters. Frequencies that a file scales one by one (Llama 3.1 and later, as
    rope_freqs) are longrope's, with one list for all lengths."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": head.real(prefix + "rope.freq_base", 10000.0)}
    num_rotated = head.number(prefix + "rope.dimension_count", head_dim)
    if num_rotated > head_dim or rope["rope_theta"] <= 0:
        raise StartupError(
            f"{head.path}: RoPE turns {num_rotated} of {head_dim} dimensions by powers of {rope['rope_theta']:g}: no "
            "model does"
        )
    if num_rotated != head_dim:
        rope["partial_rotary_factor"] = num_rotated / head_dim
    kind = head.text(prefix + "rope.scaling.type", "none")
    original = head.number(prefix + "rope.scaling.original_context_length", head.number(prefix + "context_length"))
    if "rope_freqs.weight" in head.tensors:
        factors = read_floats(head, "rope_freqs.weight")
        return rope | _longrope(factors, factors, original, 1.0)
    if "rope_factors_long.weight" in head.tensors and "rope_factors_short.weight" in head.tensors:
        long, short = read_floats(head, "rope_factors_long.weight"), read_floats(head, "rope_factors_short.weight")
        key = prefix + "rope.scaling.attn_factor"
        return rope | _longrope(long, short, original, head.real(key) if key in head.metadata else None)
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise StartupError(f"{head.path}: rope scaling {kind!r} is not supported")
    rope |= {"rope_type": kind, "factor": head.real(prefix + "rope.scaling.factor")}
    return rope | _yarn(head, prefix, original) if kind == "yarn" else rope


def _yarn(head: GgufHead, prefix: str, original: int) -> dict[str, Any]:
    """The rest of YaRN's parameters. Raises StartupError."""
    rope: dict[str, Any] = {"original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if (key := f"{prefix}rope.scaling.yarn_{name}") in head.metadata:
            rope[name] = head.real(key)
            if rope[name] <= 0:
                raise StartupError(f"{head.path}: {key} is {rope[name]:g}, not positive")
    if (key := f"{prefix}rope.scaling.yarn_attn_factor") in head.metadata:
        rope["attention_factor"] = head.real(key)
    return rope


def _longrope(long: list[float], short: list[float], original: int, attention_factor: float | None) -> dict[str, Any]:
    """attention_factor: None: it follows from the lengths."""
    rope = {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": original,
    }
    return rope if attention_factor is None else rope | {"attention_factor": attention_factor}


def read_floats(head: GgufHead, name: str) -> list[float]:
    """A small tensor of float32 in one dimension. Raises StartupError."""
    info = head.tensors[name]
    if info.type_id != F32 or len(info.shape) != 1:
        raise StartupError(f"{head.path}: {name} is not one row of float32")
    with info.path.open("rb") as file:
        file.seek(info.offset)
        data = file.read(min(info.shape[0] * 4, 1 << 20))
    if len(data) < info.shape[0] * 4:
        raise StartupError(f"{info.path} ends in the middle of {name}: is it complete?")
    return list(struct.unpack(f"<{info.shape[0]}f", data))
