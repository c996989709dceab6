"""Attention over the paged cache: what it needs to know of a step, and how it is done in plain
torch."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.compute.backends.torch.reference import decode_attention, norm_heads, prefill_attention, rotary, write_kv

CosSin = tuple[Tensor, Tensor]  # cos and sin of the step's positions, [T, rotary_dim / 2] float32

MAX_NATIVE_HEAD_DIM, MAX_NATIVE_GROUP = 256, 32


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer's attention is divided."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int | None = None  # of head_dim, how many are rotated; None: all

    @property
    def are_supported(self) -> bool:
        """Whether native code runs heads of this form."""
        is_in_lanes = self.head_dim % 32 == 0 and (self.rotary_dim or self.head_dim) % 32 == 0
        return is_in_lanes and self.head_dim <= MAX_NATIVE_HEAD_DIM and self.num_heads // self.num_kv_heads <= MAX_NATIVE_GROUP


@dataclass(frozen=True, slots=True)
class Scores:
    """The changes to q . k before the softmax."""

    scale: float  # multiplies it
    cap: float = 0.0  # it becomes cap * tanh(it / cap); 0: no cap

    @classmethod
    def of(cls, heads: Heads) -> "Scores":
        """1 / sqrt(head_dim) and no cap: Vaswani et al., "Attention Is All You Need" (2017),
        section 3.2.1."""
        return cls(1.0 / math.sqrt(heads.head_dim))


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A step's sequences, in the order of their tokens."""

    query_lens: list[int]  # tokens of each in this step
    context_lens: list[int]  # tokens of each in the cache after it
    block_tables: list[tuple[int, ...]]  # as many blocks as the context needs, at least
    slot_mapping: Tensor  # [T] int64: where each token's K and V go
    ropes: tuple[CosSin, ...]  # a layer names one of them


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token sequences of similar length, whose attention is one call."""

    rows: Tensor  # [n] int64, of the step's tokens
    block_tables: Tensor  # [n, blocks] int64
    context_lens: Tensor  # [n] int64
    # by sliding window: [n, blocks * block_size] bool
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, block_size: int) -> Tensor:
        """The cached positions that each sequence's token sees; made once a step, shared by the
        layers."""
        if window not in self.masks:
            positions = torch.arange(self.block_tables.shape[1] * block_size, device=self.context_lens.device)
            ends = self.context_lens[:, None]
            self.masks[window] = (positions < ends) & (positions >= (ends - window if window is not None else 0))
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's chunk of several tokens."""

    rows: slice
    block_table: Tensor  # [blocks] int64
    num_context: int


@dataclass(frozen=True, slots=True)
class TorchPlan:
    inputs: AttentionInputs
    decode_groups: list[DecodeGroup]
    prefill_chunks: list[PrefillChunk]


class TorchAttention:
    """`plan` once a step, then a call for each layer."""

    def __init__(self, heads: Heads, scores: Scores | None = None) -> None:
        """scores: Scores.of(heads) if there are none."""
        self.heads = heads
        self.scores = scores or Scores.of(heads)

    def plan(self, inputs: AttentionInputs, block_size: int) -> TorchPlan:
        """One group of single tokens for each power of two of blocks, so that at most half of what
        a group reads is padding; and the chunks."""
        device = inputs.slot_mapping.device
        members: dict[int, list[tuple[int, int]]] = {}  # by size class: row, sequence
        chunks, row = [], 0
        for number, (length, context) in enumerate(zip(inputs.query_lens, inputs.context_lens, strict=True)):
            num_blocks = -(-context // block_size)
            if length == 1:
                members.setdefault(num_blocks.bit_length(), []).append((row, number))
            else:
                table = torch.tensor(inputs.block_tables[number][:num_blocks], device=device)
                chunks.append(PrefillChunk(slice(row, row + length), table, context))
            row += length
        groups = []
        for each in members.values():
            context_lens = [inputs.context_lens[number] for _, number in each]
            num_blocks = -(-max(context_lens) // block_size)
            tables = [inputs.block_tables[number][:num_blocks] for _, number in each]
            padded = torch.tensor([table + (0,) * (num_blocks - len(table)) for table in tables], device=device)
            groups.append(DecodeGroup(torch.tensor([row for row, _ in each], device=device), padded, torch.tensor(context_lens, device=device)))
        return TorchPlan(inputs, groups, chunks)

    def __call__(
        self, qkv: Tensor, kv: Tensor, plan: TorchPlan, *, window: int | None, norms: tuple[Tensor | None, Tensor | None], eps: float, rope: int = 0
    ) -> Tensor:
        """Normalize and rotate q and k, write K and V, attend.

        qkv: [T, (heads + 2 kv_heads) * head_dim], may be overwritten; kv: a layer's cache [2,
        blocks, kv_heads, block_size, head_dim]; window: how many tokens back each sees; norms: of q
        and k, where the model has them, [head_dim] for each head, or [heads * head_dim] for all
        together; rope: which of the plan's. Returns [T, heads * head_dim].
        """
        heads, inputs = self.heads, plan.inputs
        sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        q, k, v = qkv.view(len(qkv), -1, heads.head_dim).split_with_sizes(sizes, dim=1)
        if norms[0] is not None and norms[1] is not None:
            q, k = norm_heads(q, norms[0], eps), norm_heads(k, norms[1], eps)
        cos, sin = (each[:, None] for each in inputs.ropes[rope])
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        write_kv(kv, k, v, inputs.slot_mapping)
        out = torch.empty_like(q)
        for group in plan.decode_groups:
            mask = group.mask(window, kv.shape[3])
            out[group.rows] = decode_attention(q[group.rows], kv, group.block_tables, mask, scale=self.scores.scale, cap=self.scores.cap)
        for chunk in plan.prefill_chunks:
            rows, scale, cap = chunk.rows, self.scores.scale, self.scores.cap
            out[rows] = prefill_attention(q[rows], kv, chunk.block_table, chunk.num_context, window, scale=scale, cap=cap)
        return out.flatten(1)
