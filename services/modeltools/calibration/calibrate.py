"""Calibration: a dense model becomes a quantized one, layer by layer, with what its layers see of a
text.

A layer runs over the text in float32 behind the layers that are quantized already, so it makes up
for some of what they have lost. Then its inputs' scales are found and folded, its weights rounded,
and it runs once more as it now is. In memory are one layer, the text's hidden states (float32), and
the packed layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import torch
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from services.compute.backends.backend import Backend, LayerWeights, Linear, LogitsProduct, Norms, Product
from services.compute.backends.matrix import Matrix
from services.compute.backends.torch.linear import TorchLinear, TorchMlp
from services.compute.backends.torch.reference import rms_norm
from services.compute.models.config import Packed
from services.compute.models.decoder import Decoder, ModelWeights
from services.compute.weights.loader import Loader
from services.compute.weights.source import EMBEDDING
from services.modeltools.calibration.perplexity import BLOCK_SIZE, blocks_of, whole_windows
from services.modeltools.calibration.rounding import round_four_bit
from services.modeltools.calibration.simulation import (
    LayerQuantization,
    ObservedLinear,
    SimulatedLinear,
    quantize_inputs,
    quantize_matrix,
)

STRENGTHS = tuple(step / 10 for step in range(1, 10))
MEASURED_OUTPUTS = 4096  # of a layer, at least, on which scales are compared


def find_scales(inputs: Tensor, weight: Tensor, form: LayerQuantization) -> Tensor:
    """Scales of a layer's input channels, by which the inputs are to be divided: what is divided out of
    the activations is multiplied into the weights, so that neither is hard to quantize.

    The float model stays the same. Four bits: the weights that meet large inputs become larger, and are
    rounded less (Lin et al. 2023, "AWQ"). Eight bits: the channels with outliers become smaller, and a
    row's scale finer (Xiao et al. 2022, "SmoothQuant"). Here both are one search: the strength whose
    layer has the least output error, with weights and activations quantized as they will be.

    inputs: [T, k] float32, of the calibration; weight: [n, k] float32. Returns [k] float32; ones where
    that is best.
    """
    largest = weight.abs().amax(0)
    weight = weight[:: max(len(weight) // MEASURED_OUTPUTS, 1)]
    exact = inputs @ weight.T
    best, least_error = torch.ones(weight.shape[1]), _error(inputs, weight, exact, form)
    sizes = inputs.abs().amax(0) if form.kind == "w8a8" else inputs.abs().mean(0)
    for strength in STRENGTHS:
        scales = sizes.clamp(min=1e-5).pow(strength)
        if form.kind == "w8a8":
            scales = scales / largest.clamp(min=1e-5).pow(1 - strength)
        scales = (scales / (scales.amax() * scales.amin()).sqrt()).clamp(1e-4, 1e4)
        error = _error(inputs / scales, weight * scales, exact, form)
        if error < least_error:
            best, least_error = scales, error
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


WINDOWS_AT_ONCE = 4


@contextmanager
def fast_products() -> Iterator[None]:
    """Products of float32 in bfloat16 with sums in float32, where the processor has them: three
    times as fast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def calibrate(loader: Loader, packing: Packed, windows: Tensor, backend: Backend) -> ModelWeights:
    """The quantized model, of the backend. loader: of weights in float32, without mixtures of
    experts; windows: [N, length] int64, the text's tokens. Raises StartupError."""
    with fast_products(), torch.inference_mode():
        return LayerCalibration(loader, packing, windows, backend).run()


