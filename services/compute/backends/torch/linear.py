"""Linear layers, MLPs and what is done to a row between them: what they do, and how in plain torch.

x: [T, k]. Where a norm is given, x is normalized first; where a residual is given, the result is added to it.
"""

from typing import Protocol

import torch

from services.compute.backends.matrix import Grouped, Int8Columns
from services.compute.backends.torch.reference import add_scaled, cap_scores, gated, linear, quantize_groups, rms_norm

Tensor = torch.Tensor

QUANTIZATIONS = ("none", "w8a8", "w4", "nf4")


class Linear(Protocol):
    def __call__(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None) -> Tensor:
        """Returns [T, n], or [T, n / 2] of a gated layer, in x's dtype."""
        ...

    def logits(self, x: Tensor, *, norm: Tensor, eps: float) -> Tensor:
        """The same in float32: the last layer. The result is good until the next call."""
        ...


class Mlp(Protocol):
    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        """down(activation(gate) * up), with gate and up of x, normalized where there is a norm; with has_residual, x is added. Returns [T, hidden]."""
        ...


class RowMath(Protocol):
    """What is done to rows between layers, where a layer can't do it itself."""

    def add(self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0) -> Tensor:
        """x + multiplier * norm(h), x and h [T, hidden]. Returns [T, hidden]."""
        ...

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        """multiplier * logits, and then cap * tanh(it / cap) if there is a cap. logits: [R, vocab] float32, overwritten."""
        ...


class TorchLinear:
    """In the weight's dtype, on its device."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_gated: bool = False, activation: str = "silu") -> None:
        self.weight = weight
        self.bias = bias
        self.is_gated = is_gated
        self.activation = activation  # of the gate

    def __call__(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None) -> Tensor:
        h = self.multiply(x if norm is None else rms_norm(x, norm, eps))
        h = gated(h, self.activation) if self.is_gated else h
        return h if residual is None else residual + h

    def multiply(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def logits(self, x: Tensor, *, norm: Tensor, eps: float) -> Tensor:
        return self(x, norm=norm, eps=eps).float()


class QuantizedTorchLinear(TorchLinear):
    """Quantized weights without native code: slow, and the definition of what native code computes.

    Activations are int8: with a scale for each row where weights have one for each column, and for each row and group where weights have groups.
    """

    def __init__(self, matrix: Int8Columns | Grouped, bias: Tensor | None, *, is_gated: bool = False, activation: str = "silu") -> None:
        super().__init__(matrix.dequantize(torch.float64), bias, is_gated=is_gated, activation=activation)
        self.group = matrix.group if isinstance(matrix, Grouped) else matrix.shape[1]

    def multiply(self, x: Tensor) -> Tensor:
        codes, scales = quantize_groups(x, self.group)
        product = (codes.double() * scales.double().repeat_interleave(self.group, 1)[:, : x.shape[1]]) @ self.weight.T
        return (product if self.bias is None else product + self.bias.double()).to(x.dtype)


class TorchMlp:
    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        return self.down(self.gate_up(x, norm=norm, eps=eps), residual=x if has_residual else None)


class TorchRowMath:
    def add(self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0) -> Tensor:
        return add_scaled(x, h, norm, eps, multiplier)

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        return cap_scores(logits * multiplier, cap)
