"""Logits to exact candidate sets: what decides each token, in a few bytes instead of the whole
vocabulary.

A row is first edited as its request asks (penalties, bias, banned tokens, the mask of its grammar).
Then its largest logits are listed in order, and for rows that are drawn at random, how many of them
top-k, top-p and min-p keep, the mass of what they keep beyond the list (the tail), and the tail's
token, if the tail wins the draw. Compute can name that because the noise of (seed, position, token
id) is known to it as well. The header of shared/model/decision.py shows that this is exact. The
list's length follows from the request's own parameters alone, never from the batch.

A row that can't be reduced (its numbers are not finite, its edits fail) is a failure of its own
request; the others go on. A device that fails is no row's mistake: compute ends with it, and
another takes its requests over.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from services.compute.backends.backend import RowSearch, RunningSearch, SearchRequest
from services.compute.backends.buffers import ensure_works, to_device
from services.compute.candidates.chain import NOT_FINITE, truncate
from services.compute.candidates.constraints import Masks
from services.compute.candidates.draw import draw
from services.compute.candidates.edits import RowEdits, apply_edits, edits_of
from services.compute.candidates.failures import error_of
from services.compute.candidates.row_mask import bits_of
from services.compute.candidates.rows import CandidateRows, rows_after
from services.compute.sequence import Prefix, RowKey, Sequence
from shared.model.arrays import Array
from shared.model.sampling_params import SamplingParams
from shared.process.telemetry import get_logger
from shared.wire.messages import RequestError

log = get_logger("penstock.compute")


# candidates of a random row without top-k: nearly every draw of a trained model falls among them
LISTED = 64
MAX_LISTED = 256  # of a row with a large top-k
NO_MASKS = Masks()


@dataclass(frozen=True, slots=True)
class Reduction:
    """Rows on their way from logits to candidates: edited, and the search has begun."""

    logits: torch.Tensor  # [R, vocab] float32
    prefixes: list[Prefix]  # [R]: on which the rows were computed
    rows: CandidateRows  # [R]: known so far
    wanted: SearchRequest
    searching: RunningSearch
    search: RowSearch
    # rows that could not be edited, and are none of these
    failures: dict[RowKey, RequestError]

    @torch.inference_mode()
    def finish(self) -> CandidateRows:
        """Waits for the search."""
        rows = self.rows
        try:
            fill(rows, self.logits, self.wanted, self.searching, self.search)
            if is_finite(rows).all():
                rows.failures.update(self.failures)
                return rows
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # some row's mistake: find it
            ensure_works(self.logits.device)
            log.warning("a step can't be reduced as a whole", error=repr(error))
        failures, good = dict(self.failures), []
        for row, prefix in enumerate(self.prefixes):
            if failure := failure_of(lambda: check(self._reduce_again([row])), self.logits.device):  # noqa: B023
                failures[prefix.key] = failure
            else:
                good.append(row)
        rows = self._reduce_again(good)
        rows.failures.update(failures)
        return rows

    def _reduce_again(self, some: list[int]) -> CandidateRows:
        """The candidates of some of the rows, from a search of their own."""
        logits = self.logits[to_device(np.array(some, np.int64), self.logits.device)]
        rows = self.rows.only(some)
        wanted = wanted_of([self.wanted.params[row] for row in some], rows.positions, logits.shape[1])
        fill(rows, logits, wanted, self.search.start(logits, wanted), self.search)
        return rows


def has_chain(params: SamplingParams) -> bool:
    return params.chain is not None and params.chain.is_on


def num_listed(params: SamplingParams, vocab_size: int) -> int:
    """How many candidates a request's rows list."""
    wanted = params.logprobs or 0
    if params.is_greedy:
        return min(max(1, wanted), vocab_size)
    return min(max(min(params.top_k or LISTED, MAX_LISTED), wanted), vocab_size)


def reduce(
    logits: torch.Tensor, sequences: list[Sequence], search: RowSearch, masks: Masks = NO_MASKS
) -> CandidateRows:
    """Begin a reduction of rows that decide these sequences' next tokens, and wait for it."""
    return begin_reduction(logits, [sequence.prefix() for sequence in sequences], search, masks).finish()


@torch.inference_mode()
def begin_reduction(
    logits: torch.Tensor, prefixes: list[Prefix], search: RowSearch, masks: Masks = NO_MASKS
) -> Reduction:
    """logits: [R, vocab] float32, edited in place; prefixes: those on which the rows were computed,
    several of one sequence in their order; search: of the model's backend; masks: of their
    grammars, where they have one: a row whose mask is late is left out.

    Does not wait for the device, but where llama.cpp's chain looks at a whole row.
    """
    failures: dict[RowKey, RequestError] = {}
    edits: dict[int, RowEdits] = {}
    for row, prefix in enumerate(prefixes):
        key = prefix.key
        if key in masks.late:
            continue
        mask, failure = masks.by_row.get(key), masks.failures.get(key)
        if failure := failure or failure_of(
            lambda: edits.update({row: edits_of(prefix, mask, logits.shape[1])}),  # noqa: B023
            logits.device,  # noqa: B023, RUF100
        ):
            failures[key] = failure
    apply_edits(logits, edits, search)
    good, rows, params = list(edits), rows_after(prefixes), [prefix.sequence.request.params for prefix in prefixes]
    if chained := [row for row in good if has_chain(params[row])]:
        failures_by_row = apply_chains(logits, chained, prefixes, params, rows, search)
        failures |= {prefixes[row].key: failure for row, failure in failures_by_row.items()}
        good = [row for row in good if row not in failures_by_row]
    if len(good) < len(prefixes):
        logits = logits[to_device(np.array(good, np.int64), logits.device)]
        prefixes, rows, params = [prefixes[row] for row in good], rows.only(good), [params[row] for row in good]
    wanted = wanted_of(params, rows.positions, logits.shape[1])
    return Reduction(logits, prefixes, rows, wanted, search.start(logits, wanted), search, failures)


