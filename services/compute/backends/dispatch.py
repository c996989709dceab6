"""The one dispatch: which implementation of a layer's parts runs. Native code for bfloat16 on an x86-64 CPU, else plain torch.

A part is an object that was made once, at load: a linear layer (its weights in the form that it reads), an MLP, attention. All
implementations of one have the same methods; the torch ones are the definition.
"""

import torch

from services.compute.backends.cpu.attention import NativeAttention, NativePlan
from services.compute.backends.cpu.library import load_library
from services.compute.backends.cpu.linear import NativeLinear, NativeMlp, is_packable, pack_linear, restore_linear
from services.compute.backends.cpu.row_math import NativeRowMath
from services.compute.backends.matrix import Dense, Matrix
from services.compute.backends.torch.attention import AttentionInputs, CosSin, Heads, Scores, TorchAttention, TorchPlan
from services.compute.backends.torch.linear import QUANTIZATIONS, Linear, Mlp, QuantizedTorchLinear, RowMath, TorchLinear, TorchMlp, TorchRowMath
from services.compute.backends.torch.reference import quantize_weight
from shared.errors import StartupError

__all__ = [
    "QUANTIZATIONS",
    "Attention",
    "AttentionInputs",
    "CosSin",
    "Heads",
    "Linear",
    "Mlp",
    "Plan",
    "is_kept",
    "RowMath",
    "Scores",
    "is_native",
    "make_attention",
    "make_linear",
    "make_mlp",
    "make_row_math",
    "restore_linear",
]

Attention = TorchAttention | NativeAttention
Plan = TorchPlan | NativePlan  # of an Attention, for a step


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether native code computes in this dtype on this device."""
    return device.type == "cpu" and dtype == torch.bfloat16 and load_library() is not None


def is_kept(matrix: Matrix, dtype: torch.dtype) -> bool:
    """Whether a layer that computes in `dtype` keeps the form in which the file holds its weights; else it is widened to `dtype`."""
    return isinstance(matrix, Dense) or (is_native(dtype, matrix.device) and is_packable(matrix))


def make_linear(
    matrix: Matrix,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    quantization: str = "none",
    group: int = 64,
    is_gated: bool = False,
    activation: str = "silu",
) -> Linear:
    """A linear layer of a matrix [n, k] and bias [n] that computes in `dtype`. With is_gated the first half of n is a gate, and the result
    activation(gate) * the other half; activation: silu or gelu_tanh.

    quantization: of QUANTIZATIONS, for what is not quantized already, or in a form that is not kept; group: inputs that share a scale, with four bits.
    Raises StartupError for a quantization that can't run here.
    """
    if is_native(dtype, matrix.device):
        return pack_linear(matrix, bias, quantization=quantization, group=group, is_gated=is_gated, activation=activation)
    if quantization == "none":
        return TorchLinear(matrix.dequantize(dtype), bias, is_gated=is_gated, activation=activation)
    if matrix.device.type != "cpu" or dtype != torch.bfloat16:
        raise StartupError(f"--quantization {quantization} runs on a CPU in bfloat16 only, not on {matrix.device.type} in {dtype}")
    quantized = quantize_weight(matrix.dequantize(dtype), quantization, group) if isinstance(matrix, Dense) else matrix
    return QuantizedTorchLinear(quantized, bias, is_gated=is_gated, activation=activation)


def make_mlp(gate_up: Linear, down: Linear) -> Mlp:
    """The MLP of two layers, of which the first is gated."""
    return NativeMlp(gate_up, down) if isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear) else TorchMlp(gate_up, down)


def make_attention(heads: Heads, dtype: torch.dtype, device: torch.device, scores: Scores | None = None) -> Attention:
    """Attention over a cache of this dtype; scores: Scores.of(heads) if there are none."""
    return NativeAttention(heads, scores) if is_native(dtype, device) and heads.are_supported else TorchAttention(heads, scores)


def make_row_math(dtype: torch.dtype, device: torch.device) -> RowMath:
    """What is done to rows of this dtype between layers."""
    return NativeRowMath() if is_native(dtype, device) else TorchRowMath()
