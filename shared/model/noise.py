"""Noise: the numbers that decide draws, each a function of seed, position and token id alone.

Philox makes 64 bits of a seed and a position. From there SplitMix64 (Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014) counts to the token: token t takes its
output t + 1, and the tail, which is all tokens beyond a list, its output 0. So any token's noise is
found without the others', and two rows of logits that list other tokens share what they have in
common.

The bits of the noise decide tokens, so they must be the same everywhere. `log` uses IEEE 754's
basic operations on float64, each rounded once, and 64-bit integers: the C++ (backends/cpu/draw.cpp)
and the Triton (backends/cuda/kernels/search.py) do the same operations in the same order, and no
compiler may fuse a multiplication with an addition.
"""

import numpy as np

from shared.model.arrays import Array

TOKEN, XTC, TAIL = 0, 1, 2  # what a number decides: the token; whether XTC is applied; the token of a tail
TAIL_ID = -1  # stands for a token id: the tail's

_PHILOX = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_GAMMA, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
_12, _ONE = np.uint64(12), np.uint64(0x3FF0000000000000)  # _ONE: the bits of 1.0
_BELOW_ONE = 1.0 - 2.0**-53

_ROOT_HALF = np.int64(0x3FE6A09E667F3BCD)  # the bits of the square root of 1/2
_52 = np.int64(52)
LN_2 = 0.6931471805599453
ATANH = tuple(1.0 / n for n in range(21, 1, -2))  # of atanh(s) / s in s * s, without the first, which is 1


def philox(counter: Array, key: Array) -> Array:
    """Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3" (SC 2011), section 3.3.

    counter: [4, n] and key: [2, n], uint64 holding 32-bit words. Returns [4, n] of the same form.
    """
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _ROUNDS * _WEYL) & _LOW:
        product = even * _PHILOX
        even, odd = (product >> _32)[::-1] ^ odd ^ round_key, (product & _LOW)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def row_bits(seeds: Array, positions: Array, purpose: int) -> Array:
    """64 random bits for each (seed, position). seeds: [n] uint64; positions: [n] int32. Returns
    [n] uint64.

    purpose: what they decide. The bits of different purposes have nothing to do with one another.
    """
    seeds = seeds.astype(np.uint64)
    counter = np.zeros((4, len(seeds)), np.uint64)
    counter[0] = positions
    counter[1] = purpose
    words = philox(counter, np.stack([seeds & _LOW, seeds >> _32]))
    bits: Array = words[0] << _32 | words[1]
    return bits


def token_bits(states: Array, token_ids: Array) -> Array:
    """64 random bits for each token. states: [R] uint64, row_bits; token_ids: [R, K], TAIL_ID among
    them. Returns [R, K] uint64."""
    z = (token_ids.astype(np.int64, copy=False) + 1).view(np.uint64)
    z *= _GAMMA
    z += states[:, None]
    z ^= z >> _30
    z *= _MIX_1
    z ^= z >> _27
    z *= _MIX_2
    z ^= z >> _31
    return z


def unit(bits: Array) -> Array:
    """The upper 52 bits as a number in the open interval (0, 1): (b + 1/2) / 2^52.
    uint64 to float64."""
    words = bits >> _12
    words |= _ONE
    uniform: Array = words.view(np.float64)
    uniform -= _BELOW_ONE
    return uniform


def uniform(seeds: Array, positions: Array, purpose: int) -> Array:
    """One number between 0 and 1 for each (seed, position). Returns [n] float64."""
    return unit(row_bits(seeds, positions, purpose))


def log(x: Array) -> Array:
    """The natural logarithm, to within 2 units in the last place. x: float64, normal and above 0.

    x is 2^k m with m from sqrt(1/2) to sqrt(2), and ln m = 2 atanh(s) with s = (m - 1) / (m + 1),
    at most 0.172: ten terms of atanh's series beyond the first are enough.
    """
    bits = np.ascontiguousarray(x).view(np.int64)
    k = (bits - _ROOT_HALF) >> _52
    m = (bits - (k << _52)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = np.full_like(z, ATANH[0])
    for coefficient in ATANH[1:]:
        p = p * z + coefficient
    s = s + s
    logarithm: Array = k * LN_2 + (s + s * (z * p))
    return logarithm


def gumbel(u: Array) -> Array:
    """Standard Gumbel noise of uniform numbers from `unit`: -ln(-ln u), from -3.6 to 36.7."""
    noise: Array = -log(-log(u))
    return noise
