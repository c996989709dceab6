"""Searches through rows of logits: the k largest by their keys, and the mass of all.

A key is an int64 that is the larger the higher the logit, and of equal logits the smaller the token id: so the order is total, and any way of sorting gives
the same.
"""

import triton
import triton.language as tl


@triton.jit
def largest_logits(logits_ptr, keys_ptr, vocab_size, num_chunks, CHUNK: tl.constexpr, KEPT: tl.constexpr):
    """The KEPT largest keys of each chunk of a row. logits: [R, vocab_size] float32; keys: [R, num_chunks * KEPT]. NaN is above all numbers; 0 is -0."""
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
    """The same of keys: [R, num_keys] to out [R, num_chunks * KEPT]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    keys = tl.load(keys_ptr + row * num_keys + at, mask=at < num_keys, other=-9223372036854775808)
    tl.store(out_ptr + (row * num_chunks + chunk) * KEPT + tl.arange(0, KEPT), tl.topk(keys, KEPT))


@triton.jit
def sum_masses(logits_ptr, rows_ptr, largest_ptr, temperatures_ptr, out_ptr, vocab_size, num_parts, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Of each of some rows [n] and each part of the vocabulary the sum of exp((logit - largest) / temperature). out: [n, num_parts] float32."""
    number, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + number)
    largest, temperature = tl.load(largest_ptr + number), tl.load(temperatures_ptr + number)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * vocab_size + at, mask=at < vocab_size, other=float("-inf"))
        total += tl.exp((logits - largest) / temperature)
    tl.store(out_ptr + number * num_parts + part, tl.sum(total, 0))
