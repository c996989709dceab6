"""The decision: which candidate becomes the token. Pure functions of values, in numpy only.

Sorted by falling logit (ties by token id), every truncation keeps a prefix of the row: top-k its
first k tokens, top-p the shortest prefix whose share of what top-k left reaches p, min-p the tokens
whose probability is at least min_p times the largest. So with w_i = exp((l_i - l_0) / T), the kept
tokens have the mass W = w_0 + … + w_(n-1), and the token for a uniform u is the first i with w_0 +
… + w_i > u * W. Compute, which sees the whole row, knows W (`kept_mass`) and lists the first few
tokens; if the draw falls beyond the list, it names that one token as well (the tail). The
distribution is therefore exactly the full vocabulary's.

The sampler decides with `decide`; compute foresees with it what the sampler will decide, and
supplies the tail where `falls_beyond` says that it is needed. Both read the same numbers and sum
them in the same order, so they agree.
"""

import numpy as np

from shared.model.arrays import Array

GREEDY = 0.0  # kept_mass of a row that takes its first candidate
TOKEN, XTC = 0, 1  # what a uniform number decides: which token it is; whether XTC is applied

_PHILOX_M0, _PHILOX_M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: Array, key: Array) -> Array:
    """Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3" (SC 2011), section 3.3.

    counter: [4, n] and key: [2, n], uint64 holding 32-bit words. Returns [4, n] of the same form.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _PHILOX_M0, c2 * _PHILOX_M1
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniform(seeds: Array, positions: Array, purpose: int = TOKEN) -> Array:
    """One number in [0, 1) for each (seed, position): 53 random bits. seeds: [n] uint64; positions:
    [n] int32. Returns [n] float64.

    purpose: what it decides. The numbers of different purposes have nothing to do with one another.
    """
    seeds = seeds.astype(np.uint64)
    counter = np.zeros((4, len(seeds)), np.uint64)
    counter[0] = positions.astype(np.uint64)
    counter[1] = purpose
    words = philox(counter, np.stack([seeds & _LOW, seeds >> _32]))
    bits: Array = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


def pad(values: Array, counts: Array, fill: float) -> Array:
    """Rows of `counts` values each, laid out flat, as a matrix [R, max(counts)] filled up with
    `fill`."""
    width = int(counts.max(initial=1))
    columns = np.arange(width)
    is_listed = columns < counts[:, None]
    matrix = np.full(is_listed.shape, fill, values.dtype)
    matrix[is_listed] = values
    return matrix


def cumulative_mass(logits: Array, temperatures: Array) -> Array:
    """w_0 + … + w_i for each listed candidate. logits: [R, K] float32, falling, -inf beyond a row's
    list. Returns [R, K] float64."""
    scale = np.where(temperatures > 0, temperatures, 1.0)[:, None]
    weights = np.exp((logits.astype(np.float64) - logits[:, :1]) / scale)
    mass: Array = np.cumsum(weights, axis=1)
    return mass


def decide(logits: Array, counts: Array, temperatures: Array, kept_mass: Array, u: Array) -> Array:
    """The column of each row's token; counts[r] stands for the row's tail.

    logits: [R, K] float32 as in cumulative_mass; counts, temperatures, kept_mass and u: [R].
    Returns [R] int64.
    """
    beyond = u * kept_mass
    columns = (cumulative_mass(logits, temperatures) <= beyond[:, None]).sum(axis=1)
    columns = np.minimum(columns, counts)
    chosen: Array = np.where(kept_mass == GREEDY, 0, columns)
    return chosen


def pick(columns: Array, counts: Array, listed: Array, tail_token_ids: Array, tail: Array) -> Array:
    """Each row's chosen value, out of `listed` [R, K] at its column, or its `tail` [R] where the
    column is beyond the list and there is a tail."""
    rows = np.arange(len(columns))
    chosen: Array = np.where((columns >= counts) & (tail_token_ids >= 0), tail, listed[rows, np.minimum(columns, counts - 1)])
    return chosen


def falls_beyond(listed_mass: float, kept_mass: float, u: float) -> bool:
    """Whether the draw of a random row falls beyond its listed candidates, which have that mass
    together."""
    return bool(listed_mass <= u * kept_mass)


def kept_count(mass: Array, top_k: int, top_p: float, min_p: float, temperature: float, logits: Array, total: float) -> int:
    """How many of a row's sorted tokens survive top-k, top-p and min-p; len(mass) may mean "all of
    these, and perhaps more".

    mass, logits: [K] of one row's sorted tokens; total: the mass of the whole row.
    """
    count = len(mass)
    if 0 < top_k <= count:
        count = top_k
        total = float(mass[count - 1])
    if top_p < 1.0:
        count = min(count, int(np.searchsorted(mass[:count], top_p * total, side="left")) + 1)
    if min_p > 0.0:
        weights = np.exp((logits[:count].astype(np.float64) - logits[0]) / temperature)
        count = min(count, int(np.searchsorted(-weights, -min_p, side="right")))
    return max(count, 1)
