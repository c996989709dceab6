"""Linear layers: x @ weight.T, with weights dense, in int8 by output column, in groups of inputs,
or in FP8; bias, gate and residual in the epilogue.

A program makes one tile of the result. Each sum goes over the inputs from first to last; in a
narrow layer, over each part of the inputs, and then over the parts, whether one program has all
parts or each has one. So a row's result does not depend on how many rows there are, and nothing is
compiled for their number. Sums of int8 products are exact in int32, a group's result is then added
in float32, group after group.
"""

import triton
import triton.language as tl

from services.compute.backends.cuda.kernels.common import rounded, tanh, widened
from services.compute.backends.cuda.kernels.sums import multiply_float8, multiply_groups, multiply_plain

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
def sum_inputs(
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
    height,
    low_values,
    high_values,
    FORM: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sums of products of inputs [first, last), without the scales of whole rows and columns. is_row:
    [BLOCK_M], which of the rows are read. Returns [BLOCK_M, BLOCK_N] float32, or int32 (COLUMNS)."""
    if FORM == DENSE:
        return multiply_plain(x_ptr, w_ptr, rows, is_row, columns, k, first, last, False, BLOCK_M, BLOCK_N, BLOCK_K)
    elif FORM == COLUMNS:
        return multiply_plain(x_ptr, w_ptr, rows, is_row, columns, k, first, last, True, BLOCK_M, BLOCK_N, BLOCK_K)
    elif FORM >= FLOAT8:
        return multiply_float8(
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
            FORM == FLOAT8_BLOCKS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
    else:
        return multiply_groups(
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
            FORM == FOUR_BIT,
            FIRST,
            GROUP,
            BLOCK_M,
            BLOCK_N,
        )


@triton.jit
def multiply_tile(
    x_ptr,
    x_scales_ptr,
    x_sums_ptr,
    w_ptr,
    w_scales_ptr,
    zeros_ptr,
    minima_ptr,
    bias_ptr,
    rows,
    is_row,
    columns,
    k,
    span,
    w_stride,
    height,
    low_values,
    high_values,
    FORM: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows and columns of the product, scaled, with the bias. HAS_PARTS: the sum is over the sums of each
    `span` inputs. Returns [BLOCK_M, BLOCK_N] float32."""
    total = sum_inputs(
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
        0,
        span if HAS_PARTS else k,
        w_stride,
        height,
        low_values,
        high_values,
        FORM,
        FIRST,
        GROUP,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_PARTS:
        for first in range(span, k, span):
            total += sum_inputs(
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
                tl.minimum(first + span, k),
                w_stride,
                height,
                low_values,
                high_values,
                FORM,
                FIRST,
                GROUP,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
    total = total.to(tl.float32)
    if (FORM == COLUMNS) | (FORM == FLOAT8):
        total = total * tl.load(x_scales_ptr + rows)[:, None] * tl.load(w_scales_ptr + columns)[None, :]
    if bias_ptr is not None:
        total += widened(tl.load(bias_ptr + columns))[None, :]
    return total


@triton.jit
def multiply_columns(
    x_ptr,
    x_scales_ptr,
    x_sums_ptr,
    w_ptr,
    w_scales_ptr,
    zeros_ptr,
    minima_ptr,
    bias_ptr,
    rows,
    is_row,
    columns,
    n,
    k,
    span,
    w_stride,
    height,
    low_values,
    high_values,
    FORM: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows and columns of the product, or, gated by it, of the product of the columns from n on
    (ACTIVATION: one of reference.ACTIVATIONS, or None: no gate). Returns [BLOCK_M, BLOCK_N]
    float32."""
    total = multiply_tile(
        x_ptr,
        x_scales_ptr,
        x_sums_ptr,
        w_ptr,
        w_scales_ptr,
        zeros_ptr,
        minima_ptr,
        bias_ptr,
        rows,
        is_row,
        columns,
        k,
        span,
        w_stride,
        height,
        low_values,
        high_values,
        FORM,
        FIRST,
        GROUP,
        HAS_PARTS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if ACTIVATION is not None:
        up = multiply_tile(
            x_ptr,
            x_scales_ptr,
            x_sums_ptr,
            w_ptr,
            w_scales_ptr,
            zeros_ptr,
            minima_ptr,
            bias_ptr,
            rows,
            is_row,
            columns + n,
            k,
            span,
            w_stride,
            height,
            low_values,
            high_values,
            FORM,
            FIRST,
            GROUP,
            HAS_PARTS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        total = gated(total, up, ACTIVATION)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x_ptr,
    x_scales_ptr,
    x_sums_ptr,
    w_ptr,
    w_scales_ptr,
    zeros_ptr,
    minima_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    n,
    k,
    span,
    w_stride,
    height,
    low_values,
    high_values,
    FORM: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [num_rows, n]: multiply_columns, plus the residual. Rounded once, to out's dtype."""
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    number = tl.program_id(0)
    row_tile, column_tile = tl.swizzle2d(
        number // column_tiles, number % column_tiles, row_tiles, column_tiles, TOGETHER
    )
    all_rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    all_columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies beyond is computed from something else, and not stored; of rows that are not there
    # nothing is read: of one row a tile would be twice its weights
    rows, is_row, columns = all_rows % num_rows, all_rows < num_rows, all_columns % n
    total = multiply_columns(
        x_ptr,
        x_scales_ptr,
        x_sums_ptr,
        w_ptr,
        w_scales_ptr,
        zeros_ptr,
        minima_ptr,
        bias_ptr,
        rows,
        is_row,
        columns,
        n,
        k,
        span,
        w_stride,
        height,
        low_values,
        high_values,
        FORM,
        FIRST,
        GROUP,
        ACTIVATION,
        HAS_PARTS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    store_tile(total, residual_ptr, out_ptr, all_rows, all_columns, num_rows, n)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_part(
    x_ptr,
    x_scales_ptr,
    x_sums_ptr,
    w_ptr,
    w_scales_ptr,
    zeros_ptr,
    minima_ptr,
    out_ptr,
    num_rows,
    n,
    k,
    span,
    w_stride,
    height,
    low_values,
    high_values,
    FORM: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [parts, num_rows, n], float32 or int32: sum_inputs of each `span` inputs. A program has one tile
    of one part; for finish_product."""
    column_tiles, part = tl.cdiv(n, BLOCK_N), tl.program_id(1)
    all_rows = tl.program_id(0) // column_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    all_columns = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, is_row, columns = all_rows % num_rows, all_rows < num_rows, all_columns % n
    total = sum_inputs(
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
        part * span,
        tl.minimum((part + 1) * span, k),
        w_stride,
        height,
        low_values,
        high_values,
        FORM,
        FIRST,
        GROUP,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    store_tile(total, None, out_ptr + part.to(tl.int64) * num_rows * n, all_rows, all_columns, num_rows, n)


@triton.jit(do_not_specialize=["num_rows"])
def finish_product(
    product_ptr,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    n,
    num_parts,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Finish sums from elsewhere as `multiply` finishes its own: product [num_parts, num_rows, n], or
    [num_parts, num_rows, 2 n] with a gate, int32 or float; a scale for each row and column, or
    none."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = read_product(
        product_ptr,
        x_scales_ptr,
        w_scales_ptr,
        bias_ptr,
        rows,
        columns,
        n,
        num_rows,
        n,
        num_parts,
        1 if ACTIVATION is None else 2,
    )
    if ACTIVATION is not None:
        up = read_product(
            product_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, rows, columns + n, 2 * n, num_rows, n, num_parts, 2
        )
        total = gated(total, up, ACTIVATION)
    store_tile(total, residual_ptr, out_ptr, rows, columns, num_rows, n)


@triton.jit
def read_product(
    product_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, rows, columns, end, num_rows, n, num_parts, HALVES: tl.constexpr
):
    """Finish some columns, before `end`, of a product [num_parts, num_rows, HALVES * n]: the sum of its
    parts, first to last, scaled, with the bias. Returns float32."""
    is_row, is_column = rows < num_rows, columns < end
    at, is_in = (
        product_ptr + rows[:, None].to(tl.int64) * (HALVES * n) + columns[None, :],
        is_row[:, None] & is_column[None, :],
    )
    product = tl.load(at, mask=is_in, other=0)
    for _ in range(1, num_parts):
        at += num_rows * (HALVES * n)
        product += tl.load(at, mask=is_in, other=0)
    total = widened(product)
    if x_scales_ptr is not None:
        total = (
            total
            * tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)[:, None]
            * tl.load(w_scales_ptr + columns, mask=is_column, other=0.0)[None, :]
        )
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
    tl.store(out_ptr + at, total if total.dtype == tl.int32 else rounded(total, out_ptr.dtype.element_ty), mask=is_in)
