"""Attention over the paged cache: what launches kernels/attention.py, and the layout of its
cache."""

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import triton
from torch import Tensor

from services.compute.backends.buffers import Buffers
from services.compute.backends.cuda.graphs import pad_to_bucket
from services.compute.backends.cuda.kernels import attention as kernels
from services.compute.backends.cuda.row_math import prepare, warps_of
from services.compute.backends.torch.attention import AttentionInputs, CosSin, Heads
from services.compute.backends.torch.reference import Scores
from shared.process.errors import StartupError

ROWS = 64  # of a tile: queries times the query heads that share a KV head
RANGE = 512  # positions whose results are merged in order: a multiple of the keys of a block
SPLITS = 16  # programs among which a token's ranges are divided, at most
MAX_HEAD_DIM = 256
NARROWEST = 16  # blocks of the tables: each further power of two is recorded by itself
# of a step that is recorded: a row's tokens (the last one and its drafts), and where a row has
# several, all rows' together
LONGEST_ROW, MOST_TOKENS = 17, 64
EVERYTHING = 1 << 40  # the window of a layer without one


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """A step's tiles: those whose ranges are divided among programs, then chunks. The first are of
    single tokens. If all rows are short, as they are without prompts, they are of all rows: then
    all is padded to a bucket, and where it lies and how large it is depends on `shape` alone. Such
    a step can be recorded."""

    # [4, tiles] int64: first token, number of queries (0: padding), sequence, and the first query's
    # place in `parts`
    tiles: Tensor
    merged: Tensor  # [2, parts] int64: of each part its token, and how many tokens that sees (0: padding)
    # [sequences, 2] int64: tokens after the step, and the first token in the step less its position
    contexts: Tensor
    tables: Tensor  # [sequences, width] int64
    block_lens: Tensor | None  # [sequences, width] int64, see AttentionInputs
    last_seen: Tensor | None  # [T] int64, see AttentionInputs
    num_tokens: Tensor  # [1] int64: of the step, without padding
    slots: Tensor  # [T] int64
    num_split: int  # tiles whose ranges are divided
    block_size: int
    out: Tensor  # [tokens, heads * head_dim]: a layer's result, until the next writes its own
    parts: Tensor  # [parts, heads, ranges, head_dim] float32
    stats: Tensor  # [parts, heads, ranges, 2] float32
    ropes: tuple[CosSin, ...]
    is_recordable: bool

    @property
    def shape(self) -> tuple[int, int, bool]:
        """Tokens, padding included, the width of the block tables, and whether some blocks are tokens
        in part only."""
        return len(self.out), self.tables.shape[1], self.block_lens is not None


