"""Rows between the products: RMSNorm, residual and quantization in one pass, a program a row; and the end of the logits.

A row's sum is over one block that holds it whole, in an order that depends on its length alone.
"""

import triton
import triton.language as tl

from services.compute.backends.cuda.kernels.common import largest_magnitude, nearest, rounded, tanh, widened


@triton.jit
def prepare_rows(
    h_ptr, x_ptr, norm_ptr, out_ptr, codes_ptr, scales_ptr, sums_ptr, stride, k, eps, multiplier, num_groups, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y = x + multiplier * norm(h), of which x and norm may be None; either as it is, or in int8 by groups of GROUP inputs (0: as it is).

    h, out: [T, k], stride from row to row; x: [T, k]; norm: [k]; codes: [T, k] int8; scales: [T, num_groups] float32; sums: [T, num_groups] int32, of each
    group's codes. As in reference.py, a normalized value is rounded to h's dtype before its weight, and after it.
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
        tl.store(out_ptr + row * stride + at, rounded(y, h.dtype), mask=is_in)
    else:
        groups = tl.reshape(y, [BLOCK // GROUP, GROUP])
        largest = largest_magnitude(groups, 1)
        factor = tl.where(largest > 0, tl.div_rn(127.0, tl.where(largest > 0, largest, 1.0)), 0.0)
        codes = nearest(tl.where(groups != groups, 0.0, groups) * factor[:, None])
        codes = tl.where(codes != codes, 0.0, codes).to(tl.int32)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(codes_ptr + row * k + at, tl.reshape(codes, [BLOCK]).to(tl.int8), mask=is_in)
        tl.store(scales_ptr + row * num_groups + group, tl.div_rn(largest, 127.0), mask=group < num_groups)
        tl.store(sums_ptr + row * num_groups + group, tl.sum(codes, 1), mask=group < num_groups)


@triton.jit
def finish_logits(logits_ptr, size, multiplier, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """cap * tanh(multiplier * logit / cap), in place. logits: [size] float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + at, mask=at < size) * multiplier
    if HAS_CAP:
        logits = tanh(logits / cap) * cap
    tl.store(logits_ptr + at, logits, mask=at < size)
