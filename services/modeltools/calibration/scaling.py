"""Scales of a layer's input channels: what is divided out of the activations is multiplied into the
weights, so that neither is hard to quantize.

The float model stays the same. Four bits: the weights that meet large inputs become larger, and are
rounded less (Lin et al. 2023, "AWQ"). Eight bits: the channels with outliers become smaller, and a
row's scale finer (Xiao et al. 2022, "SmoothQuant"). Here both are one search: the strength whose
layer has the least output error, with weights and activations quantized as they will be.
"""

import torch
from torch import Tensor

from services.compute.backends.torch.linear import TorchLinear
from services.modeltools.calibration.simulation import LayerQuantization, quantize_inputs, quantize_matrix

STRENGTHS = tuple(step / 10 for step in range(1, 10))
MEASURED_OUTPUTS = 4096  # of a layer, at least, on which scales are compared


def find_scales(inputs: Tensor, weight: Tensor, form: LayerQuantization) -> Tensor:
    """Scales by which the inputs are to be divided. inputs: [T, k] float32, of the calibration;
    weight: [n, k] float32. Returns [k] float32; ones where that is best."""
    largest = weight.abs().amax(0)
    weight = weight[:: max(len(weight) // MEASURED_OUTPUTS, 1)]
    exact = inputs @ weight.T
    best, least = torch.ones(weight.shape[1]), _error(inputs, weight, exact, form)
    sizes = inputs.abs().amax(0) if form.kind == "w8a8" else inputs.abs().mean(0)
    for strength in STRENGTHS:
        scales = sizes.clamp(min=1e-5).pow(strength)
        if form.kind == "w8a8":
            scales = scales / largest.clamp(min=1e-5).pow(1 - strength)
        scales = (scales / (scales.amax() * scales.amin()).sqrt()).clamp(1e-4, 1e4)
        error = _error(inputs / scales, weight * scales, exact, form)
        if error < least:
            best, least = scales, error
    return best


def _error(inputs: Tensor, weight: Tensor, exact: Tensor, form: LayerQuantization) -> float:
    found = quantize_inputs(inputs, form) @ quantize_matrix(weight, form).dequantize(torch.float32).T
    return float((found - exact).square().sum())


def fold_into_norm(norm: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's weight [k] divided by scales [k], in float32, of bfloat16's values, as it will be
    stored; and what it has really been divided by."""
    folded = (norm / scales).bfloat16().float()
    return folded, torch.where(folded != 0, norm / folded, 1.0)


def fold_into_up(gate_up: TorchLinear, scales: Tensor) -> None:
    """Divide the results of a gated layer, [T, k], by scales [k], in place: those of its second
    half, which the gate multiplies."""
    half = len(scales)
    gate_up.weight[half:] /= scales[:, None]
    if gate_up.bias is not None:
        gate_up.bias[half:] /= scales
