"""Linear layers and MLPs in plain torch."""

import torch
from torch import Tensor

from services.compute.backends.backend import Linear
from services.compute.backends.matrix import Float8, Grouped, Int4Columns, Int8Columns
from services.compute.backends.torch.reference import gated, linear, quantize_float8, quantize_groups, rms_norm


class TorchLinear:
    """A linear layer in the weight's dtype, on its device."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, is_gated: bool = False, activation: str = "silu"
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.is_gated = is_gated
        self.activation = activation  # of the gate

    def __call__(
        self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None
    ) -> Tensor:
        h = self.multiply(x if norm is None else rms_norm(x, norm, eps))
        h = gated(h, self.activation) if self.is_gated else h
        return h if residual is None else residual + h

    def multiply(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def logits(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None) -> Tensor:
        logits = self(x, norm=norm, eps=eps).float()
        return logits if out is None else out.copy_(logits)


class QuantizedTorchLinear(TorchLinear):
    """Quantized weights without native code: slow, and the definition of what native code computes.

    Activations are int8, or FP8 where weights are: with a scale for each row where weights have one
    for each column, and for each row and group where weights have groups.
    """

    def __init__(
        self,
        matrix: Int8Columns | Int4Columns | Grouped | Float8,
        bias: Tensor | None,
        *,
        is_gated: bool = False,
        activation: str = "silu",
    ) -> None:
        super().__init__(matrix.dequantize(torch.float64), bias, is_gated=is_gated, activation=activation)
        self.group = matrix.group if isinstance(matrix, Grouped | Float8) else matrix.shape[1]
        self.quantize = quantize_float8 if isinstance(matrix, Float8) else quantize_groups

    def multiply(self, x: Tensor) -> Tensor:
        codes, scales = self.quantize(x, self.group)
        product = linear(
            codes.double() * scales.double().repeat_interleave(self.group, 1)[:, : x.shape[1]], self.weight
        )
        return (product if self.bias is None else product + self.bias.double()).to(x.dtype)


class TorchMlp:
    is_recordable = True

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    @property
    def linears(self) -> dict[str, Linear]:
        return {"gate_up.": self.gate_up, "down.": self.down}

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        return self.down(self.gate_up(x, norm=norm, eps=eps), residual=x if has_residual else None)
