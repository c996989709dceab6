"""Mixtures of experts: which experts a row gets, rows by expert, products of all experts in one launch, and
the weighted sum of their results.

A row and one of its experts are a pair, numbered row by row: pair p is row p // num_active's. The host
knows how many pairs there are, and not whose. So the grids depend on their number alone, and programs
that get no rows end at once.
"""

import triton
import triton.language as tl

from services.compute.backends.cuda.kernels.common import rounded, widened
from services.compute.backends.cuda.kernels.products import TOGETHER, multiply_columns


@triton.jit
def sigmoid(scores):
    """As the softmax of each score and 0."""
    largest = tl.maximum(scores, 0.0)
    power, rest = tl.exp(scores - largest), tl.exp(0.0 - largest)
    return tl.div_rn(power, power + rest)


@triton.jit
def find_groups(
    ranked, num_experts, num_active_groups, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr
):
    """Which of a row's experts, [BLOCK], are in one of the groups whose two best have the largest sums; equal
    ones by rising number."""
    at, groups = tl.arange(0, BLOCK), tl.arange(0, GROUPS)
    group = at // (num_experts // NUM_GROUPS)
    sums = tl.full([GROUPS], float("-inf"), dtype=tl.float32)
    for number in range(NUM_GROUPS):
        own = tl.where(group == number, ranked, float("-inf"))
        best = tl.max(own, 0)
        place = tl.min(tl.where(own == best, at, BLOCK), 0)
        second = tl.max(tl.where(at == place, float("-inf"), own), 0)
        sums = tl.where(groups == number, best + second, sums)
    is_left, is_found = groups < NUM_GROUPS, at < 0
    for _ in range(num_active_groups):
        largest = tl.max(tl.where(is_left, sums, float("-inf")), 0)
        number = tl.min(tl.where(is_left & (sums == largest), groups, GROUPS), 0)
        is_left, is_found = is_left & (groups != number), is_found | (group == number)
    return is_found


