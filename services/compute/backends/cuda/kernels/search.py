"""Rows of logits: without what a mask leaves out, the k largest by their keys, the mass of all, and
the draw from both.

A key is an int64 that is the larger the higher the logit, and of equal logits the smaller the token
id: so the order is total, and any way of sorting gives the same.
"""

import triton
import triton.language as tl


@triton.jit
def ban_logits(logits_ptr, rows_ptr, masks_ptr, vocab_size, num_words, BLOCK: tl.constexpr):
    """Add minus infinity to the logits of some rows [n] whose bits are not set in masks, [n, num_words]
    int32: of token t bit t % 32 of word t // 32. logits: [R, vocab_size] float32, in place."""
    number = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + number)
    words = tl.load(masks_ptr + number * num_words + at // 32, mask=at < vocab_size, other=-1)
    is_banned = ((words >> (at % 32)) & 1) == 0
    logits = tl.load(logits_ptr + row * vocab_size + at, mask=is_banned, other=0.0)
    tl.store(logits_ptr + row * vocab_size + at, logits + float("-inf"), mask=is_banned)


@triton.jit
def largest_logits(logits_ptr, keys_ptr, vocab_size, num_chunks, CHUNK: tl.constexpr, KEPT: tl.constexpr):
    """The KEPT largest keys of each chunk of a row. logits: [R, vocab_size] float32; keys: [R,
    num_chunks * KEPT]. NaN is above all numbers; 0 is -0."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * vocab_size + at, mask=at < vocab_size, other=0.0)
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(logits != logits, 0x7FFFFFFF, order).to(tl.int64)
    keys = tl.where(at < vocab_size, order * 4294967296 + (4294967295 - at.to(tl.int64)), -9223372036854775808)
    tl.store(keys_ptr + (row * num_chunks + chunk) * KEPT + tl.arange(0, KEPT), tl.topk(keys, KEPT))


@triton.jit
def largest_keys(keys_ptr, out_ptr, num_keys, num_chunks, CHUNK: tl.constexpr, KEPT: tl.constexpr):
    """Keep the largest keys: [R, num_keys] to out [R, num_chunks * KEPT]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    keys = tl.load(keys_ptr + row * num_keys + at, mask=at < num_keys, other=-9223372036854775808)
    tl.store(out_ptr + (row * num_chunks + chunk) * KEPT + tl.arange(0, KEPT), tl.topk(keys, KEPT))


@triton.jit
def sum_masses(
    logits_ptr,
    rows_ptr,
    largest_ptr,
    temperatures_ptr,
    out_ptr,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum, for each of some rows [n] and each part of the vocabulary, exp((logit - largest) /
    temperature). out: [n, num_parts] float32."""
    number, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + number)
    largest, temperature = tl.load(largest_ptr + number), tl.load(temperatures_ptr + number)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * vocab_size + at, mask=at < vocab_size, other=float("-inf"))
        total += tl.exp((logits - largest) / temperature)
    tl.store(out_ptr + number * num_parts + part, tl.sum(total, 0))


@triton.jit
def logarithm(x):
    """noise.py's log: the same operations in the same order. x: float64."""
    bits = x.to(tl.int64, bitcast=True)
    k = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = (bits - (k << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = tl.full(z.shape, 1.0 / 21, tl.float64)
    for n in tl.static_range(19, 1, -2):
        p = p * z + tl.full([], 1.0 / n, tl.float64)
    s = s + s
    return k.to(tl.float64) * tl.full([], 0.6931471805599453, tl.float64) + (s + s * (z * p))


@triton.jit
def gumbel_noise(state, token_ids):
    """noise.py's gumbel(unit(token_bits)). state: uint64; token_ids: int64. Returns float64."""
    z = state + (token_ids + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    u = ((z >> 12) | 0x3FF0000000000000).to(tl.float64, bitcast=True) - tl.full([], 1.0 - 2.0**-53, tl.float64)
    return -logarithm(-logarithm(u))


@triton.jit
def draw_tokens(keys_ptr, masses_ptr, draws_ptr, states_ptr, out_ptr, vocab_size, num_parts, KEPT: tl.constexpr):
    """Draw each row's token, by the rules of shared/model/decision.py, among its KEPT largest.

    out: [R] int64; keys: [R, KEPT], falling; masses: [n, num_parts] float32; draws: [R, 6] float64
    of temperature (0: the largest is taken), top_k, top_p, min_p, how many of the keys are listed,
    and the row of masses, or -1; states: [R] int64, the bits of noise.py's row_bits.

    Where the list does not hold the answer, it is one of the list's tokens: the host will find
    another.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, KEPT)
    keys = tl.load(keys_ptr + row * KEPT + at)
    order = (keys >> 32).to(tl.int32)
    logits = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True).to(tl.float64)
    temperature, top_p, min_p = (
        tl.load(draws_ptr + row * 6),
        tl.load(draws_ptr + row * 6 + 2),
        tl.load(draws_ptr + row * 6 + 3),
    )
    top_k, num_listed = tl.load(draws_ptr + row * 6 + 1), tl.load(draws_ptr + row * 6 + 4)
    is_listed = (at < num_listed) & (logits > float("-inf"))
    count = tl.sum(is_listed.to(tl.int32), 0)
    first = tl.max(tl.where(at == 0, logits, float("-inf")), 0)
    shifted = (logits - first) / tl.where(temperature > 0.0, temperature, 1.0)
    weights = tl.where(is_listed, tl.exp(shifted), 0.0)
    mass = tl.cumsum(weights, 0)
    listed_mass = tl.max(mass, 0)
    total, has_all = listed_mass, (count < num_listed) | (count == vocab_size)
    masses_row = tl.load(draws_ptr + row * 6 + 5).to(tl.int64)
    if masses_row >= 0:
        sums = tl.zeros([], tl.float64)
        for part in range(num_parts):
            sums += tl.load(masses_ptr + masses_row * num_parts + part).to(tl.float64)
        total = tl.where(has_all, total, tl.maximum(total, sums))
    kept = count
    if (top_k > 0) & (top_k <= count):
        kept = top_k.to(tl.int32)
        total = tl.sum(tl.where(at == kept - 1, mass, 0.0), 0)
    if top_p < 1.0:
        kept = tl.minimum(kept, tl.sum(((at < kept) & (mass < top_p * total)).to(tl.int32), 0) + 1)
    if min_p > 0.0:
        kept = tl.minimum(kept, tl.sum(((at < kept) & (weights >= min_p)).to(tl.int32), 0))
    kept = tl.where(temperature > 0.0, tl.maximum(kept, 1), 1)
    token_ids = 4294967295 - (keys & 4294967295)
    state = tl.load(states_ptr + row).to(tl.uint64, bitcast=True)
    sums_with_noise = tl.where(at < kept, shifted + gumbel_noise(state, token_ids), float("-inf"))
    largest = tl.max(sums_with_noise, 0)
    column = tl.min(tl.where(sums_with_noise == largest, at, KEPT), 0)
    tl.store(out_ptr + row, tl.sum(tl.where(at == column, token_ids, 0), 0))
