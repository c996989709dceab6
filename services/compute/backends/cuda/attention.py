"""Attention over the paged cache: what launches kernels/attention.py, and the layout of its
cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from services.compute.backends.cuda.buffers import CudaBuffers
from services.compute.backends.cuda.graphs import LONGEST_ROW, MAX_TOKENS, pad_to_bucket
from services.compute.backends.cuda.kernels import attention as kernels
from services.compute.backends.cuda.kernels import blocks as block_kernels
from services.compute.backends.cuda.row_math import prepare, warps_of
from services.compute.backends.cuda.tables import BlockTables
from services.compute.backends.torch.attention import AttentionInputs, CosSin, Heads, gate_heads, split_gate
from services.compute.backends.torch.reference import Scores
from shared.model.arrays import Array
from shared.model.segments import MAX_SEGMENTS, SEGMENT_MULTIPLE
from shared.process.errors import StartupError

ROWS = 64  # of a tile: queries times the query heads that share a KV head; of wide heads half as many
RANGE = 512  # positions whose results are merged in order, at first: a multiple of the keys of a block
# programs among which a token's ranges are divided: at most, and at least, where all tokens have
# PROGRAMS of them together
SPLITS, MIN_SPLITS, PROGRAMS = 16, 4, 4096
MAX_HEAD_DIM, WIDE_HEAD_DIM = 512, 256  # heads are wide if they have more than the latter
HEADS = 16  # that a program rotates
SMALLEST_BLOCK = 16  # tokens: --block-size is a multiple of it
FOUND_AT_ONCE = 256  # slots
EVERYTHING = 1 << 30  # the window of a layer without one
MAX_HOLES = MAX_SEGMENTS * SEGMENT_MULTIPLE  # of a context, in addition to its tokens


def count_ranges(num_positions: int) -> int:
    """The ranges of so many positions: see kernels/attention.py."""
    equal, doubling = kernels.EQUAL.value, kernels.DOUBLING.value
    last = num_positions - 1
    doublings = (last // (equal * RANGE)).bit_length()
    size = RANGE << doublings
    return 1 + (equal + (doublings - 1) * doubling + (last - equal // 2 * size) // size if doublings else last // RANGE)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The tiles of a step, and the memory, of attention with some heads."""

    # [4, tiles]: first token, number of queries (0: padding), sequence, and the first query's place
    # in `parts`
    tiles: Tensor
    num_split: int  # tiles whose ranges are divided
    out: Tensor  # [tokens, heads * head_dim]: a layer's result, until the next writes its own
    parts: Tensor  # [parts, heads, ranges, head_dim] float32
    stats: Tensor  # [parts, heads, ranges, 2] float32


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """A step's tiles: those whose ranges are divided among programs, then chunks. The first are of
    single tokens. If all rows are short, as they are without prompts, they are of all rows: then
    all is padded to a bucket, and where it lies and how large it is depends on `shape` alone. Such
    a step can be recorded. Numbers are int32."""

    works: tuple[AttentionWork, ...]  # of the heads of each rope
    merged: Tensor  # [2, parts]: of each part its token, and how many tokens that sees (0: padding)
    # [sequences, 4]: tokens after the step, the first token in the step less its position, the row
    # of `tables`, and that position
    contexts: Tensor
    tables: Tensor  # [rows, width]
    block_lens: Tensor | None  # [rows, width], see AttentionInputs
    last_seen: Tensor | None  # [T], see AttentionInputs
    num_tokens: Tensor  # [1]: of the step, without padding
    slots: Tensor  # [T] int64
    block_size: int
    ropes: tuple[CosSin, ...]
    is_recordable: bool
    states: Any  # AttentionInputs'

    @property
    def shape(self) -> tuple[int, bool]:
        """Tokens, padding included, and whether some blocks are tokens in part only."""
        return len(self.works[0].out), self.block_lens is not None


