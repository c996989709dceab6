"""Attention of the library's plain layers by a backend's kernel, over the same paged cache: each token sees
those before it, or the last of them, and all of a layer's heads are as large as the cache's rows. The library has
turned queries and keys; where that is Llama's rotation, the kernel can do it, and norms with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    turning: Attention  # which turns queries and keys first
    window: int | None


def make_kernel_layers(
    backend: Backend, num_kv_heads: int, head_dim: int, layers: Mapping[int, PlainAttention]
) -> dict[int, KernelLayer]:
    """The layers that the backend has a kernel for, by number: it reads its own dtype only. num_kv_heads, head_dim: of
    the cache, and of each of these layers."""
    if backend.device.type != "cpu" or not has_same_columns(backend):
        return {}
    made: dict[tuple[Heads, Scores], tuple[Attention, Attention]] = {}
    found = {}
    for number, layer in layers.items():
        heads, scores = Heads(layer.num_heads, num_kv_heads, head_dim, UNTURNED), Scores(layer.scale, layer.cap)
        if heads.are_supported and layer.dtype == backend.dtype:
            if (heads, scores) not in made:
                turning = backend.make_attention(replace(heads, rotary_dim=head_dim), scores)
                made[heads, scores] = backend.make_attention(heads, scores), turning
            found[number] = KernelLayer(*made[heads, scores], layer.window)
    return found


class KernelStep:
    """A step of these layers."""

    def __init__(self, batch: ForwardBatch, layers: Mapping[int, KernelLayer]) -> None:
        turns = (1, UNTURNED // 2)
        ones = torch.ones(turns).expand(len(batch.slot_mapping), -1).contiguous()
        self.inputs = AttentionInputs(
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            batch.slot_mapping,
            ((ones, torch.zeros_like(ones)),),
            batch.block_lens,
        )
        self.layers = layers
        # by the attention, which several layers share, and by the library's cosines
        self.plans: dict[tuple[Attention, Tensor | None], object] = {}

    def attend(self, number: int, qkv: Sequence[Tensor], kv: Tensor, sinks: Tensor | None) -> Tensor:
        """qkv: [T, heads or kv_heads, head_dim] each; kv: the layer's cache. Returns [T, heads, head_dim], good
        until the next layer attends."""
        layer, joined = self.layers[number], torch.cat(list(qkv), dim=1)
        plan = self.plans.get((layer.attention, None))
        if plan is None:
            plan = self.plans[layer.attention, None] = layer.attention.plan(self.inputs, kv.shape[3])
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

    def turn_and_attend(
        self,
        number: int,
        qkv: Tensor,
        kv: Tensor,
        turns: tuple[Tensor, Tensor],
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
    ) -> Tensor:
        """qkv: [T, (heads + 2 * kv_heads) * head_dim], neither normalized nor turned; turns: cosines and sines as
        Llama's modules have them, [1, T, head_dim], the same for both halves. Returns as `attend`."""
        layer = self.layers[number]
        plan = self.plans.get((layer.turning, turns[0]))
        if plan is None:
            half = turns[0].shape[-1] // 2
            cosines, sines = (each[0, :, :half].float().contiguous() for each in turns)
            inputs = replace(self.inputs, ropes=((cosines, sines),))
            plan = self.plans[layer.turning, turns[0]] = layer.turning.plan(inputs, kv.shape[3])
        return layer.turning(qkv, kv, plan, window=layer.window, norms=norms, eps=eps)
