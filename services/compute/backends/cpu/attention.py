"""Attention in native code: one algorithm for single tokens and for chunks, so that it does not
matter in which chunks a prompt came."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from services.compute.backends.buffers import Buffers
from services.compute.backends.cpu.library import AttentionArguments, CacheRows, NativeContext, Rotation, pointer
from services.compute.backends.torch.attention import AttentionInputs, CosSin, Heads
from services.compute.backends.torch.reference import Scores, kv_group


@dataclass(frozen=True, slots=True)
class NativePlan:
    """The structures of a step's calls, in which a layer puts its own; and the tensors that they
    point to."""

    rotation: Rotation
    attention: AttentionArguments
    # [T, heads * head_dim], of the widest heads: a layer's result, until the next writes its own
    out: Tensor
    ropes: tuple[CosSin, ...]
    kept: tuple[Tensor, ...]
    states: Any  # AttentionInputs'


class NativeAttention:
    """TorchAttention in bfloat16, over a cache of bfloat16 or of int8 groups in an order of its own
    (cache.inc), in blocks of a multiple of 16."""

    finds_slots = False

    def __init__(
        self,
        context: NativeContext,
        buffers: Buffers,
        heads: Heads,
        scores: Scores | None = None,
        others: Sequence[Heads] = (),
    ) -> None:
        self.context = context
        self.buffers = buffers
        self.heads = heads
        self.of_ropes = (heads, *others)
        assert all(each.are_supported for each in self.of_ropes)
        self.scores = scores or Scores.of(heads.head_dim)

    def plan(self, inputs: AttentionInputs, block_size: int) -> NativePlan:
        num_blocks = max(-(-context // block_size) for context in inputs.context_lens)
        tables = self._table("block_tables", inputs.block_tables, num_blocks)
        lens = None if inputs.block_lens is None else self._table("block_lens", inputs.block_lens, num_blocks)
        last_seen = None if inputs.last_seen is None else self.buffers.fill("last_seen", inputs.last_seen)
        starts = self.buffers.fill("query_starts", [0, *accumulate(inputs.query_lens)])
        contexts = self.buffers.fill("context_lens", inputs.context_lens)
        heads, num_tokens = self.heads, len(inputs.slot_mapping)
        width = heads.num_heads * max(each.head_dim for each in self.of_ropes)
        out = self.buffers.take("attention", (num_tokens, width), torch.bfloat16)
        rotation = Rotation(
            slots=inputs.slot_mapping.data_ptr(),
            tokens=num_tokens,
            num_heads=heads.num_heads,
            head_dim=heads.head_dim,
            rotary_dim=heads.rotary_dim or heads.head_dim,
            norms_after_rotation=heads.norms_after_rotation,
            has_value_norm=heads.has_value_norm,
        )
        attention = AttentionArguments(
            query_starts=starts.data_ptr(),
            context_lens=contexts.data_ptr(),
            block_tables=tables.data_ptr(),
            block_lens=pointer(lens),
            last_seen=pointer(last_seen),
            num_sequences=len(contexts),
            table_width=num_blocks,
            num_heads=heads.num_heads,
            head_dim=heads.head_dim,
            sharing=heads.sharing,
            num_before=heads.num_before,
            scale=self.scores.scale,
            cap=self.scores.cap,
            out=out.data_ptr(),
            out_stride=width,
        )
        kept = (
            starts,
            contexts,
            tables,
            inputs.slot_mapping,
            *(each for each in (lens, last_seen) if each is not None),
        )
        return NativePlan(rotation, attention, out, inputs.ropes, kept, inputs.states)

    def _table(self, name: str, of_blocks: list[tuple[int, ...]], width: int) -> Tensor:
        """A number of each sequence's blocks, [sequences * width] int64."""
        return self.buffers.fill(name, [each for row in of_blocks for each in row[:width] + (0,) * (width - len(row))])

    def __call__(
        self,
        qkv: Tensor,
        kv: Tensor,
        plan: NativePlan,
        *,
        window: int | None,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        rope: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        rotation, attention, heads = plan.rotation, plan.attention, self.of_ropes[rope]
        rotation.qkv = attention.queries = qkv.data_ptr()
        rotation.cache = attention.cache = cache_rows(kv, heads.head_dim)
        rotation.head_dim = attention.head_dim = heads.head_dim
        rotation.rotary_dim, rotation.kv_projections = heads.rotary_dim or heads.head_dim, heads.kv_projections
        attention.sharing, attention.gate_column = heads.sharing, heads.gate_column
        attention.out_stride = heads.num_heads * heads.head_dim
        out = plan.out.view(-1)[: len(qkv) * attention.out_stride].view(len(qkv), -1)
        rotation.cosines, rotation.sines = (each.data_ptr() for each in plan.ropes[rope])
        rotation.q_norm, rotation.k_norm, rotation.eps = pointer(norms[0]), pointer(norms[1]), eps
        rotation.is_norm_joint = is_joint(norms[0], heads.head_dim)
        rotation.stride = attention.query_stride = qkv.shape[1]
        attention.window, attention.sinks = window or 0, pointer(sinks)
        self.context.rotate_and_write(ctypes.byref(rotation))
        self.context.attention(ctypes.byref(attention))
        return out


def cache_rows(kv: Tensor, head_dim: int) -> CacheRows:
    """A layer's cache, as make_kv_layer made it."""
    keys, (_, _, num_kv_heads, block_size, row) = kv.data_ptr(), kv.shape
    return CacheRows(
        keys,
        keys + kv.stride(0) * kv.element_size(),
        block_size,
        num_kv_heads,
        row * kv.element_size(),
        kv_group(kv, head_dim),
    )


def is_joint(q_norm: Tensor | None, head_dim: int) -> bool:
    """Whether the norms of q and k are over all heads, not over each."""
    return q_norm is not None and len(q_norm) != head_dim
