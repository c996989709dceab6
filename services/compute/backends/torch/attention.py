"""Attention over the paged cache: what it needs to know of a step, and how it is done in plain torch."""

from dataclasses import dataclass, field

import torch

from services.compute.backends.torch.reference import decode_attention, prefill_attention, rms_norm, rotary, write_kv

Tensor = torch.Tensor

MAX_NATIVE_HEAD_DIM, MAX_NATIVE_GROUP = 256, 32


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer's attention is divided."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def are_supported(self) -> bool:
        """By native code."""
        return self.head_dim % 32 == 0 and self.head_dim <= MAX_NATIVE_HEAD_DIM and self.num_heads // self.num_kv_heads <= MAX_NATIVE_GROUP


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A step's sequences, in the order of their tokens."""

    query_lens: list[int]  # tokens of each in this step
    context_lens: list[int]  # tokens of each in the cache after it
    block_tables: list[tuple[int, ...]]  # as many blocks as the context needs, at least
    slot_mapping: Tensor  # [T] int64: where each token's K and V go
    cos: Tensor  # [T, head_dim / 2] float32
    sin: Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token sequences of similar length, whose attention is one call."""

    rows: Tensor  # [n] int64, of the step's tokens
    block_tables: Tensor  # [n, blocks] int64
    context_lens: Tensor  # [n] int64
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window: [n, blocks * block_size] bool

    def mask(self, window: int | None, block_size: int) -> Tensor:
        """Which cached positions each sequence's token sees; made once a step, shared by the layers."""
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

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def plan(self, inputs: AttentionInputs, block_size: int) -> TorchPlan:
        """One group of single tokens for each power of two of blocks, so that at most half of what a group reads is padding; and the chunks."""
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

    def __call__(self, qkv: Tensor, kv: Tensor, plan: TorchPlan, *, window: int | None, norms: tuple[Tensor | None, Tensor | None], eps: float) -> Tensor:
        """Rotate, write K and V, attend.

        qkv: [T, (heads + 2 kv_heads) * head_dim], may be overwritten; kv: a layer's cache [2, blocks, kv_heads, block_size, head_dim]; window: how many
        tokens back each sees; norms: of q's and k's heads, where the model has them. Returns [T, heads * head_dim].
        """
        heads, inputs = self.heads, plan.inputs
        sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        q, k, v = qkv.view(len(qkv), -1, heads.head_dim).split_with_sizes(sizes, dim=1)
        if norms[0] is not None and norms[1] is not None:
            q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
        cos, sin = inputs.cos[:, None], inputs.sin[:, None]
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        write_kv(kv, k, v, inputs.slot_mapping)
        out = torch.empty_like(q)
        for group in plan.decode_groups:
            out[group.rows] = decode_attention(q[group.rows], kv, group.block_tables, group.mask(window, kv.shape[3]))
        for chunk in plan.prefill_chunks:
            out[chunk.rows] = prefill_attention(q[chunk.rows], kv, chunk.block_table, chunk.num_context, window)
        return out.flatten(1)
