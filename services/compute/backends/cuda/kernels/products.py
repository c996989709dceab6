"""Linear layers: x @ weight.T, with weights dense, in int8 by output column, in groups of inputs,
or in FP8; bias, gate and residual in the epilogue.

A program makes one tile of the result. Each sum goes over the inputs from first to last, and no
program divides it: what a row gets does not depend on how many rows there are, and nothing is
compiled for their number. Sums of int8 products are exact in int32, a group's result is then added
in float32, group after group.
"""

import triton
import triton.language as tl

from services.compute.backends.cuda.kernels.common import dot, rounded, tanh, widened

DENSE = tl.constexpr(0)
COLUMNS = tl.constexpr(1)
GROUPS = tl.constexpr(2)  # of int8
FOUR_BIT = tl.constexpr(3)  # codes in groups, two a byte, the lower half first
FLOAT8 = tl.constexpr(4)  # by output column
FLOAT8_BLOCKS = tl.constexpr(5)  # of some outputs and a group of inputs each

# tiles of rows that come one after the other for each tile of columns, while its weights are in the
# cache
TOGETHER = tl.constexpr(8)


@triton.jit
def multiply_plain(x_ptr, w_ptr, rows, is_row, columns, k, IS_INT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """x [T, k] and w [n, k] in one dtype. Returns [BLOCK_M, BLOCK_N] float32, or int32."""
    steps = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows[:, None].to(tl.int64) * k + steps[None, :]
    w_at = w_ptr + columns[None, :].to(tl.int64) * k + steps[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32 if IS_INT else tl.float32)
    for start in range(0, k, BLOCK_K):
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
    x_ptr, x_scales_ptr, x_sums_ptr, w_ptr, w_scales_ptr, zeros_ptr, minima_ptr, rows, is_row, columns, k, w_stride, low_values, high_values,
    IS_FOUR_BIT: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Int8 x with a scale for each row and group. w: [n, k] int8, or [n, ceil(k / 2)] pairs of
    codes, w_stride from row to row; its scales, zeros and minima: [n, groups].

    (sum of x * value - zero * sum of x) * scale of x * scale + minimum * scale of x * sum of x: the
    first two in int32, exactly. Returns [BLOCK_M, BLOCK_N] float32.
    """
    num_groups = tl.cdiv(k, GROUP)
    steps = tl.arange(0, GROUP)
    half_steps = tl.arange(0, GROUP // 2)
    x_at = x_ptr + rows[:, None].to(tl.int64) * k + steps[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for group in range(num_groups):
        start = group * GROUP
        x = tl.load(x_at + start, mask=is_row[:, None] & (steps < k - start)[None, :], other=0)
        if IS_FOUR_BIT:  # what a last byte's upper half holds is multiplied by 0
            w_at = w_ptr + columns[:, None].to(tl.int64) * w_stride + group * (GROUP // 2) + half_steps[None, :]
            w = four_bit_values(w_at, (half_steps < w_stride - group * (GROUP // 2))[None, :], low_values, high_values, FIRST)
        else:
            w = tl.load(w_ptr + columns[:, None].to(tl.int64) * w_stride + start + steps[None, :], mask=(steps < k - start)[None, :], other=0)
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
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, rows, is_row, columns, k, height,
    HAS_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x [T, k] and w [n, k] in e4m3, with a scale for each row and each column; or (HAS_BLOCKS) for
    each BLOCK_K inputs of a row, and of `height` columns.

    Tensor cores add up products of e4m3 in some 14 bits (DeepSeek-AI, "DeepSeek-V3 Technical
    Report", 2024, section 3.3.2): so only BLOCK_K inputs are added there, and what comes of them in
    float32, first to last. Returns [BLOCK_M, BLOCK_N] float32.
    """
    num_groups = tl.cdiv(k, BLOCK_K)
    steps = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows[:, None].to(tl.int64) * k + steps[None, :]
    w_at = w_ptr + columns[None, :].to(tl.int64) * k + steps[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for group in range(num_groups):
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
    if HAS_BLOCKS:
        return total
    else:
        return total * tl.load(x_scales_ptr + rows)[:, None] * tl.load(w_scales_ptr + columns)[None, :]


@triton.jit
def multiply_tile(
    x_ptr, x_scales_ptr, x_sums_ptr, w_ptr, w_scales_ptr, zeros_ptr, minima_ptr, bias_ptr, rows, is_row, columns, k, w_stride, height,
    low_values, high_values,
    FORM: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows and columns of the product, with the bias. is_row: [BLOCK_M], which of the rows are
    read. Returns [BLOCK_M, BLOCK_N] float32."""
    if FORM == DENSE:
        total = multiply_plain(x_ptr, w_ptr, rows, is_row, columns, k, False, BLOCK_M, BLOCK_N, BLOCK_K)
    elif FORM == COLUMNS:
        exact = multiply_plain(x_ptr, w_ptr, rows, is_row, columns, k, True, BLOCK_M, BLOCK_N, BLOCK_K)
        total = exact.to(tl.float32) * tl.load(x_scales_ptr + rows)[:, None] * tl.load(w_scales_ptr + columns)[None, :]
    elif FORM >= FLOAT8:
        total = multiply_float8(
            x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, rows, is_row, columns, k, height, FORM == FLOAT8_BLOCKS, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
    else:
        total = multiply_groups(
            x_ptr, x_scales_ptr, x_sums_ptr, w_ptr, w_scales_ptr, zeros_ptr, minima_ptr, rows, is_row, columns, k, w_stride, low_values, high_values,
            FORM == FOUR_BIT, FIRST, GROUP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if bias_ptr is not None:
        total += widened(tl.load(bias_ptr + columns))[None, :]
    return total


@triton.jit
def multiply_columns(
    x_ptr, x_scales_ptr, x_sums_ptr, w_ptr, w_scales_ptr, zeros_ptr, minima_ptr, bias_ptr, rows, is_row, columns, n, k, w_stride, height,
    low_values, high_values,
    FORM: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows and columns of the product, or, gated by it, of the product of the columns from n on
    (ACTIVATION: one of reference.ACTIVATIONS, or None: no gate). Returns [BLOCK_M, BLOCK_N]
    float32."""
    total = multiply_tile(
        x_ptr, x_scales_ptr, x_sums_ptr, w_ptr, w_scales_ptr, zeros_ptr, minima_ptr, bias_ptr, rows, is_row, columns, k, w_stride, height,
        low_values, high_values, FORM, FIRST, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if ACTIVATION is not None:
        up = multiply_tile(
            x_ptr, x_scales_ptr, x_sums_ptr, w_ptr, w_scales_ptr, zeros_ptr, minima_ptr, bias_ptr, rows, is_row, columns + n, k, w_stride, height,
            low_values, high_values, FORM, FIRST, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = gated(total, up, ACTIVATION)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x_ptr, x_scales_ptr, x_sums_ptr, w_ptr, w_scales_ptr, zeros_ptr, minima_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, n, k, w_stride, height,
    low_values, high_values,
    FORM: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [num_rows, n]: multiply_columns, plus the residual. Rounded once, to out's dtype."""
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    number = tl.program_id(0)
    row_tile, column_tile = tl.swizzle2d(number // column_tiles, number % column_tiles, row_tiles, column_tiles, TOGETHER)
    all_rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    all_columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies beyond is computed from something else, and not stored; of rows that are not there
    # nothing is read: of one row a tile would be twice its weights
    rows, is_row, columns = all_rows % num_rows, all_rows < num_rows, all_columns % n
    total = multiply_columns(
        x_ptr, x_scales_ptr, x_sums_ptr, w_ptr, w_scales_ptr, zeros_ptr, minima_ptr, bias_ptr, rows, is_row, columns, n, k, w_stride, height,
        low_values, high_values, FORM, FIRST, GROUP, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    store_tile(total, residual_ptr, out_ptr, all_rows, all_columns, num_rows, n)


@triton.jit(do_not_specialize=["num_rows"])
def finish_product(
    product_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, n,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finish sums from elsewhere as `multiply` finishes its own: product [num_rows, n], or
    [num_rows, 2 n] with a gate, int32 or float; a scale for each row and column, or none."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = read_product(product_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, rows, columns, n, num_rows, n, 1 if ACTIVATION is None else 2)
    if ACTIVATION is not None:
        up = read_product(product_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, rows, columns + n, 2 * n, num_rows, n, 2)
        total = gated(total, up, ACTIVATION)
    store_tile(total, residual_ptr, out_ptr, rows, columns, num_rows, n)


@triton.jit
def read_product(product_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, rows, columns, end, num_rows, n, HALVES: tl.constexpr):
    """Finish some columns, before `end`, of a product [num_rows, HALVES * n], scaled, with the
    bias. Returns float32."""
    is_row, is_column = rows < num_rows, columns < end
    product = tl.load(product_ptr + rows[:, None].to(tl.int64) * (HALVES * n) + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0)
    total = widened(product)
    if x_scales_ptr is not None:
        total = total * tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)[:, None] * tl.load(w_scales_ptr + columns, mask=is_column, other=0.0)[None, :]
    if bias_ptr is not None:
        total += widened(tl.load(bias_ptr + columns, mask=is_column, other=0.0))[None, :]
    return total


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """reference.gated of float32."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        gate = tl.minimum(gate, 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)


@triton.jit
def store_tile(total, residual_ptr, out_ptr, rows, columns, num_rows, n):
    """total + residual, rounded to out's dtype. residual, out: [num_rows, n]."""
    at = rows[:, None].to(tl.int64) * n + columns[None, :]
    is_in = (rows < num_rows)[:, None] & (columns < n)[None, :]
    if residual_ptr is not None:
        total += widened(tl.load(residual_ptr + at, mask=is_in, other=0.0))
    tl.store(out_ptr + at, rounded(total, out_ptr.dtype.element_ty), mask=is_in)