class LayerCalibration:
    """A model on its way from dense to quantized."""

    def __init__(self, loader: Loader, packing: Packed, windows: Tensor, backend: Backend) -> None:
        config = loader.config
        self.backend = backend
        self.loader = loader
        self.packing = packing
        self.form = LayerQuantization(packing.quantization, packing.group)
        self.num_rows = windows.numel()
        embedding = loader.source.dense(EMBEDDING, (config.vocab_size, config.hidden_size))
        norm = loader.norm("model.norm.weight", config.hidden_size)
        weights = ModelWeights(embedding=embedding, layers=[], norm=norm, lm_head=loader.head(embedding))
        self.decoder = Decoder(config, weights, loader.backend)
        self.batches = [whole_windows(part) for part in torch.split(windows, WINDOWS_AT_ONCE)]
        num_blocks = blocks_of(windows[:WINDOWS_AT_ONCE])
        self.caches = {  # that layers of equal heads use in turn
            heads: loader.backend.make_kv_layer(num_blocks, BLOCK_SIZE, *heads, group=0) for heads in config.kv_heads
        }
        self.states = [self.decoder.embed(batch.input_ids) for batch in self.batches]

    def run(self) -> ModelWeights:
        numbers = tqdm(range(self.loader.config.num_layers), "calibrating", unit="layer", mininterval=0.5, position=1)
        with logging_redirect_tqdm():  # lines of log go above the bars
            layers = [self._layer(number) for number in numbers]
        weights = self.decoder.weights
        assert isinstance(weights.embedding, Tensor)
        # before its float32 values are scaled, where they are the head's
        embedding = weights.embedding.bfloat16()
        norm, head = self._head(weights.norm, weights.lm_head)
        return ModelWeights(embedding=embedding, layers=layers, norm=norm, lm_head=head)

    def _run(self, number: int, layer: LayerWeights) -> list[Tensor]:
        """The text's hidden states behind the layer."""
        states = zip(self.batches, self.states, strict=True)
        kv = self.caches[self.loader.config.kv_heads[number]]
        return [
            self.decoder.run_layer(number, layer, x, kv, self.decoder.plan(batch, BLOCK_SIZE)) for batch, x in states
        ]

    def _layer(self, number: int) -> LayerWeights:
        """Observe, scale, round, and go on behind the layer as it now is. Returns it packed."""
        layer = self.loader.layer(number)
        assert isinstance(layer.mlp, TorchMlp)
        qkv, output, gate_up, down = (
            observe(each, self.num_rows) for each in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
        )
        self._run(number, replace(layer, qkv=qkv, output=output, mlp=TorchMlp(gate_up, down)))
        down.scale(find_scales(down.rows, down.weight, self.form))
        fold_into_up(gate_up, down.scales)
        before_attention = self._fold(layer.norms.before_attention, qkv)
        before_mlp = self._fold(layer.norms.before_mlp, gate_up)
        norms = replace(layer.norms, before_attention=before_attention, before_mlp=before_mlp)
        linears = [qkv, output, gate_up, down]
        forms = [self.form, LayerQuantization(self.packing.of_output, self.packing.group), self.form, self.form]
        matrices = [round_layer(each, form) for each, form in zip(linears, forms, strict=True)]
        simulated = [
            SimulatedLinear(matrix, each.bias, form, is_gated=each.is_gated, activation=each.activation)
            for matrix, each, form in zip(matrices, linears, forms, strict=True)
        ]
        self.states = self._run(
            number, replace(layer, norms=norms, qkv=simulated[0], output=simulated[1], mlp=TorchMlp(*simulated[2:]))
        )
        packed = [self._pack(matrix, each) for matrix, each in zip(matrices, linears, strict=True)]
        kept = {each.name: getattr(norms, each.name) for each in fields(Norms)}
        kept = {name: None if norm is None else norm.bfloat16() for name, norm in kept.items()}
        mlp = self.backend.make_mlp(*packed[2:])
        return LayerWeights(norms=Norms(**kept), qkv=packed[0], output=packed[1], mlp=mlp, scalar=layer.scalar)

    def _fold(self, norm: Tensor | None, linear: ObservedLinear) -> Tensor | None:
        """The norm before the layer with its inputs' scales in it. Where none is before it, there
        is nothing to fold them into."""
        if norm is None:
            return None
        folded, scales = fold_into_norm(norm, find_scales(linear.rows, linear.weight, self.form))
        linear.scale(scales)
        return folded

    def _head(self, norm: Tensor, linear: LogitsProduct) -> tuple[Tensor, Linear]:
        """The last norm and the LM head behind it, scaled, rounded and packed."""
        form = LayerQuantization(self.packing.of_head, self.packing.group)
        head = observe(linear, self.num_rows)
        for x in self.states:
            head.keep(rms_norm(x, norm, self.loader.config.rms_norm_eps))
        folded, scales = fold_into_norm(norm, find_scales(head.rows, head.weight, form))
        head.scale(scales)
        return folded.bfloat16(), self._pack(round_layer(head, form), head)

    def _pack(self, matrix: Matrix, linear: TorchLinear) -> Linear:
        """The layer for the backend, in the form that its matrix has."""
        bias = None if linear.bias is None else linear.bias.bfloat16()
        return self.backend.make_linear(matrix, bias, is_gated=linear.is_gated, activation=linear.activation)


def observe(linear: Product | LogitsProduct, num_rows: int) -> ObservedLinear:
    assert isinstance(linear, TorchLinear)
    return ObservedLinear(linear, num_rows)


def round_layer(linear: ObservedLinear, form: LayerQuantization) -> Matrix:
    """The layer's weights as they are now, quantized."""
    return (
        quantize_matrix(linear.weight, form)
        if form.kind == "w8a8"
        else round_four_bit(linear.weight, linear.gram, form.kind, form.group)
    )
