"""What several kernels need: products of tiles, rounding, functions that the language lacks."""

import triton
import triton.language as tl

# On a CPU, in numpy. That has no bfloat16, and the interpreter rounds to it by cutting off bits: so it is rounded in bits here.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def widened(x):
    """x in float32."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x, float32, to the nearest of dtype, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, total):
    """total + a b. a: [m, k]; b: [k, n]; total: [m, n] float32, or int32 where a and b are int8. In float32 nothing is rounded to fewer bits before."""
    if INTERPRETED and a.dtype != tl.int8:  # numpy adds up in an order that depends on where a row is: in float64 that can't be seen
        wide_a, wide_b = widened(a).to(tl.float64), widened(b).to(tl.float64)
        return tl.dot(wide_a, wide_b, total.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    elif a.dtype == tl.int8:
        return tl.dot(a, b, total, out_dtype=tl.int32)
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def nearest(x):
    """The nearest integer, ties to even, of numbers below 2^22: beyond 1.5 * 2^23 float32 has no fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr):
    """Along an axis; NaN where there is one."""
    is_nan = x != x
    largest = tl.max(tl.where(is_nan, 0.0, tl.abs(x)), AXIS)
    return tl.where(tl.max(is_nan.to(tl.int32), AXIS) > 0, float("nan"), largest)
