"""A decoder's layers in native code, as one call: one parallel region a step, in which threads wait
for each other only. With taps the call ends where a copy is taken, and another goes on."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from services.compute.backends.backend import LayerWeights, Wiring
from services.compute.backends.buffers import Buffers, Taps
from services.compute.backends.cpu.attention import NativePlan, cache_rows, is_joint
from services.compute.backends.cpu.library import Context, Layer, Layers, Norms, Pointer, pointer
from services.compute.backends.cpu.linear import NativeLinear, NativeMlp


class NativeStack:
    """See backend.py's Stack."""

    def __init__(self, context: Context, buffers: Buffers, layers: Sequence[LayerWeights], wiring: Wiring) -> None:
        """layers: of one context, with its MLPs."""
        self.context = context
        self.buffers = buffers
        self.wiring = wiring
        self.weights = layers  # what the structures point to
        self.layers = (Layer * len(layers))()
        self.kv_layers: Sequence[Tensor] = ()
        for each, layer, window, rope in zip(self.layers, layers, wiring.windows, wiring.ropes, strict=True):
            assert isinstance(layer.mlp, NativeMlp)
            for name, linear in (("qkv", layer.qkv), ("output", layer.output), ("gate_up", layer.mlp.gate_up), ("down", layer.mlp.down)):
                assert isinstance(linear, NativeLinear)
                setattr(each, name, ctypes.pointer(linear.struct))
            norms = layer.norms
            each.norms = Norms(*map(pointer, (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp, norms.q, norms.k)))
            each.window, each.rope, each.sinks = window or 0, rope, pointer(layer.sinks)

    def __call__(self, x: Tensor, kv_layers: Sequence[Tensor], plan: NativePlan, taps: Taps | None = None) -> Tensor:
        rotation, attention = plan.rotation, plan.attention
        if kv_layers is not self.kv_layers:
            self._point_to(kv_layers, rotation.head_dim)
        qkv, h = self._take(len(x))
        rotation.qkv = attention.queries = qkv.data_ptr()
        rotation.eps, attention.query_stride = self.wiring.eps, qkv.shape[1]
        tables = [(Pointer * len(plan.ropes))(*(table.data_ptr() for table in each)) for each in zip(*plan.ropes, strict=True)]
        called = Layers(
            self.layers, len(self.layers), x.data_ptr(), pointer(h), self.wiring.eps, self.wiring.residual_multiplier, *tables, rotation, attention,
        )  # fmt: skip
        if taps is None:
            self.context.run_layers(called)
            return x
        for first, last in taps.pieces(len(self.layers)):
            taps.keep(first, x)
            called.layers, called.num_layers = ctypes.pointer(self.layers[first]), last - first
            self.context.run_layers(called)
        taps.keep(len(self.layers), x)
        return x

    def reserve(self, num_tokens: int) -> None:
        self._take(num_tokens)

    def _take(self, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        qkv = self.weights[0].qkv
        assert isinstance(qkv, NativeLinear)
        width, hidden = qkv.num_outputs, qkv.struct.k
        h = None if self.wiring.adds_in_layers else self.buffers.take("h", (num_tokens, hidden), torch.bfloat16)
        return self.buffers.take("qkv", (num_tokens, width), torch.bfloat16), h

    def _point_to(self, kv_layers: Sequence[Tensor], head_dim: int) -> None:
        for each, layer, kv in zip(self.layers, self.weights, kv_layers, strict=True):
            each.cache = cache_rows(kv, head_dim)
            each.norms.is_qk_joint = is_joint(layer.norms.q, head_dim)
        self.kv_layers = kv_layers
