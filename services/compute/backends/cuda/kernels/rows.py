"""Rows between the products: RMSNorm, residual and quantization in one pass, a program a row; and
the end of the logits.

A row's sum is over one block that holds it whole, in an order that depends on its length alone.
"""

import triton
import triton.language as tl

from services.compute.backends.cuda.kernels.common import largest_magnitude, nearest, rounded, tanh, widened


@triton.jit
def prepare_rows(
    h_ptr,
    x_ptr,
    norm_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    sums_ptr,
    stride,
    k,
    eps,
    multiplier,
    scale,
    num_groups,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = x + multiplier * norm(h), x and norm may be None; rounded, times a scale (GROUP 0), or by
    groups of GROUP inputs in int8, or in e4m3 if sums is None.

    h, out: [T, k], stride from row to row; x: [T, k]; norm: [k]; codes: [T, k] int8 or e4m3;
    scales: [T, num_groups] float32; sums: [T, num_groups] int32, of each group's codes in int8. As
    in reference.py, a normalized value is rounded to h's dtype before its weight, and after it.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_in = at < k
    h = tl.load(h_ptr + row * stride + at, mask=is_in, other=0.0)
    y = widened(h)
    if norm_ptr is not None:
        weight = widened(tl.load(norm_ptr + at, mask=is_in, other=0.0))
        normed = widened(rounded(y * tl.rsqrt(tl.sum(y * y, 0) / k + eps), h.dtype))
        y = widened(rounded(normed * weight, h.dtype))
    if x_ptr is not None:
        y = widened(tl.load(x_ptr + row * k + at, mask=is_in, other=0.0)) + y * multiplier
    if GROUP == 0:
        tl.store(out_ptr + row * stride + at, rounded(widened(rounded(y, h.dtype)) * scale, h.dtype), mask=is_in)
    else:
        IS_FLOAT: tl.constexpr = sums_ptr is None
        LARGEST: tl.constexpr = 448.0 if IS_FLOAT else 127.0  # of a code
        groups = tl.reshape(y, [BLOCK // GROUP, GROUP])
        group = tl.arange(0, BLOCK // GROUP)
        largest = largest_magnitude(groups, 1)
        factor = tl.where(largest > 0, tl.div_rn(LARGEST, tl.where(largest > 0, largest, 1.0)), 0.0)
        tl.store(scales_ptr + row * num_groups + group, tl.div_rn(largest, LARGEST), mask=group < num_groups)
        if IS_FLOAT:  # a NaN stays one
            values = groups * tl.minimum(factor, 3.4028234663852886e38)[:, None]
            tl.store(codes_ptr + row * k + at, rounded(tl.reshape(values, [BLOCK]), tl.float8e4nv), mask=is_in)
        else:
            codes = nearest(tl.where(groups != groups, 0.0, groups) * factor[:, None])
            codes = tl.where(codes != codes, 0.0, codes).to(tl.int32)
            tl.store(codes_ptr + row * k + at, tl.reshape(codes, [BLOCK]).to(tl.int8), mask=is_in)
            tl.store(sums_ptr + row * num_groups + group, tl.sum(codes, 1), mask=group < num_groups)


@triton.jit(do_not_specialize=["size"])
def finish_logits(logits_ptr, size, multiplier, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """cap * tanh(multiplier * logit / cap), in place. logits: [size] float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + at, mask=at < size) * multiplier
    if HAS_CAP:
        logits = tanh(logits / cap) * cap
    tl.store(logits_ptr + at, logits, mask=at < size)
