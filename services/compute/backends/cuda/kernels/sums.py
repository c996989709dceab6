"""The sums of a tile of a product over its inputs, in one function for each form of the weights."""

import triton
import triton.language as tl

from services.compute.backends.cuda.kernels.common import dot


@triton.jit
def multiply_plain(
    x_ptr,
    w_ptr,
    rows,
    is_row,
    columns,
    k,
    first,
    last,
    IS_INT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x [T, k] and w [n, k] in one dtype; of inputs [first, last). Returns [BLOCK_M, BLOCK_N] float32,
    or int32."""
    steps = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows[:, None].to(tl.int64) * k + steps[None, :]
    w_at = w_ptr + columns[None, :].to(tl.int64) * k + steps[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32 if IS_INT else tl.float32)
    for start in range(first, last, BLOCK_K):
        is_in = steps < k - start
        x = tl.load(x_at + start, mask=is_row[:, None] & is_in[None, :], other=0)
        w = tl.load(w_at + start, mask=is_in[:, None], other=0)
        total = dot(x, w, total)
    return total


@triton.jit
def four_bit_values(w_at, is_in, low_values, high_values, FIRST: tl.constexpr):
    """Bytes of two codes, [n, GROUP / 2], to what stands in the table, [n, GROUP] int8: FIRST +
    code, or byte `code` of two words of eight."""
    pairs = tl.load(w_at, mask=is_in, other=0)
    codes = tl.interleave(pairs & 15, pairs >> 4)
    if FIRST is not None:
        return (codes.to(tl.int32) + FIRST).to(tl.int8)
    else:
        words = tl.where(codes < 8, low_values, high_values)
        return (words >> ((codes & 7).to(tl.int64) * 8)).to(tl.int8)


@triton.jit
def multiply_groups(
    x_ptr,
    x_scales_ptr,
    x_sums_ptr,
    w_ptr,
    w_scales_ptr,
    zeros_ptr,
    minima_ptr,
    rows,
    is_row,
    columns,
    k,
    first,
    last,
    w_stride,
    low_values,
    high_values,
    IS_FOUR_BIT: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Int8 x with a scale for each row and group, of inputs [first, last). w: [n, k] int8, or [n, ceil(k / 2)] pairs of
    codes, w_stride from row to row; its scales, zeros and minima: [n, groups].

    (sum of x * value - zero * sum of x) * scale of x * scale + minimum * scale of x * sum of x: the
    first two in int32, exactly. Returns [BLOCK_M, BLOCK_N] float32.
    """
    num_groups = tl.cdiv(k, GROUP)
    steps = tl.arange(0, GROUP)
    half_steps = tl.arange(0, GROUP // 2)
    x_at = x_ptr + rows[:, None].to(tl.int64) * k + steps[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for group in range(first // GROUP, tl.cdiv(last, GROUP)):
        start = group * GROUP
        x = tl.load(x_at + start, mask=is_row[:, None] & (steps < k - start)[None, :], other=0)
        if IS_FOUR_BIT:  # what a last byte's upper half holds is multiplied by 0
            w_at = w_ptr + columns[:, None].to(tl.int64) * w_stride + group * (GROUP // 2) + half_steps[None, :]
            w = four_bit_values(
                w_at, (half_steps < w_stride - group * (GROUP // 2))[None, :], low_values, high_values, FIRST
            )
        else:
            w = tl.load(
                w_ptr + columns[:, None].to(tl.int64) * w_stride + start + steps[None, :],
                mask=(steps < k - start)[None, :],
                other=0,
            )
        exact = dot(x, tl.trans(w), tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32))
        of_row = rows.to(tl.int64) * num_groups + group
        of_column = columns.to(tl.int64) * num_groups + group
        x_scales = tl.load(x_scales_ptr + of_row)
        w_scales = tl.load(w_scales_ptr + of_column).to(tl.float32)
        if zeros_ptr is not None or minima_ptr is not None:
            x_sums = tl.load(x_sums_ptr + of_row)
        if zeros_ptr is not None:
            exact -= x_sums[:, None] * tl.load(zeros_ptr + of_column).to(tl.int32)[None, :]
        total += exact.to(tl.float32) * x_scales[:, None] * w_scales[None, :]
        if minima_ptr is not None:
            minima = tl.load(minima_ptr + of_column).to(tl.float32)
            total += (x_scales * x_sums.to(tl.float32))[:, None] * minima[None, :]
    return total


@triton.jit
def multiply_float8(
    x_ptr,
    x_scales_ptr,
    w_ptr,
    w_scales_ptr,
    rows,
    is_row,
    columns,
    k,
    first,
    last,
    height,
    HAS_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x [T, k] and w [n, k] in e4m3, of inputs [first, last), not scaled yet; or (HAS_BLOCKS) with a scale
    for each BLOCK_K inputs of a row, and of `height` columns.

    Tensor cores add up products of e4m3 in some 14 bits (DeepSeek-AI, "DeepSeek-V3 Technical
    Report", 2024, section 3.3.2): so only BLOCK_K inputs are added there, and what comes of them in
    float32, first to last. Returns [BLOCK_M, BLOCK_N] float32.
    """
    num_groups = tl.cdiv(k, BLOCK_K)
    steps = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows[:, None].to(tl.int64) * k + steps[None, :]
    w_at = w_ptr + columns[None, :].to(tl.int64) * k + steps[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for group in range(first // BLOCK_K, tl.cdiv(last, BLOCK_K)):
        start = group * BLOCK_K
        is_in = steps < k - start
        x = tl.load(x_at + start, mask=is_row[:, None] & is_in[None, :], other=0.0)
        w = tl.load(w_at + start, mask=is_in[:, None], other=0.0)
        part = dot(x, w, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32))
        if HAS_BLOCKS:
            x_scales = tl.load(x_scales_ptr + rows.to(tl.int64) * num_groups + group)
            w_scales = tl.load(w_scales_ptr + (columns // height).to(tl.int64) * num_groups + group)
            part = part * x_scales[:, None] * w_scales[None, :]
        total += part
    return total
