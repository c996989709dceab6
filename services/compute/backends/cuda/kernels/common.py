"""Functions that several kernels need: products of tiles, rounding, functions that the language
lacks."""

import triton
import triton.language as tl

# On a CPU, in numpy. That has no bfloat16, and the interpreter rounds to it by cutting off bits: so
# it is rounded in bits here.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def widened(x):
    """x in float32."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif INTERPRETED and x.dtype == tl.float8e4nv:  # exponents count from 7 there, from 127 here
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint32)
        # 2^120
        wide = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), wide)
    else:
        return x.to(tl.float32)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x, float32, to the nearest of dtype, ties to even. dtype e4m3: to the largest, what is beyond
    it."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif INTERPRETED and dtype == tl.float8e4nv:  # steps of 2^-9 up to 2^-6, then three bits behind the first
        size = tl.minimum(tl.abs(tl.where(x != x, 0.0, x)), 448.0)
        small = ((size + 24576.0) - 24576.0) * 512.0  # 1.5 * 2^23 steps: see nearest
        bits = size.to(tl.uint32, bitcast=True)
        large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        code = tl.where(x != x, 0x7F, tl.where(size < 0.015625, small.to(tl.uint32), large)) | (
            (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
        )
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, total):
    """total + a b. a: [m, k]; b: [k, n]; total: [m, n] float32, or int32 where a and b are int8. In
    float32 nothing is rounded to fewer bits before; of e4m3 tensor cores add up in fewer bits than
    float32 has: see multiply_float8."""
    # numpy adds up in an order that depends on where a row is: in float64 that can't be seen
    if INTERPRETED and a.dtype != tl.int8:
        wide_a, wide_b = widened(a).to(tl.float64), widened(b).to(tl.float64)
        return tl.dot(wide_a, wide_b, total.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    elif a.dtype == tl.int8:
        return tl.dot(a, b, total, out_dtype=tl.int32)
    elif (
        a.dtype == tl.float8e4nv
    ):  # with a bound of imprecise sums, the compiler does not draw what is added to the product into it
        return tl.dot(a, b, total, max_num_imprecise_acc=a.shape[1])
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def nearest(x):
    """The nearest integer, ties to even, of numbers below 2^22: beyond 1.5 * 2^23 float32 has no
    fractions."""
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
