"""A decoder's layers, and the recordings of their steps."""

from collections.abc import Callable, Sequence

from torch import Tensor

from services.compute.backends.backend import LayerCache, LayerWeights, RowMath, Wiring
from services.compute.backends.buffers import Buffers, Taps
from services.compute.backends.cuda.attention import CudaAttention, CudaPlan
from services.compute.backends.cuda.graphs import Record, Recordings
from services.compute.backends.cuda.linear import CudaLinear


class CudaStack:
    """See backend.py's Stack. Steps of short rows are recorded: of single tokens, and of tokens with
    drafts. Those with chunks are launched kernel by kernel."""

    def __init__(
        self,
        buffers: Buffers,
        row_math: RowMath,
        layers: Sequence[LayerWeights],
        attention: CudaAttention,
        wiring: Wiring,
        make_recorder: Callable[[], Record],
    ) -> None:
        self.buffers = buffers
        self.row_math = row_math
        self.layers = layers
        self.attention = attention
        self.wiring = wiring
        self.recordings = Recordings(make_recorder)

    def __call__(self, x: Tensor, caches: Sequence[LayerCache], plan: CudaPlan, taps: Taps | None = None) -> Tensor:
        if not plan.is_recordable:
            return self.run(x, caches, plan, taps)
        kv_layers = [kv for kv in caches if isinstance(kv, Tensor)]
        held = self.buffers.take("stack", (plan.shape[0], x.shape[1]), x.dtype)
        held[: len(x)].copy_(x)
        key = (*plan.shape, kv_layers[0].shape, *[kv.data_ptr() for kv in kv_layers])
        return self.recordings.run(key, lambda: self.run(held, kv_layers, plan, taps), lambda: self.buffers.generation)[
            : len(x)
        ]

    def run(self, x: Tensor, caches: Sequence[LayerCache], plan: CudaPlan, taps: Taps | None = None) -> Tensor:
        """Launch all kernels of the step. x, which stays as it is: [T, hidden]. Returns [T,
        hidden]."""
        wiring = self.wiring
        for number, (layer, kv, window, rope) in enumerate(
            zip(self.layers, caches, wiring.windows, wiring.ropes, strict=True)
        ):
            assert isinstance(kv, Tensor)
            if taps is not None:
                taps.keep(number, x)
            norms = layer.norms
            qkv = layer.qkv(x, norm=norms.before_attention, eps=wiring.eps)
            h = self.attention(
                qkv, kv, plan, window=window, norms=(norms.q, norms.k), eps=wiring.eps, rope=rope, sinks=layer.sinks
            )
            if wiring.adds_in_layers:
                x = layer.output(h, residual=x)
                x = layer.mlp(x, norm=norms.before_mlp, eps=wiring.eps)
            else:
                x = self._add(x, layer.output(h), norms.after_attention)
                h = layer.mlp(x, norm=norms.before_mlp, eps=wiring.eps, has_residual=False)
                x = self._add(x, h, norms.after_mlp, layer.scalar)
        if taps is not None:
            taps.keep(len(self.layers), x)
        return x

    def reserve(self, num_tokens: int) -> None:
        qkv = self.layers[0].qkv
        assert isinstance(qkv, CudaLinear)
        self.buffers.take("stack", (num_tokens, qkv.k), qkv.dtype)

    def _add(self, x: Tensor, h: Tensor, norm: Tensor | None, scale: float = 1.0) -> Tensor:
        multiplier = self.wiring.residual_multiplier
        return self.row_math.add(x, h, norm=norm, eps=self.wiring.eps, multiplier=multiplier, scale=scale)
