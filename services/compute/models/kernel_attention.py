"""Attention of the library's plain layers by a backend's kernel, over the same paged cache: each token sees
those before it, or the last of them, and all of a layer's heads are as large as the cache's rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.backend import Attention, Backend
from services.compute.backends.choose import has_same_columns
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.backends.torch.reference import Scores
from services.compute.models.decoder import ForwardBatch

UNTURNED = 32  # dimensions that a kernel turns at least: by nothing, for the library has turned them all


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """A layer's attention, as far as a kernel has to know it."""

    dtype: torch.dtype  # of queries, keys and values
    num_heads: int
    window: int | None  # how many tokens back each sees
    scale: float
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelLayer:
    attention: Attention
    window: int | None


def make_kernel_layers(
    backend: Backend, num_kv_heads: int, head_dim: int, layers: Mapping[int, PlainAttention]
) -> dict[int, KernelLayer]:
    """The layers that the backend has a kernel for, by number: it reads its own dtype only. num_kv_heads, head_dim: of
    the cache, and of each of these layers."""
    if backend.device.type != "cpu" or not has_same_columns(backend):
        return {}
    made: dict[tuple[Heads, Scores], Attention] = {}
    found = {}
    for number, layer in layers.items():
        heads, scores = Heads(layer.num_heads, num_kv_heads, head_dim, UNTURNED), Scores(layer.scale, layer.cap)
        if heads.are_supported and layer.dtype == backend.dtype:
            if (heads, scores) not in made:
                made[heads, scores] = backend.make_attention(heads, scores)
            found[number] = KernelLayer(made[heads, scores], layer.window)
    return found


class KernelStep:
    """A step of these layers."""

    def __init__(self, batch: ForwardBatch, layers: Mapping[int, KernelLayer]) -> None:
        turns = (1, UNTURNED // 2)
        ropes = torch.ones(turns).expand(len(batch.slot_mapping), -1).contiguous()
        self.inputs = AttentionInputs(
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            batch.slot_mapping,
            ((ropes, torch.zeros_like(ropes)),),
            batch.block_lens,
        )
        self.layers = layers
        self.plans: dict[int, object] = {}  # by the attention, which several layers share

    def attend(self, number: int, qkv: Sequence[Tensor], kv: Tensor, sinks: Tensor | None) -> Tensor:
        """qkv: [T, heads or kv_heads, head_dim] each; kv: the layer's cache. Returns [T, heads, head_dim], good
        until the next layer attends."""
        layer, joined = self.layers[number], torch.cat(list(qkv), dim=1)
        plan = self.plans.get(id(layer.attention))
        if plan is None:
            plan = self.plans[id(layer.attention)] = layer.attention.plan(self.inputs, kv.shape[3])
        out = layer.attention(
            joined.flatten(1),
            kv,
            plan,
            window=layer.window,
            norms=(None, None),
            eps=0.0,
            sinks=None if sinks is None else sinks.float(),
        )
        return out.view(len(joined), -1, qkv[0].shape[-1])
