"""Searches through rows of logits: the k largest by their keys, the mass of all, and the draw from
both.

A key is an int64 that is the larger the higher the logit, and of equal logits the smaller the token
id: so the order is total, and any way of sorting gives the same.
"""

import triton
import triton.language as tl


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
def sum_masses(logits_ptr, rows_ptr, largest_ptr, temperatures_ptr, out_ptr, vocab_size, num_parts, PART: tl.constexpr, BLOCK: tl.constexpr):
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
def draw_tokens(keys_ptr, masses_ptr, draws_ptr, out_ptr, vocab_size, num_parts, KEPT: tl.constexpr):
    """Draw each row's token, by the rules of shared/model/decision.py, among its KEPT largest.

    out: [R] int64; keys: [R, KEPT], falling; masses: [n, num_parts] float32; draws: [R, 7] float64
    of temperature (0: the largest is taken), top_k, top_p, min_p, u, how many of the keys are
    listed, and the row of masses, or -1.

    Where the list does not hold the answer, it is the list's last token: the host will find
    another.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, KEPT)
    keys = tl.load(keys_ptr + row * KEPT + at)
    order = (keys >> 32).to(tl.int32)
    logits = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True).to(tl.float64)
    temperature, top_p, min_p = tl.load(draws_ptr + row * 7), tl.load(draws_ptr + row * 7 + 2), tl.load(draws_ptr + row * 7 + 3)
    top_k, num_listed = tl.load(draws_ptr + row * 7 + 1), tl.load(draws_ptr + row * 7 + 5)
    is_listed = (at < num_listed) & (logits > float("-inf"))
    count = tl.sum(is_listed.to(tl.int32), 0)
    first = tl.max(tl.where(at == 0, logits, float("-inf")), 0)
    weights = tl.where(is_listed, tl.exp((logits - first) / tl.where(temperature > 0.0, temperature, 1.0)), 0.0)
    mass = tl.cumsum(weights, 0)
    listed_mass = tl.max(mass, 0)
    total, has_all = listed_mass, (count < num_listed) | (count == vocab_size)
    masses_row = tl.load(draws_ptr + row * 7 + 6).to(tl.int64)
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
    kept_mass = tl.sum(tl.where(at == tl.maximum(kept, 1) - 1, mass, 0.0), 0)
    if (top_k == 0) & (top_p == 1.0) & (min_p == 0.0):
        kept_mass = total
    column = tl.sum(((at < count) & (mass <= tl.load(draws_ptr + row * 7 + 4) * kept_mass)).to(tl.int32), 0)
    column = tl.where(temperature > 0.0, tl.maximum(tl.minimum(column, count - 1), 0), 0)
    tl.store(out_ptr + row, tl.sum(tl.where(at == column, 4294967295 - (keys & 4294967295), 0), 0))