def failure_of(attempt: Callable[[], None], device: torch.device) -> RequestError | None:
    """The error of an attempt, if there is one. Raises where it is the device's."""
    try:
        attempt()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, it is this row's alone
        ensure_works(device)
        return error_of(error)
    return None


def is_finite(rows: CandidateRows) -> Array:
    """Whether each row's numbers are finite. [R] bool."""
    finite: Array = np.isfinite(rows.tail_mass) & np.isfinite(rows.logsumexp)
    return finite


def check(rows: CandidateRows) -> None:
    """Raises ArithmeticError for a row whose numbers are not finite."""
    if not is_finite(rows).all():
        raise ArithmeticError(NOT_FINITE)


def wanted_of(params: list[SamplingParams], positions: Array, vocab_size: int) -> SearchRequest:
    """The search that decides the draws of rows. params, positions: [R] int32, of the draws: all follows from them
    alone."""
    drawn = [row for row, each in enumerate(params) if not each.is_greedy]
    return SearchRequest(
        params=params,
        seeds=np.array([each.seed for each in params], np.uint64),
        positions=positions,
        num_listed=np.array([num_listed(each, vocab_size) for each in params], np.int32),
        # the chain has scored its rows before it took tokens away
        scored=np.array(
            [row for row, each in enumerate(params) if each.logprobs is not None and not has_chain(each)], np.int64
        ),
        whole=np.array(
            [row for row in drawn if params[row].top_k == 0 and (params[row].top_p < 1.0 or params[row].min_p == 0.0)],
            np.int64,
        ),
    )


def fill(
    rows: CandidateRows, logits: torch.Tensor, wanted: SearchRequest, searching: RunningSearch, search: RowSearch
) -> None:
    """Fill in what the search says of the rows, and draw. Raises ArithmeticError if the largest number
    of a row is not finite: so it is where any is NaN."""
    values, token_ids, masses = searching.read()
    if not np.isfinite(values[:, 0]).all():
        raise ArithmeticError(NOT_FINITE)
    values[np.arange(values.shape[1]) >= wanted.num_listed[:, None]] = -np.inf
    rows.logits, rows.token_ids = values, token_ids.astype(np.int32)
    rows.counts = (values > -np.inf).sum(axis=1).astype(np.int32)  # what is masked is no candidate
    if num_scored := len(wanted.scored):
        rows.logsumexp[wanted.scored] = values[wanted.scored, 0] + np.log(masses[:num_scored])
    draw(rows, logits, wanted, masses[num_scored:], search)


def apply_chains(
    logits: torch.Tensor,
    chained: list[int],
    prefixes: list[Prefix],
    params: list[SamplingParams],
    rows: CandidateRows,
    search: RowSearch,
) -> dict[int, RequestError]:
    """Ban what llama.cpp's chain takes away from some rows of logits [R, vocab], in place. What is left to do of
    their params, the draw at the row's temperature, is put into params, [R]; temperatures and logprobs' sums are
    filled in. Returns the errors of those that fail, by row."""
    numbers = dict(
        zip(chained, logits[to_device(np.array(chained, np.int64), logits.device)].cpu().numpy(), strict=True)
    )
    found: dict[int, tuple[Array, float]] = {}
    failures: dict[int, RequestError] = {}
    for row, values in numbers.items():
        position = prefixes[row].position
        if failure := failure_of(lambda: found.update({row: truncate(values, params[row], position)}), logits.device):  # noqa: B023
            failures[row] = failure
    scored = np.array([row for row in found if params[row].logprobs is not None], np.int64)
    if len(scored):
        largest = np.array([numbers[row].max() for row in scored.tolist()], np.float32)
        masses = search.total_masses(logits, scored, largest, np.ones(len(scored), np.float32))
        rows.logsumexp[scored] = largest + np.log(masses)
    for row, (_, temperature) in found.items():
        chain = params[row].chain
        if chain is not None and chain.dynatemp_range:
            rows.temperatures[row] = temperature
        params[row] = replace(params[row], temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    if found:
        search.ban(
            logits,
            np.array(list(found), np.int64),
            [bits_of(np.flatnonzero(~dropped), logits.shape[1]) for dropped, _ in found.values()],
        )
    return failures
