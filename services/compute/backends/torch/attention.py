"""Attention over the paged cache: what it needs to know of a step, and how it is done in plain
torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.backends.torch.reference import (
    RANGE,
    Scores,
    norm_heads,
    paged_attention,
    rms_norm,
    rotary,
    write_kv,
)

CosSin = tuple[Tensor, Tensor]  # cos and sin of the step's positions, [T, rotary_dim / 2] float32

MAX_NATIVE_HEAD_DIM, MAX_NATIVE_GROUP = 512, 32
PIECE = 64  # tokens of a sequence that are computed together


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer's attention is divided."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int | None = None  # of head_dim, how many are rotated; None: all
    # query heads that read each KV head; None: num_heads / num_kv_heads. Some that read the first or the
    # last one may be elsewhere; of those of the first, the first num_before
    per_kv_head: int | None = None
    num_before: int = 0
    norms_after_rotation: bool = False  # of each head of q and k; else before
    # the results are multiplied by the sigmoid of as many more columns, behind those of v
    has_gate: bool = False
    # 2: there are columns of k and of v; 1: of k alone, which before their norm are also the values; 0: of neither,
    # and the cache has them already
    kv_projections: int = 2
    has_value_norm: bool = False  # of each head of v, without a weight

    @property
    def num_projected(self) -> int:
        """The heads of q, k and v in a row."""
        return self.num_heads + self.kv_projections * self.num_kv_heads

    @property
    def gate_column(self) -> int:
        """Where in a row the gate begins; 0: there is none."""
        return self.num_projected * self.head_dim if self.has_gate else 0

    @property
    def sharing(self) -> int:
        """Query heads that read a KV head."""
        return self.per_kv_head or self.num_heads // self.num_kv_heads

    @property
    def are_supported(self) -> bool:
        """Whether native code runs heads of this form."""
        is_in_lanes = self.head_dim % 32 == 0 and (self.rotary_dim or self.head_dim) % 32 == 0
        return is_in_lanes and self.head_dim <= MAX_NATIVE_HEAD_DIM and self.sharing <= MAX_NATIVE_GROUP


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A step's sequences, in the order of their tokens."""

    query_lens: list[int]  # tokens of each in this step
    context_lens: list[int]  # tokens of each in the cache after it
    block_tables: list[tuple[int, ...]]  # as many blocks as the context needs, at least
    slot_mapping: Tensor  # [T] int64: where each token's K and V go; empty: found by an attention that finds_slots
    ropes: tuple[CosSin, ...]  # a layer names one of them
    # how many positions of each sequence's blocks are tokens: the others are masked. None: all are
    block_lens: list[tuple[int, ...]] | None = None
    # of the step's tokens, the last position that each sees, in its sequence; None: its own
    last_seen: list[int] | None = None
    # names of the sequences, by which their tables may be kept from step to step; None: no table is kept
    handles: list[int] | None = None
    states: Any = None  # a recurrence's plan of the step, which the layers find in that of attention


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Tokens of one sequence that are computed together."""

    rows: range  # of the step's tokens
    sequence: int
    num_context: int  # up to the last of them, or of what they see


@dataclass(frozen=True, slots=True)
class PieceGroup:
    """Pieces of as many tokens, and of similar contexts, whose attention is one call."""

    rows: Tensor  # [n, tokens] int64, of the step's tokens
    positions: Tensor  # [n, tokens] int64, in their sequences
    block_tables: Tensor  # [n, blocks] int64, whole ranges
    block_lens: Tensor  # [n, blocks] int64: of each block, how many of its positions are read
    last_seen: Tensor  # the same, the last that each sees


@dataclass(frozen=True, slots=True)
class TorchPlan:
    inputs: AttentionInputs
    groups: list[PieceGroup]

    @property
    def states(self) -> Any:
        """AttentionInputs' states."""
        return self.inputs.states


