"""The draw: what a row's truncation keeps, which candidate becomes the token, and which token of
the tail where that wins.

Mostly the list says all of it. Where it does not, the row is slow: it is sorted, as far as somebody
has to look.
"""

from dataclasses import dataclass

import numpy as np
import torch

from services.compute.backends.backend import RowSearch, SearchRequest
from services.compute.candidates.chain import NOT_FINITE
from services.compute.candidates.sorted_head import SortedHead, sort_until
from services.compute.candidates.truncation import cumulative_mass, kept_of
from shared.model.arrays import Array
from shared.model.decision import Draws
from shared.model.noise import TAIL, uniform
from shared.model.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Drawn:
    """The draws of some rows."""

    num_kept: Array  # [R] int32, of the listed candidates
    tail_mass: Array  # [R] float64, of the kept tokens beyond the list; 0: none
    columns: Array  # [R] int64, as `decide` returns them
    tail_token_ids: Array  # [R] int32: the token of the tail, where that wins; -1 elsewhere
    tail_logits: Array  # [R] float32, its logit


def draw(
    logits: torch.Tensor, wanted: SearchRequest, values: Array, token_ids: Array, counts: Array, is_whole: Array, whole_masses: Array, search: RowSearch
) -> Drawn:
    """Draw a token from each row of logits [R, vocab].

    values: [R, K] float32 and token_ids: [R, K] int32, of which counts: [R] are listed; is_whole:
    [R] bool, whether no token is beyond the list; whole_masses: as found.
    """
    num_rows = len(values)
    num_kept, tail_mass = np.ones(num_rows, np.int32), np.zeros(num_rows)
    tail_token_ids, tail_logits = np.full(num_rows, -1, np.int32), np.zeros(num_rows, np.float32)
    drawn = Drawn(num_kept, tail_mass, np.zeros(num_rows, np.int64), tail_token_ids, tail_logits)
    rows = [row for row, each in enumerate(wanted.params) if not each.is_greedy]
    if not rows:
        return drawn
    mass = cumulative_mass(values[rows], np.array([wanted.params[row].temperature for row in rows]))
    listed = mass[np.arange(len(rows)), counts[rows] - 1]
    totals = listed.copy()
    whole = np.searchsorted(rows, wanted.whole.rows)
    totals[whole] = np.maximum(totals[whole], whole_masses)
    heads: dict[int, SortedHead] = {}
    for at, row in enumerate(rows):
        count, params, total = int(counts[row]), wanted.params[row], float(totals[at])
        kept = kept_of(params, mass[at, :count], values[row, :count], total, is_whole=bool(is_whole[row]))
        if kept is None:
            heads[row], kept = sort_kept(logits[row], params, total)
        num_kept[row], tail_mass[row] = min(kept[0], count), max(kept[1] - float(listed[at]), 0.0)
    drawn.columns[:] = search.decide(draws_of(wanted, values, token_ids, drawn))
    won = np.flatnonzero(drawn.columns[rows] == counts[rows])
    of_tail = np.array(rows)[won]
    untils = within_tail(listed[won], tail_mass[of_tail], wanted.seeds[of_tail], wanted.positions[of_tail])
    for row, until in zip(of_tail.tolist(), untils, strict=True):
        head = heads.get(row) or sort_until(logits[row], wanted.params[row].temperature, lambda head: bool(head.mass[-1] > until))  # noqa: B023
        place = int(place_of(head.mass, until))
        tail_token_ids[row], tail_logits[row] = head.token_at(place), head.values[place]
    return drawn


def draws_of(wanted: SearchRequest, values: Array, token_ids: Array, drawn: Drawn) -> Draws:
    temperatures = np.array([each.temperature for each in wanted.params], np.float64)
    return Draws(values, token_ids, drawn.num_kept, drawn.tail_mass, temperatures, wanted.seeds, wanted.positions)


def sort_kept(row: torch.Tensor, params: SamplingParams, total: float) -> tuple[SortedHead, tuple[int, float]]:
    """As long a head of a row [vocab] as it takes to know `kept_of`, and that. total: the mass of
    all tokens, where truncation depends on it. Raises ArithmeticError for a row that is not
    finite."""

    def kept(head: SortedHead) -> tuple[int, float] | None:
        return kept_of(params, head.mass, head.values, total, is_whole=head.is_whole)

    head = sort_until(row, params.temperature, lambda head: kept(head) is not None)
    found = kept(head)
    if found is None:
        raise ArithmeticError(NOT_FINITE)
    return head, found


def within_tail(listed: Array, tail_mass: Array, seeds: Array, positions: Array) -> Array:
    """Where in their mass the draws of some rows fall whose tails have won. listed: [n], the mass
    before the tails. Returns [n] float64."""
    found: Array = listed + tail_mass * uniform(seeds, positions, TAIL)
    return found


def place_of(mass: Array, until: Array) -> Array:
    """The first place at which a row's cumulative mass exceeds `until`, or the last."""
    found: Array = np.minimum(np.searchsorted(mass, until, side="right"), len(mass) - 1)
    return found
