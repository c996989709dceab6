"""The products of a quantized layer, in float32 and fast enough to calibrate with; and a layer that
keeps statistics of its inputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.backends.matrix import Matrix
from services.compute.backends.torch.linear import TorchLinear
from services.compute.backends.torch.reference import quantize_groups, quantize_weight

SAMPLED_ROWS = 512  # of a layer's inputs that are kept


@dataclass(frozen=True, slots=True)
class LayerQuantization:
    """How a layer will be quantized."""

    kind: str  # w8a8, w4 or nf4
    group: int = 32  # inputs that share a scale or a step, with four bits


def quantize_matrix(weight: Tensor, form: LayerQuantization) -> Matrix:
    """weight: [n, k], rounded to nearest."""
    return quantize_weight(weight, form.kind, form.group)


def quantize_inputs(x: Tensor, form: LayerQuantization) -> Tensor:
    """x [T, k] rounded as the layer rounds it, in float32: with a scale for each row, and for each
    group where the weights have scales by group."""
    size = form.group if form.kind == "nf4" else x.shape[1]
    codes, scales = quantize_groups(x, size)
    return codes.float() * scales.repeat_interleave(size, 1)[:, : x.shape[1]]


class ObservedLinear(TorchLinear):
    """A dense layer that keeps what calibration needs of its inputs: their Gram matrix, and some
    rows."""

    def __init__(self, dense: TorchLinear, num_rows: int) -> None:
        """num_rows: that it is going to see in all."""
        super().__init__(dense.weight, dense.bias, is_gated=dense.is_gated, activation=dense.activation)
        k = dense.weight.shape[1]
        self.gram = torch.zeros((k, k))
        self.scales = torch.ones(k)  # that the inputs have been divided by since they were seen
        self.stride = max(num_rows // SAMPLED_ROWS, 1)
        self._rows: list[Tensor] = []

    @property
    def rows(self) -> Tensor:
        """[about SAMPLED_ROWS, k], evenly from all."""
        return torch.cat(self._rows) / self.scales

    def keep(self, x: Tensor) -> None:
        self.gram.addmm_(x.T, x)
        self._rows.append(x[:: self.stride].clone())

    def multiply(self, x: Tensor) -> Tensor:
        self.keep(x)
        return super().multiply(x)

    def scale(self, scales: Tensor) -> None:
        """Multiply the weights by scales [k], in place, for the inputs will be divided by them."""
        self.weight *= scales
        self.gram /= scales[:, None] * scales
        self.scales = self.scales * scales


class SimulatedLinear(TorchLinear):
    """A quantized layer in float32."""

    def __init__(
        self, matrix: Matrix, bias: Tensor | None, form: LayerQuantization, *, is_gated: bool, activation: str
    ) -> None:
        super().__init__(matrix.dequantize(torch.float32), bias, is_gated=is_gated, activation=activation)
        self.form = form

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(quantize_inputs(x, self.form), self.weight, self.bias)