@dataclass(frozen=True, slots=True)
class Tiles:
    """CudaPlan's tiles and merged, as arrays."""

    tiles: Array
    merged: Array
    num_split: int


def make_tiles(lens: Array, firsts: Array, starts: Array, is_split: Array, queries: int) -> Tiles:
    """The tiles of a step, of at most `queries` tokens each. lens: of each sequence its tokens in
    the step; firsts, starts: the first one's position, and its place in the step; is_split: whether
    its ranges are divided; all [sequences]."""
    counts = -(-lens // queries)
    sequences = np.repeat(np.arange(len(lens)), counts)
    begun = queries * (np.arange(len(sequences)) - (counts.cumsum() - counts)[sequences])
    split_lens = np.where(is_split, lens, 0)
    parts = np.where(is_split, split_lens.cumsum() - split_lens, 0)[sequences] + np.where(is_split[sequences], begun, 0)
    tiles = np.stack([starts[sequences] + begun, np.minimum(queries, lens[sequences] - begun), sequences, parts])
    order = np.argsort(~is_split[sequences], kind="stable")
    owners = np.repeat(np.arange(len(lens)), split_lens)
    within = np.arange(len(owners)) - (split_lens.cumsum() - split_lens)[owners]
    merged = np.stack([starts[owners] + within, firsts[owners] + within + 1])
    return Tiles(tiles[:, order], merged, int(is_split[sequences].sum()))


class CudaAttention:
    """TorchAttention over make_kv_layer's caches."""

    finds_slots = True

    def __init__(
        self,
        buffers: CudaBuffers,
        dtype: torch.dtype,
        heads: Heads,
        scores: Scores | None = None,
        others: Sequence[Heads] = (),
    ) -> None:
        """Raises StartupError for heads that the kernels' tiles don't hold."""
        self.of_ropes = (heads, *others)
        for each in self.of_ropes:
            if each.head_dim > MAX_HEAD_DIM or each.sharing > rows_of(each):
                raise StartupError(
                    f"heads of {each.head_dim} dimensions, {each.sharing} to a KV head: attention on a GPU takes up "
                    f"to {MAX_HEAD_DIM} dimensions and {rows_of(each)} heads"
                )
        self.buffers = buffers
        self.tables = BlockTables(buffers)
        self.num_ranges = 0  # of the longest context that there is room for
        self.dtype = dtype
        self.heads = heads
        self.scores = scores or Scores.of(heads.head_dim)

    def reserve(self, num_sequences: int, num_tokens: int, longest: int) -> None:
        """Make room for any step of so many sequences and tokens, of contexts of up to `longest`
        tokens: no later one moves what recordings read."""
        self.tables.reserve(num_sequences, -(-(longest + MAX_HOLES) // SMALLEST_BLOCK))
        self.num_ranges = max(self.num_ranges, count_ranges(longest + MAX_HOLES))
        num_rows = max(num_tokens, pad_to_bucket(max(num_sequences, MAX_TOKENS)))
        self.buffers.reserve("attention plan", 1 + (4 * len(self.of_ropes) + 2 + 4) * num_rows, torch.int32)
        self.buffers.reserve("last seen", num_tokens, torch.int32)
        self._take(num_rows, pad_to_bucket(max(num_sequences, MAX_TOKENS)))
        self.buffers.take("slots", (num_rows,), torch.int64)

    def plan(self, inputs: AttentionInputs, block_size: int) -> CudaPlan:
        """The slots are found on the device where there are none; what else has been filled for the
        step is uploaded first."""
        lens, ends = np.array(inputs.query_lens), np.array(inputs.context_lens)
        num_tokens, longest = int(lens.sum()), int(ends.max())
        starts = lens.cumsum() - lens
        is_single = lens == 1
        is_short = bool(is_single.all()) or (int(lens.max()) <= LONGEST_ROW and num_tokens <= MAX_TOKENS)
        is_recordable = is_short and inputs.last_seen is None
        num_rows = pad_to_bucket(num_tokens) if is_recordable else num_tokens
        self.tables.reserve(len(lens), -(-longest // block_size))
        if (num_ranges := count_ranges(longest)) > self.num_ranges:
            self.num_ranges, self.buffers.generation = num_ranges, self.buffers.generation + 1
        handles = inputs.handles if inputs.handles is not None else range(-len(lens), 0)
        contexts = np.stack(
            [
                ends,
                starts - (ends - lens),
                self.tables.update(handles, inputs.block_tables, inputs.block_lens),
                ends - lens,
            ],
            1,
        )
        by_queries = {
            queries: make_tiles(lens, ends - lens, starts, is_single | is_recordable, queries)
            for queries in {rows_of(heads) // places_of(heads) for heads in self.of_ropes}
        }
        made = [by_queries[rows_of(heads) // places_of(heads)] for heads in self.of_ropes]
        pieces = [made[0].merged, contexts, *(each.tiles for each in made)]
        if is_recordable:
            pieces = [
                np.pad(each, [(0, num_rows - size if axis == along else 0) for axis, size in enumerate(each.shape)])
                for each, along in zip(pieces, (1, 0, *(1 for _ in made)), strict=True)
            ]
        filled = self.buffers.fill("attention plan", np.concatenate([[num_tokens], *pieces], axis=None), torch.int32)
        last_seen = None if inputs.last_seen is None else self.buffers.fill("last seen", inputs.last_seen, torch.int32)
        num_tokens_at, *held = torch.split(filled, [1, *(each.size for each in pieces)])
        merged_at, contexts_at, *tiles_at = (each.view(piece.shape) for each, piece in zip(held, pieces, strict=True))
        slots = inputs.slot_mapping
        if not len(slots):
            slots = self.buffers.take("slots", (num_rows,), torch.int64)
            self.buffers.upload()
            block_kernels.find_slots[(len(lens),)](
                contexts_at,
                self.tables.held,
                slots,
                self.tables.width,
                BLOCK_SIZE=block_size,
                BLOCK=FOUND_AT_ONCE,
                num_warps=4,
            )
        works = tuple(
            AttentionWork(tiles, num_rows if is_recordable else each.num_split, *taken)
            for tiles, each, taken in zip(tiles_at, made, self._take(num_rows, pieces[0].shape[1]), strict=True)
        )
        return CudaPlan(
            works,
            merged_at,
            contexts_at,
            self.tables.held[0],
            self.tables.held[1] if inputs.block_lens is not None else None,
            last_seen,
            num_tokens_at,
            slots,
            block_size,
            inputs.ropes,
            is_recordable,
            inputs.states,
        )

    def _take(self, num_rows: int, num_parts: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The out, parts and stats of each AttentionWork, all in the memory of the widest."""
        num_heads, widest = self.heads.num_heads, max(each.head_dim for each in self.of_ropes)
        parts = num_parts, num_heads, self.num_ranges
        out = self.buffers.take("attention", (num_rows, num_heads * widest), self.dtype).view(-1)
        of_parts = self.buffers.take("attention parts", (*parts, widest), torch.float32).view(-1)
        stats = self.buffers.take("attention stats", (*parts, 2), torch.float32)
        return [
            (
                out[: out.numel() // widest * each.head_dim].view(num_rows, num_heads * each.head_dim),
                of_parts[: of_parts.numel() // widest * each.head_dim].view(*parts, each.head_dim),
                stats,
            )
            for each in self.of_ropes
        ]

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
        heads, work = self.of_ropes[rope], plan.works[rope]
        shape = shape_of(heads, kv, plan.block_size)
        places, rows, dim = places_of(heads), rows_of(heads), max(triton.next_power_of_2(heads.head_dim), 16)
        qkv, gate = split_gate(qkv, heads)
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
        num_heads = heads.num_heads + (2 * heads.num_kv_heads if heads.kv_projections else 0)
        tile = min(HEADS, triton.next_power_of_2(num_heads))
        kernels.rotate_and_write[(len(qkv), triton.cdiv(num_heads, tile))](
            qkv,
            kv,
            scales,
            cos,
            sin,
            plan.slots,
            plan.num_tokens,
            q_norm,
            q_norm if k_norm is None else k_norm,
            eps,
            *strides,
            **shape,
            NUM_HEADS=heads.num_heads,
            ROTARY_DIM=heads.rotary_dim or heads.head_dim,
            NORMS_AFTER_ROTATION=heads.norms_after_rotation,
            KV_PROJECTIONS=heads.kv_projections,
            HAS_VALUE_NORM=heads.has_value_norm,
            HEADS=tile,
            DIM=dim,
            num_warps=warps_of(tile * dim),
            enable_fp_fusion=True,
        )
        num_tiles, num_ranges, window = work.tiles.shape[1], work.parts.shape[2], window or EVERYTHING
        max_splits = min(SPLITS, num_ranges, max(MIN_SPLITS, PROGRAMS // max(work.num_split * heads.num_kv_heads, 1)))
        is_wide = dim > WIDE_HEAD_DIM
        keys = 16 if is_wide else 64 if dim <= 128 and self.dtype.itemsize == 2 else 32
        flat = work.tiles.view(-1)
        for first, count, splits in ((0, work.num_split, max_splits), (work.num_split, num_tiles - work.num_split, 0)):
            if count:
                kernels.attend[(count, heads.num_kv_heads, max(splits, 1))](
                    qkv,
                    kv,
                    scales,
                    flat[first:],
                    plan.contexts,
                    plan.tables,
                    plan.block_lens,
                    plan.last_seen,
                    sinks,
                    work.out,
                    work.parts,
                    work.stats,
                    num_tiles,
                    plan.tables.shape[1],
                    num_ranges,
                    *strides,
                    window,
                    self.scores.scale,
                    self.scores.cap,
                    **shape,
                    NUM_HEADS=heads.num_heads,
                    PROJECTED=heads.num_projected,
                    SHARING=heads.sharing,
                    NUM_BEFORE=heads.num_before,
                    PLACES=places,
                    ROWS=rows,
                    KEYS=keys,
                    DIM=dim,
                    RANGE=RANGE,
                    IS_SPLIT=splits > 0,
                    HAS_CAP=self.scores.cap != 0.0,
                    num_warps=4 if dim <= 128 else 8,
                    num_stages=1 if shape["GROUP"] or is_wide else 2,
                    enable_fp_fusion=False,
                )
        if work.num_split:
            num_parts = plan.merged.shape[1]
            kernels.merge_ranges[(num_parts, heads.num_kv_heads)](
                plan.merged,
                work.parts,
                work.stats,
                sinks,
                work.out,
                num_parts,
                num_ranges,
                window,
                NUM_HEADS=heads.num_heads,
                SHARING=heads.sharing,
                NUM_BEFORE=heads.num_before,
                HEAD_DIM=heads.head_dim,
                PLACES=places,
                DIM=dim,
                RANGE=RANGE,
                num_warps=4,
                enable_fp_fusion=False,
            )
        out = work.out[: len(qkv)]
        return out if gate is None else gate_heads(out, gate)


def places_of(heads: Heads) -> int:
    """The rows of a tile that a query takes."""
    places: int = triton.next_power_of_2(heads.sharing)
    return places


def rows_of(heads: Heads) -> int:
    """The rows of a tile."""
    return ROWS // 2 if heads.head_dim > WIDE_HEAD_DIM else ROWS


def shape_of(heads: Heads, kv: Tensor, block_size: int) -> dict[str, int]:
    """The constants of both kernels that read a layer's cache."""
    row = kv.shape[2] // (heads.num_kv_heads * block_size)
    group = 2 * heads.head_dim // (row - heads.head_dim) if kv.dtype == torch.int8 else 0
    return {
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
        "BLOCK_SIZE": block_size,
        "GROUP": group,
    }
