"""The decision: which candidate becomes the token. Pure functions of values, in numpy only.

The token is the one with the largest (logit / T + G(seed, position, token id)), where G is standard
Gumbel noise (noise.py): so a token with probability p is the largest with probability p (Gumbel,
"Statistical theory of extreme values", 1954). Greedy decoding is the case of one candidate.

Sorted by falling logit (ties by token id), every truncation keeps a prefix of the row. Compute,
which sees the whole row, lists the first few tokens and says how many of them are kept
(`num_kept`), and what the kept tokens beyond the list weigh together (`tail_mass`, the sum of their
w_i = exp((l_i - l_0) / T)). The largest of their logits with noise is itself ln(tail_mass) plus
Gumbel noise, so the tail takes part as one group, with noise of its own. If it wins, compute draws
a token inside it and names that as well. The distribution is therefore exactly the full
vocabulary's.

The noise belongs to the token, not to its place. So two rows of logits that differ a little mostly
draw the same token for a seed and a position, as a draft and its model do: with probability at
least (1 - d) / (1 + d), d being the distance of the distributions in total variation (Daliri,
Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024).

The sampler decides with `decide`; compute foresees with it what the sampler will decide, and
supplies the tail where that wins.
"""

from dataclasses import dataclass

import numpy as np

from shared.model.arrays import Array
from shared.model.noise import TAIL_ID, TOKEN, gumbel, log, row_bits, token_bits, unit

DRAW = "gumbel-1"  # the name of this rule: with another the same request has another text

# If one sum is the largest by more than this with numpy's logarithm, it is with ours: both err by
# less than 10^-14 in numbers of this size.
MARGIN = 1e-9


@dataclass(frozen=True, slots=True)
class Draws:
    """The kept candidates and the seeds by which the tokens of some rows are drawn."""

    logits: Array  # [R, K] float32, falling; beyond a row's num_kept they mean nothing
    token_ids: Array  # [R, K] int32
    num_kept: Array  # [R] int32, from 1
    tail_mass: Array  # [R] float64, relative to the first candidate's weight; 0: no tail
    temperatures: Array  # [R] float64, above 0 where there is more than one candidate
    seeds: Array  # [R] uint64
    positions: Array  # [R] int32

    def only(self, rows: Array) -> "Draws":
        """Some of the rows, and as many columns as these need."""
        width = int(self.num_kept[rows].max())
        return Draws(
            self.logits[rows, :width],
            self.token_ids[rows, :width],
            self.num_kept[rows],
            self.tail_mass[rows],
            self.temperatures[rows],
            self.seeds[rows],
            self.positions[rows],
        )


def pad(values: Array, counts: Array, fill: float) -> Array:
    """Rows of `counts` values each, laid out flat, as a matrix [R, max(counts)] filled up with
    `fill`."""
    width = int(counts.max(initial=1))
    columns = np.arange(width)
    is_listed = columns < counts[:, None]
    matrix = np.full(is_listed.shape, fill, values.dtype)
    matrix[is_listed] = values
    return matrix


def decide(draws: Draws) -> Array:
    """The column of each row's token; num_kept[r] stands for the row's tail. Returns [R] int64."""
    columns = np.zeros(len(draws.num_kept), np.int64)
    rows = np.flatnonzero((draws.num_kept > 1) | (draws.tail_mass > 0.0))
    if len(rows):
        columns[rows] = _draw(draws.only(rows))
    return columns


def _draw(draws: Draws) -> Array:
    """`decide` for rows that are drawn at random. numpy's logarithm, which may have other bits on
    another machine, finds the largest, and ours where that is a close thing."""
    shifted, u = weigh(draws)
    sums = np.log(u)
    np.negative(sums, out=sums)
    np.log(sums, out=sums)
    np.subtract(shifted, sums, out=sums)
    columns: Array = sums.argmax(axis=1)
    largest = sums[np.arange(len(columns)), columns]
    close = np.flatnonzero(np.count_nonzero(sums >= largest[:, None] - MARGIN, axis=1) > 1)
    if len(close):
        columns[close] = (shifted[close] + gumbel(u[close])).argmax(axis=1)
    is_tail = columns == draws.token_ids.shape[1]
    columns[is_tail] = draws.num_kept[is_tail]
    return columns


def weigh(draws: Draws) -> tuple[Array, Array]:
    """(l_i - l_0) / T of each candidate and, in the last column, ln(tail_mass); and the uniform
    number that its noise is made of. Minus infinity: it is no candidate. Returns [R, K + 1] float64
    each."""
    num_rows, width = draws.token_ids.shape
    shifted = np.full((num_rows, width + 1), -np.inf)
    listed = shifted[:, :width]
    np.subtract(draws.logits, draws.logits[:, :1], out=listed, dtype=np.float64)
    listed /= draws.temperatures[:, None]
    listed[np.arange(width) >= draws.num_kept[:, None]] = -np.inf
    has_tail = draws.tail_mass > 0.0
    shifted[has_tail, width] = log(draws.tail_mass[has_tail])
    token_ids = np.full((num_rows, width + 1), TAIL_ID, np.int64)
    token_ids[:, :width] = draws.token_ids
    return shifted, unit(token_bits(row_bits(draws.seeds, draws.positions, TOKEN), token_ids))


def pick(columns: Array, counts: Array, listed: Array, tail_token_ids: Array, tail: Array) -> Array:
    """Each row's chosen value, out of `listed` [R, K] at its column, or its `tail` [R] where the
    column is beyond the list and there is a tail."""
    rows = np.arange(len(columns))
    chosen: Array = np.where(
        (columns >= counts) & (tail_token_ids >= 0), tail, listed[rows, np.minimum(columns, counts - 1)]
    )
    return chosen
