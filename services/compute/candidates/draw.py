"""The draw: what a row's truncation keeps, which candidate becomes the token, and which token of
the tail where that wins.

Mostly the list says all of it. Where it does not, the row is slow: it is sorted, as far as is needed.
What has to be sorted is sorted without its token ids, many times faster, and a token is then found
by its value. Equal logits stand in the order of their ids.
"""

from collections.abc import Callable

import numpy as np
import torch

from services.compute.backends.backend import RowSearch, SearchRequest
from services.compute.candidates.chain import NOT_FINITE
from services.compute.candidates.rows import CandidateRows
from services.compute.candidates.truncation import cumulative_mass, kept_of
from shared.model.arrays import Array
from shared.model.decision import Draws, pick
from shared.model.noise import TAIL, uniform
from shared.model.sampling_params import SamplingParams

# temperatures below the largest: beyond the first lies a token's weight of e^-8
REACHES = (8.0, 20.0, float("inf"))


class SortedHead:
    """A row's largest logits in order, those within `reach` temperatures of the largest: `values`
    falling, and `mass`, what they sum up to."""

    def __init__(self, row: Array, temperature: float, reach: float) -> None:
        self._row = row
        possible = row > -np.inf  # the others are banned
        self._rising = np.sort(row[possible & (row >= row.max() - np.float32(reach * temperature))])
        self._num_possible = int(np.count_nonzero(possible))
        self.values = self._rising[::-1]
        self.mass = cumulative_mass(self.values[None, :], np.array([temperature]))[0]

    @property
    def is_whole(self) -> bool:
        """Whether no token of the row that may be drawn is missing."""
        return len(self._rising) == self._num_possible

    def token_at(self, place: int) -> int:
        """The id of the token at a place of the order."""
        value = self.values[place]
        num_larger = len(self._rising) - int(np.searchsorted(self._rising, value, side="right"))
        return int(np.flatnonzero(self._row == value)[place - num_larger])


def sort_until(row: torch.Tensor, temperature: float, is_enough: Callable[[SortedHead], bool]) -> SortedHead:
    """Sort as long a head of the row as it takes, or the whole row."""
    numbers = row.cpu().numpy()
    for reach in REACHES:
        head = SortedHead(numbers, temperature, reach)
        if head.is_whole or is_enough(head):
            break
    return head


def draw(
    rows: CandidateRows, logits: torch.Tensor, wanted: SearchRequest, whole_masses: Array, search: RowSearch
) -> None:
    """Draw a token from each row of logits [R, vocab]: rows whose candidates are listed get what is
    kept, the tail's token, and which is chosen. whole_masses: of wanted.whole, [m] float64."""
    drawn = [row for row, each in enumerate(wanted.params) if not each.is_greedy]
    columns = np.zeros(len(rows.handles), np.int64)
    if drawn:
        columns = draw_at_random(rows, drawn, logits, wanted, whole_masses, search)
    tails = rows.tail_token_ids
    rows.chosen = pick(columns, rows.counts, rows.token_ids, tails, tails).astype(np.int32)


def draw_at_random(
    rows: CandidateRows,
    drawn: list[int],
    logits: torch.Tensor,
    wanted: SearchRequest,
    whole_masses: Array,
    search: RowSearch,
) -> Array:
    """`draw` for the rows `drawn`, which are not greedy. Returns all rows' columns, as `decide` does."""
    counts = rows.counts
    is_whole = (counts < wanted.num_listed) | (counts == logits.shape[1])  # no token is beyond the list
    mass = cumulative_mass(rows.logits[drawn], np.array([wanted.params[row].temperature for row in drawn]))
    listed = mass[np.arange(len(drawn)), counts[drawn] - 1]
    totals = listed.copy()
    whole = np.searchsorted(drawn, wanted.whole)
    totals[whole] = np.maximum(totals[whole], whole_masses)
    heads: dict[int, SortedHead] = {}
    for at, row in enumerate(drawn):
        count, params, total = int(counts[row]), wanted.params[row], float(totals[at])
        kept = kept_of(params, mass[at, :count], rows.logits[row, :count], total, is_whole=bool(is_whole[row]))
        if kept is None:
            heads[row], kept = sort_kept(logits[row], params, total)
        rows.num_kept[row], rows.tail_mass[row] = min(kept[0], count), max(kept[1] - float(listed[at]), 0.0)
    columns = search.decide(draws_of(rows, wanted))
    won = np.flatnonzero(columns[drawn] == counts[drawn])
    tails = np.array(drawn)[won]
    untils = within_tail(listed[won], rows.tail_mass[tails], wanted.seeds[tails], wanted.positions[tails])
    for row, until in zip(tails.tolist(), untils, strict=True):
        head = heads.get(row) or sort_until(
            logits[row],
            wanted.params[row].temperature,
            lambda head: bool(head.mass[-1] > until),  # noqa: B023
        )
        place = int(place_of(head.mass, until))
        rows.tail_token_ids[row], rows.tail_logits[row] = head.token_at(place), head.values[place]
    return columns


def draws_of(rows: CandidateRows, wanted: SearchRequest) -> Draws:
    """The draws by which the rows' tokens are chosen."""
    temperatures = np.array([each.temperature for each in wanted.params], np.float64)
    return Draws(
        rows.logits, rows.token_ids, rows.num_kept, rows.tail_mass, temperatures, wanted.seeds, wanted.positions
    )


def sort_kept(row: torch.Tensor, params: SamplingParams, total: float) -> tuple[SortedHead, tuple[int, float]]:
    """Sort a head of a row [vocab] that is long enough for `kept_of`. Returns the head, and what is kept.
    total: the mass of all tokens, where truncation depends on it. Raises ArithmeticError for a row that
    is not finite."""

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
