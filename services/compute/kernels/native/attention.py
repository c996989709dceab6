"""Attention in native code: one algorithm for single tokens and for chunks, so that it does not matter in which chunks a prompt came."""

import ctypes
import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from services.compute.kernels.attention import AttentionInputs, Heads
from services.compute.kernels.native.library import Attention, CacheRows, Rotation, load_library, pointer
from services.compute.kernels.reference import kv_group

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class NativePlan:
    inputs: AttentionInputs
    query_starts: Tensor  # [S + 1] int64
    context_lens: Tensor  # [S] int64
    block_tables: Tensor  # [S, blocks] int64


class NativeAttention:
    """As TorchAttention, in bfloat16, over a cache of bfloat16 or of int8 groups."""

    def __init__(self, heads: Heads) -> None:
        library = load_library()
        assert library is not None and heads.are_supported
        self.library = library
        self.heads = heads

    def plan(self, inputs: AttentionInputs, block_size: int) -> NativePlan:
        width = max(-(-context // block_size) for context in inputs.context_lens)
        tables = [table[:width] + [0] * (width - len(table)) for table in inputs.block_tables]
        starts = torch.tensor([0, *accumulate(inputs.query_lens)])
        return NativePlan(inputs, starts, torch.tensor(inputs.context_lens), torch.tensor(tables))

    def __call__(self, qkv: Tensor, kv: Tensor, plan: NativePlan, *, window: int | None, norms: tuple[Tensor | None, Tensor | None], eps: float) -> Tensor:
        heads, inputs = self.heads, plan.inputs
        cache = CacheRows(kv[0].data_ptr(), kv[1].data_ptr(), kv.shape[-1] * kv.element_size(), kv_group(kv, heads.head_dim))
        rotation = Rotation(
            qkv.data_ptr(), inputs.cos.data_ptr(), inputs.sin.data_ptr(), pointer(norms[0]), pointer(norms[1]), eps, inputs.slot_mapping.data_ptr(),
            cache, len(qkv), heads.num_heads, heads.num_kv_heads, heads.head_dim,
        )  # fmt: skip
        self.library.penstock_rotate_and_write(ctypes.byref(rotation))
        out = torch.empty((len(qkv), heads.num_heads * heads.head_dim), dtype=torch.bfloat16)
        attention = Attention(
            qkv.data_ptr(), qkv.shape[1], cache, plan.query_starts.data_ptr(), plan.context_lens.data_ptr(), plan.block_tables.data_ptr(),
            len(plan.context_lens), plan.block_tables.shape[1], kv.shape[2], heads.num_heads, heads.num_kv_heads, heads.head_dim, window or 0,
            1.0 / math.sqrt(heads.head_dim), out.data_ptr(), None,
        )  # fmt: skip
        self.library.penstock_attention(ctypes.byref(attention))
        return out