class TorchAttention:
    """`plan` once a step, then a call for each layer."""

    finds_slots = False

    def __init__(self, heads: Heads, scores: Scores | None = None, others: Sequence[Heads] = ()) -> None:
        """scores: Scores.of(heads.head_dim) if there are none; others: see make_attention."""
        self.heads = heads
        self.of_ropes = (heads, *others)
        self.scores = scores or Scores.of(heads.head_dim)

    def plan(self, inputs: AttentionInputs, block_size: int) -> TorchPlan:
        """One group for each number of tokens and each power of two of ranges, so that at most half
        of what a group reads is padding."""
        members: dict[tuple[int, int], list[QueryBlock]] = {}
        row = 0
        for sequence, (length, context) in enumerate(zip(inputs.query_lens, inputs.context_lens, strict=True)):
            for at in range(0, length, PIECE):
                count = min(PIECE, length - at)
                end = (
                    context - length + at + count
                    if inputs.last_seen is None
                    else inputs.last_seen[row + at + count - 1] + 1
                )
                piece = QueryBlock(range(row + at, row + at + count), sequence, end)
                members.setdefault((count, (-(-piece.num_context // RANGE)).bit_length()), []).append(piece)
            row += length
        return TorchPlan(inputs, [self._group(pieces, inputs, block_size) for pieces in members.values()])

    def _group(self, pieces: list[QueryBlock], inputs: AttentionInputs, block_size: int) -> PieceGroup:
        device = inputs.slot_mapping.device
        context_lens = torch.tensor([[piece.num_context] for piece in pieces], device=device)
        width = -(-int(context_lens.max()) // block_size)
        tables = torch.tensor(
            [(*inputs.block_tables[piece.sequence], *(0,) * width)[:width] for piece in pieces], device=device
        )
        lens = (context_lens - torch.arange(width, device=device) * block_size).clamp(0, block_size)
        if inputs.block_lens is not None:
            there = torch.tensor(
                [(*inputs.block_lens[piece.sequence], *(0,) * width)[:width] for piece in pieces], device=device
            )
            lens = torch.minimum(lens, there)
        rows = torch.tensor([list(piece.rows) for piece in pieces], device=device)
        starts = list(accumulate(inputs.query_lens, initial=0))
        # of each sequence's first token in the step, its place in the step less that in the sequence
        shifts = [starts[piece.sequence + 1] - inputs.context_lens[piece.sequence] for piece in pieces]
        positions = rows - torch.tensor(shifts, device=device)[:, None]
        last_seen = positions if inputs.last_seen is None else torch.tensor(inputs.last_seen, device=device)[rows]
        return PieceGroup(rows, positions, tables, lens, last_seen)

    def __call__(
        self,
        qkv: Tensor,
        kv: Tensor,
        plan: TorchPlan,
        *,
        window: int | None,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        rope: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Normalize and rotate q and k, write K and V, attend.

        qkv: [T, (heads + kv_projections * kv_heads) * head_dim], with a gate heads * head_dim more, may be
        overwritten; kv: a layer's cache [2, blocks, kv_heads, block_size, head_dim];
        window: how many tokens back each sees; norms: of q and k, where the model has them, [head_dim] for
        each head, or [heads * head_dim] for all together; rope: which of the plan's, with its heads; sinks:
        [heads] float32, see paged_attention. Returns [T, heads * head_dim].
        """
        heads, inputs = self.of_ropes[rope], plan.inputs
        num_keys = heads.num_kv_heads * (heads.kv_projections > 0)
        num_values = heads.num_kv_heads * (heads.kv_projections > 1)
        sizes = [heads.num_heads, num_keys, num_values, heads.num_heads * heads.has_gate]
        q, k, v, gate = qkv.view(len(qkv), -1, heads.head_dim).split_with_sizes(sizes, dim=1)
        cos, sin = (each[:, None] for each in inputs.ropes[rope])

        def turned(x: Tensor, norm: Tensor | None) -> Tensor:
            x = x if heads.norms_after_rotation else norm_heads(x, norm, eps)
            x = rotary(x, cos, sin)
            return norm_heads(x, norm, eps) if heads.norms_after_rotation else x

        if heads.kv_projections:
            v = v if heads.kv_projections > 1 else k
            v = rms_norm(v, None, eps) if heads.has_value_norm else v
            write_kv(kv, turned(k, norms[1]), v, inputs.slot_mapping)
        q = turned(q, norms[0])
        # zeros in the places of query heads that are elsewhere
        missing = heads.num_before, heads.num_kv_heads * heads.sharing - heads.num_before - heads.num_heads
        q, sinks = F.pad(q, (0, 0, *missing)), None if sinks is None else F.pad(sinks, missing)
        out = torch.empty_like(q)
        for group in plan.groups:
            seen = group.positions, group.last_seen
            out[group.rows] = paged_attention(
                q[group.rows], kv, group.block_tables, group.block_lens, seen, window, self.scores, sinks
            )
        out = out[:, heads.num_before : heads.num_before + heads.num_heads]
        return (gate_heads(out, gate) if heads.has_gate else out).flatten(1)


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), of equal shapes, in float32. Returns it in x's dtype."""
    return (x.float() / (1.0 + torch.exp(-gate.float()))).to(x.dtype)


def split_gate(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor | None]:
    """q, k and v, [T, (heads + 2 kv_heads) * head_dim], and a gate's columns behind them, if there is one."""
    size = heads.num_projected * heads.head_dim
    return (qkv[:, :size].contiguous(), qkv[:, size:]) if heads.has_gate else (qkv, None)
