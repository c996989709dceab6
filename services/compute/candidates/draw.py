"""The draw: how much mass a row's kept tokens have, and the token on which a draw falls that falls
beyond the row's list.

Mostly the list says all of it. Where it does not, the row is slow: it is sorted, as far as somebody
has to look.
"""

import numpy as np
import torch

from services.compute.backends.backend import SearchRequest
from services.compute.candidates.chain import NOT_FINITE
from services.compute.candidates.sorted_head import SortedHead, sort_until
from shared.model.arrays import Array
from shared.model.decision import GREEDY, cumulative_mass, falls_beyond, kept_count
from shared.model.sampling_params import SamplingParams

NO_TAIL = -1, 0.0  # of a row whose draw falls on its list: a token id and a logit


def draw(logits: torch.Tensor, wanted: SearchRequest, values: Array, counts: Array, is_whole: Array, whole_masses: Array) -> tuple[Array, Array, Array]:
    """Compute the kept mass and the tail of the rows that are drawn at random. is_whole: [R] bool,
    whether no token is beyond the list; whole_masses: as found.

    Returns kept_mass, tail_token_ids, tail_logits, each [R].
    """
    num_rows = len(values)
    kept_mass = np.full(num_rows, GREEDY)
    tail_token_ids, tail_logits = np.full(num_rows, NO_TAIL[0], np.int32), np.full(num_rows, NO_TAIL[1], np.float32)
    rows = [row for row, each in enumerate(wanted.params) if not each.is_greedy]
    if not rows:
        return kept_mass, tail_token_ids, tail_logits
    mass = cumulative_mass(values[rows], np.array([wanted.params[row].temperature for row in rows]))
    listed = mass[np.arange(len(rows)), counts[rows] - 1]
    totals = listed.copy()
    whole = np.searchsorted(rows, wanted.whole.rows)
    totals[whole] = np.maximum(totals[whole], whole_masses)
    for at, row in enumerate(rows):
        count, params, total, u = int(counts[row]), wanted.params[row], float(totals[at]), wanted.u[row]
        kept = kept_mass_of(params, mass[at, :count], values[row, :count], total, is_whole=bool(is_whole[row]))
        if kept is None or falls_beyond(listed[at], kept, u):
            kept, tail_token_ids[row], tail_logits[row] = slow_row(logits[row], params, u, kept, total, float(listed[at]))
        kept_mass[row] = kept
    return kept_mass, tail_token_ids, tail_logits


def slow_row(row: torch.Tensor, params: SamplingParams, u: float, kept: float | None, total: float, listed: float) -> tuple[float, int, float]:
    """A row [vocab] whose list does not say enough: its kept mass, and the token and the logit of
    its tail.

    kept: its kept mass, where the list says that; total: the mass of all tokens, where truncation
    depends on it; listed: the mass of those on the list.
    """
    if kept is not None:
        until = u * kept
        return kept, *tail_of(sort_until(row, params.temperature, lambda head: bool(head.mass[-1] > until)), until)
    head = sort_until(row, params.temperature, lambda head: kept_mass_of(params, head.mass, head.values, total) is not None)
    kept = kept_mass_of(params, head.mass, head.values, total, is_whole=head.is_whole)
    if kept is None:
        raise ArithmeticError(NOT_FINITE)
    return kept, *(tail_of(head, u * kept) if falls_beyond(listed, kept, u) else NO_TAIL)


def tail_of(head: SortedHead, until: float) -> tuple[int, float]:
    """The token at which the mass exceeds `until`, and its logit."""
    place = min(int(np.searchsorted(head.mass, until, side="right")), len(head.mass) - 1)
    return head.token_at(place), float(head.values[place])


def kept_mass_of(params: SamplingParams, mass: Array, values: Array, total: float, *, is_whole: bool = False) -> float | None:
    """The mass of a row's kept tokens as far as its first ones, [count] mass and values, tell;
    None: more of them are needed.

    total: the mass of all, where truncation depends on it; is_whole: there are no more.
    """
    if is_whole or 0 < params.top_k <= len(mass):
        return float(mass[_count(mass, params, values, float(mass[-1])) - 1])
    if params.top_k > 0:
        return None
    if params.top_p == 1.0 and params.min_p == 0.0:
        return total
    count = _count(mass, params, values, total)
    is_bounded = count < len(mass) or (params.top_p < 1.0 and mass[-1] >= params.top_p * total)
    return float(mass[count - 1]) if is_bounded else None


def _count(mass: Array, params: SamplingParams, values: Array, total: float) -> int:
    return kept_count(mass, params.top_k, params.top_p, params.min_p, params.temperature, values, total)
