"""DRY, "don't repeat yourself": what would go on with a repetition is made less likely, the more so
the longer the repetition is, as llama.cpp does it.

A pure function of the history: the prompt and the output so far.
"""

import numpy as np

from shared.model.arrays import Array
from shared.model.dry_breakers import Breakers
from shared.model.sampling_params import DryParams

MAX_REPEAT = 256  # tokens beyond allowed_length: what repeats more is penalized like this
MAX_EXPONENT_LOG = 88.7228391  # of the largest float32


def dry_penalties(token_ids: Array, params: DryParams, breakers: Breakers) -> tuple[Array, Array]:
    """The tokens that lose something, each once, int64, and how much, float32. token_ids: the
    history, [n] int64."""
    nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
    window = len(token_ids) if params.penalty_last_n < 0 else min(params.penalty_last_n, len(token_ids))
    if window <= params.allowed_length or window < 2:
        return nothing
    history = token_ids[len(token_ids) - window :]
    longest = min(repeatable(history, breakers, params.allowed_length + MAX_REPEAT), window)
    if longest < params.allowed_length:
        return nothing
    lengths = repeat_lengths(history, longest)
    ends = np.flatnonzero(lengths >= params.allowed_length)
    if not len(ends):
        return nothing
    tokens, index = np.unique(history[ends + 1], return_inverse=True)
    longest_of = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest_of, index, lengths[ends])
    exponents = (longest_of - params.allowed_length).astype(np.float64)
    if params.base > 1.000001:
        exponents = np.minimum(exponents, np.floor(MAX_EXPONENT_LOG / np.log(params.base)))
    return tokens, np.minimum(params.multiplier * params.base**exponents, np.finfo(np.float32).max).astype(np.float32)


def repeatable(history: Array, breakers: Breakers, longest: int) -> int:
    """How many tokens back from the end of the history a repetition may reach: to the first
    breaker, `longest` of them at most."""
    reach = max((len(tail) for tails in breakers.values() for tail in tails), default=0)
    tokens = history[: -(longest + reach + 2) : -1].tolist()
    for back, token in enumerate(tokens):
        matches = [
            len(tail)
            for tail in breakers.get(token, ())
            if len(tail) <= back and tuple(tokens[back - len(tail) : back][::-1]) == tail
        ]
        if matches:
            return min(back - max(matches), longest)
    return longest


def repeat_lengths(history: Array, longest: int) -> Array:
    """For each place but the last, how many tokens up to it are the same as those up to the end; no
    more than `longest`. Returns [len(history) - 1]."""
    lengths = np.zeros(len(history) - 1, np.int64)
    ends = np.flatnonzero(history[:-1] == history[-1]) if longest else np.zeros(0, np.int64)
    lengths[ends] = 1
    for length in range(1, longest):
        ends = ends[ends >= length]
        ends = ends[history[ends - length] == history[len(history) - 1 - length]]
        if not len(ends):
            break
        lengths[ends] = length + 1
    return lengths