@triton.jit
def choose_experts(
    logits_ptr,
    correction_ptr,
    chosen_ptr,
    weights_ptr,
    num_experts,
    num_active,
    num_active_groups,
    scaling,
    HAS_SIGMOID_SCORES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """A row's experts, by falling score, which may be corrected, equal ones by rising number, and their
    scores: shares of the softmax over all, or sigmoids; normalized, they sum to 1; then scaled. A program a
    row, whose whole logits are one block.

    logits: [T, num_experts] float32; correction: [num_experts] float32, or None; chosen, weights: [T,
    num_active] int64 and float32.
    """
    row = tl.program_id(0).to(tl.int64)
    at, kept = tl.arange(0, BLOCK), tl.arange(0, KEPT)
    logits = tl.load(logits_ptr + row * num_experts + at, mask=at < num_experts, other=float("-inf"))
    if HAS_SIGMOID_SCORES:
        scores = sigmoid(logits)
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = tl.div_rn(powers, tl.sum(powers, 0))
    ranked = logits
    if correction_ptr is not None:
        ranked = scores + tl.load(correction_ptr + at, mask=at < num_experts, other=0.0)
    elif NUM_GROUPS > 1:
        ranked = scores
    ranked = tl.where(ranked != ranked, float("-inf"), ranked)  # of such a row weights are NaN
    is_left = at < num_experts
    if NUM_GROUPS > 1:
        is_left = find_groups(ranked, num_experts, num_active_groups, NUM_GROUPS, BLOCK, GROUPS)
    chosen, weights = tl.zeros([KEPT], dtype=tl.int64), tl.zeros([KEPT], dtype=tl.float32)
    total = 0.0
    for rank in range(num_active):
        largest = tl.max(tl.where(is_left, ranked, float("-inf")), 0)
        expert = tl.min(tl.where(is_left & (ranked == largest), at, BLOCK), 0)
        weight = tl.sum(tl.where(at == expert, scores, 0.0), 0)
        total += weight
        chosen, weights = tl.where(kept == rank, expert, chosen), tl.where(kept == rank, weight, weights)
        is_left = is_left & (at != expert)
    if IS_NORMALIZED:
        weights = tl.div_rn(weights, total + 1e-20)  # all sigmoids may be 0
    tl.store(chosen_ptr + row * num_active + kept, chosen, mask=kept < num_active)
    tl.store(weights_ptr + row * num_active + kept, weights * scaling, mask=kept < num_active)


@triton.jit(do_not_specialize=["num_pairs"])
def group_pairs(chosen_ptr, order_ptr, tiles_ptr, num_pairs, first_expert, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sort pairs by expert, and divide each expert's into tiles of ROWS. A program an expert, from
    first_expert on; other experts' pairs are left out.

    chosen: [num_pairs] int64; order: [num_pairs] int32, the pairs of an expert in their order; tiles:
    [num_pairs // ROWS + experts, 3] int32, an expert, counted from first_expert, and its place [begin, end)
    in `order`; begin = end: nothing.

    An expert's tiles begin at (pairs before it) // ROWS + (experts before it). No expert has more tiles than
    lie between its place and the next's. So no program must know how others are divided.
    """
    number = tl.program_id(0)
    expert = first_expert + number
    at = tl.arange(0, BLOCK)
    before, count = tl.zeros([BLOCK], dtype=tl.int32), tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < num_pairs, other=-1)
        before += ((chosen >= first_expert) & (chosen < expert)).to(tl.int32)
        count += (chosen == expert).to(tl.int32)
    begin, num = tl.sum(before, 0), tl.sum(count, 0)
    found = begin
    for start in range(0, num_pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < num_pairs, other=-1)
        is_own = chosen == expert
        tl.store(order_ptr + found - 1 + tl.cumsum(is_own.to(tl.int32), 0), start + at, mask=is_own)
        found += tl.sum(is_own.to(tl.int32), 0)
    tile, last = begin // ROWS + number, (begin + num) // ROWS + number + 1
    if number == tl.num_programs(0) - 1:  # the places of pairs that are left out are after all others
        last = num_pairs // ROWS + tl.num_programs(0)
    for each in range(tile, last):
        at_rows = begin + (each - tile) * ROWS
        tl.store(tiles_ptr + each * 3, number)
        tl.store(tiles_ptr + each * 3 + 1, tl.minimum(at_rows, begin + num))
        tl.store(tiles_ptr + each * 3 + 2, tl.minimum(at_rows + ROWS, begin + num))


@triton.jit(do_not_specialize=["row_tiles"])
def multiply_experts(
    x_ptr,
    x_scales_ptr,
    x_sums_ptr,
    w_ptr,
    w_scales_ptr,
    zeros_ptr,
    minima_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    row_tiles,
    pairs_per_row,
    n,
    k,
    w_stride,
    height,
    w_size,
    scales_size,
    bias_size,
    low_values,
    high_values,
    FORM: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [pairs, n]: what `multiply` makes of each pair's row of x, p // pairs_per_row, with its expert's
    weights; without a residual. Pairs that are in no tile are not written.

    w, and all that belongs to it, is of all experts, one after the other: w_size, scales_size, bias_size
    numbers each; order, tiles: group_pairs' for ROWS = BLOCK_M.
    """
    column_tiles = tl.cdiv(n, BLOCK_N)
    number = tl.program_id(0)
    row_tile, column_tile = tl.swizzle2d(
        number // column_tiles, number % column_tiles, row_tiles, column_tiles, TOGETHER
    )
    expert, begin, end = (
        tl.load(tiles_ptr + row_tile * 3).to(tl.int64),
        tl.load(tiles_ptr + row_tile * 3 + 1),
        tl.load(tiles_ptr + row_tile * 3 + 2),
    )
    if begin < end:
        places = begin + tl.arange(0, BLOCK_M)
        is_row = places < end
        pairs = tl.load(order_ptr + places, mask=is_row, other=0)
        all_columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        w_at, scales_at, zeros_at, minima_at, bias_at = (
            w_ptr + expert * w_size,
            w_scales_ptr,
            zeros_ptr,
            minima_ptr,
            bias_ptr,
        )
        if w_scales_ptr is not None:
            scales_at = w_scales_ptr + expert * scales_size
        if zeros_ptr is not None:
            zeros_at = zeros_ptr + expert * scales_size
        if minima_ptr is not None:
            minima_at = minima_ptr + expert * scales_size
        if bias_ptr is not None:
            bias_at = bias_ptr + expert * bias_size
        total = multiply_columns(
            x_ptr,
            x_scales_ptr,
            x_sums_ptr,
            w_at,
            scales_at,
            zeros_at,
            minima_at,
            bias_at,
            pairs // pairs_per_row,
            is_row,
            all_columns % n,
            n,
            k,
            k,
            w_stride,
            height,
            low_values,
            high_values,
            FORM,
            FIRST,
            GROUP,
            ACTIVATION,
            False,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        tl.store(
            out_ptr + pairs[:, None].to(tl.int64) * n + all_columns[None, :],
            rounded(total, out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (all_columns < n)[None, :],
        )


@triton.jit
def add_experts(
    x_ptr,
    results_ptr,
    weights_ptr,
    shared_ptr,
    score_ptr,
    out_ptr,
    num_active,
    hidden,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x, or 0, and a row's results times their weights, in float32, the first expert first; then `shared`,
    if there is one, times the sigmoid of its score, if it has one.

    x, shared, out: [T, hidden]; results: [T, num_active, hidden]; weights: [T, num_active] float32; score:
    [T] float32.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < hidden
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_RESIDUAL:
        total += widened(tl.load(x_ptr + row * hidden + at, mask=is_in, other=0.0))
    for rank in range(num_active):
        pair = row * num_active + rank
        total += tl.load(weights_ptr + pair) * widened(tl.load(results_ptr + pair * hidden + at, mask=is_in, other=0.0))
    if shared_ptr is not None:
        result = widened(tl.load(shared_ptr + row * hidden + at, mask=is_in, other=0.0))
        if score_ptr is not None:
            result = sigmoid(tl.load(score_ptr + row)) * result
        total += result
    tl.store(out_ptr + row * hidden + at, rounded(total, out_ptr.dtype.element_ty), mask=is_in)