class CudaAttention:
    """TorchAttention over make_kv_layer's caches."""

    def __init__(self, buffers: Buffers, dtype: torch.dtype, heads: Heads, scores: Scores | None = None) -> None:
        """Raises StartupError for heads that the kernels' tiles don't hold."""
        sharing = heads.num_heads // heads.num_kv_heads
        if heads.head_dim > MAX_HEAD_DIM or sharing > ROWS:
            raise StartupError(
                f"heads of {heads.head_dim} dimensions, {sharing} to a KV head: attention on a GPU takes up to {MAX_HEAD_DIM} dimensions and {ROWS} heads"
            )
        self.buffers = buffers
        self.dtype = dtype
        self.heads = heads
        self.scores = scores or Scores.of(heads.head_dim)
        self.sharing: int = triton.next_power_of_2(sharing)
        self.dim: int = max(triton.next_power_of_2(heads.head_dim), 16)

    @property
    def queries(self) -> int:
        """Queries of a chunk's tile."""
        return ROWS // self.sharing

    def plan(self, inputs: AttentionInputs, block_size: int) -> CudaPlan:
        num_tokens, lens = len(inputs.slot_mapping), inputs.query_lens
        is_short = all(length == 1 for length in lens) or (max(lens) <= LONGEST_ROW and num_tokens <= MOST_TOKENS)
        is_recordable = is_short and inputs.last_seen is None
        num_rows = pad_to_bucket(num_tokens) if is_recordable else num_tokens
        num_sequences = num_rows if is_recordable else len(lens)
        width = max(triton.next_power_of_2(-(-max(inputs.context_lens) // block_size)), NARROWEST)
        starts = [0, *accumulate(lens)]
        split: list[tuple[int, int, int, int]] = []
        chunks: list[tuple[int, int, int, int]] = []
        merged: list[tuple[int, int]] = []
        for number, (length, context) in enumerate(zip(lens, inputs.context_lens, strict=True)):
            last = starts[number + 1]
            tiles = [(first, min(self.queries, last - first), number) for first in range(starts[number], last, self.queries)]
            if is_recordable or length == 1:
                split += [(first, count, number, len(merged) + first - starts[number]) for first, count, number in tiles]
                merged += [(token, context - last + token + 1) for token in range(starts[number], last)]
            else:
                chunks += [(*tile, 0) for tile in tiles]
        if is_recordable:
            split += [(0, 0, 0, 0)] * (num_rows - len(split))
            merged += [(0, 0)] * (num_rows - len(merged))
        tiles_there, merged_there = (np.array(each, np.int64).reshape(-1, size).T for each, size in (([*split, *chunks], 4), (merged, 2)))
        contexts = np.zeros((num_sequences, 2), np.int64)
        contexts[: len(lens)] = [(context, start - (context - length)) for context, start, length in zip(inputs.context_lens, starts, lens, strict=False)]
        of_blocks = [each for each in (inputs.block_tables, inputs.block_lens) if each is not None]
        tables = np.zeros((len(of_blocks), num_sequences, width), np.int64)
        for which, rows in enumerate(of_blocks):
            for number, (row, context) in enumerate(zip(rows, inputs.context_lens, strict=True)):
                count = -(-context // block_size)
                tables[which, number, :count] = row[:count]
        filled = self.buffers.fill("attention plan", np.concatenate([[num_tokens], tiles_there, merged_there, contexts, tables], axis=None))
        shapes = [(1,), tiles_there.shape, merged_there.shape, contexts.shape, tables.shape]
        pieces = torch.split(filled, [math.prod(shape) for shape in shapes])
        num_tokens_at, tiles_at, merged_at, contexts_at, tables_at = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        lens_at = tables_at[1] if len(of_blocks) > 1 else None
        last_seen = None if inputs.last_seen is None else self.buffers.fill("last seen", inputs.last_seen)
        heads, num_ranges = self.heads, triton.cdiv(width * block_size, RANGE)
        parts = (len(merged), heads.num_heads, num_ranges)
        return CudaPlan(
            tiles_at, merged_at, contexts_at, tables_at[0], lens_at, last_seen, num_tokens_at, inputs.slot_mapping, len(split), block_size,
            out=self.buffers.take("attention", (num_rows, heads.num_heads * heads.head_dim), self.dtype),
            parts=self.buffers.take("attention parts", (*parts, heads.head_dim), torch.float32),
            stats=self.buffers.take("attention stats", (*parts, 2), torch.float32),
            ropes=inputs.ropes, is_recordable=is_recordable,
        )  # fmt: skip

    def __call__(
        self,
        qkv: Tensor,
        kv: Tensor,
        plan: CudaPlan,
        *,
        window: int | None,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        rope: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        heads, shape = self.heads, self._shape(kv, plan.block_size)
        q_norm, k_norm = norms
        # of all heads together
        if q_norm is not None and k_norm is not None and len(q_norm) != heads.head_dim:
            q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
            for columns, norm in ((qkv[:, :q_size], q_norm), (qkv[:, q_size : q_size + kv_size], k_norm)):
                prepare(columns, norm=norm, eps=eps, out=columns)
            q_norm = k_norm = None
        scales = kv.view(torch.float16) if shape["GROUP"] else None
        strides = (kv.stride(0), kv.stride(1))
        cos, sin = plan.ropes[rope]
        num_rows = triton.next_power_of_2(heads.num_heads + 2 * heads.num_kv_heads)
        kernels.rotate_and_write[(len(qkv),)](
            qkv, kv, scales, cos, sin, plan.slots, plan.num_tokens, q_norm, k_norm, eps, *strides,
            **shape, NUM_HEADS=heads.num_heads, ROTARY_DIM=heads.rotary_dim or heads.head_dim, HEADS=num_rows, DIM=self.dim,
            num_warps=warps_of(num_rows * self.dim), enable_fp_fusion=True,
        )  # fmt: skip
        num_tiles, num_ranges, window = plan.tiles.shape[1], plan.parts.shape[2], window or EVERYTHING
        keys = 64 if self.dim <= 128 and self.dtype.itemsize == 2 else 32
        flat = plan.tiles.view(-1)
        for first, count, splits in ((0, plan.num_split, min(SPLITS, num_ranges)), (plan.num_split, num_tiles - plan.num_split, 0)):
            if count:
                kernels.attend[(count, heads.num_kv_heads, max(splits, 1))](
                    qkv, kv, scales, flat[first:], plan.contexts, plan.tables, plan.block_lens, plan.last_seen, sinks, plan.out, plan.parts, plan.stats,
                    num_tiles, plan.tables.shape[1], num_ranges, *strides, window, self.scores.scale, self.scores.cap,
                    **shape, NUM_HEADS=heads.num_heads, SHARING=self.sharing, ROWS=ROWS, KEYS=keys, DIM=self.dim, RANGE=RANGE,
                    IS_SPLIT=splits > 0, HAS_CAP=self.scores.cap != 0.0, num_warps=4 if self.dim <= 128 else 8, num_stages=2, enable_fp_fusion=False,
                )  # fmt: skip
        if plan.num_split:
            num_parts = plan.merged.shape[1]
            kernels.merge_ranges[(num_parts, heads.num_kv_heads)](
                plan.merged, plan.parts, plan.stats, sinks, plan.out, num_parts, num_ranges, window,
                NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEAD_DIM=heads.head_dim, SHARING=self.sharing, DIM=self.dim, RANGE=RANGE,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        return plan.out[: len(qkv)]

    def _shape(self, kv: Tensor, block_size: int) -> dict[str, int]:
        heads = self.heads
        row = kv.shape[2] // (heads.num_kv_heads * block_size)
        group = 2 * heads.head_dim // (row - heads.head_dim) if kv.dtype == torch.int8 else 0
        return {"NUM_KV_HEADS": heads.num_kv_heads, "HEAD_DIM": heads.head_dim, "BLOCK_SIZE": block_size, "GROUP": group}
