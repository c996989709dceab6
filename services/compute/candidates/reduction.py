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

from services.compute.backends.backend import MassRequest, RowSearch, RunningSearch, SearchRequest, SearchResult
from services.compute.backends.buffers import ensure_works, to_device
from services.compute.candidates.chain import NOT_FINITE, truncate
from services.compute.candidates.constraints import Masks
from services.compute.candidates.draw import draw
from services.compute.candidates.edits import RowEdits, apply_edits, edits_of
from services.compute.candidates.failures import error_of
from services.compute.candidates.row_mask import bits_of
from services.compute.candidates.rows import REQUESTS_OWN, CandidateRows
from services.compute.sequence import Prefix, RowKey, Sequence
from shared.model.arrays import Array
from shared.model.decision import pick
from shared.model.sampling_params import SamplingParams
from shared.process.telemetry import get_logger
from shared.wire.messages import RequestError

log = get_logger("penstock.compute")


# candidates of a random row without top-k: nearly every draw of a trained model falls among them
LISTED = 64
MAX_LISTED = 256  # of a row with a large top-k
NO_MASKS = Masks()


@dataclass(slots=True)
class EditedRow:
    """A row of logits that is ready to be reduced."""

    prefix: Prefix  # on which it was computed
    # the prefix's last: the sequence may have lost it when the candidates are read
    previous_token_id: int
    # of the draw: what the chain has done already is off, and the temperature is the row's
    params: SamplingParams
    # of the row before the chain took any of its tokens away; None: it took none, or nobody asked
    logsumexp: float | None = None
    temperature: float = REQUESTS_OWN

    @property
    def has_chain(self) -> bool:
        return self.params.chain is not None and self.params.chain.is_on


@dataclass(frozen=True, slots=True)
class Reduction:
    """Rows on their way from logits to candidates: edited, and the search has begun."""

    logits: torch.Tensor  # [R, vocab] float32
    edited: list[EditedRow]  # [R]
    wanted: SearchRequest
    searching: RunningSearch
    search: RowSearch
    # rows that could not be edited, and are none of these
    failures: dict[RowKey, RequestError]

    @torch.inference_mode()
    def finish(self) -> CandidateRows:
        """Waits for the search."""
        try:
            rows = reduce_found(self.logits, self.edited, self.wanted, self.searching.read(), self.search)
            if is_finite(rows).all():
                rows.failures.update(self.failures)
                return rows
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # some row's mistake: find it
            ensure_works(self.logits.device)
            log.warning("a step can't be reduced as a whole", error=repr(error))
        failures, good = dict(self.failures), []
        for row, each in enumerate(self.edited):
            alone = self.logits[row : row + 1]
            if failure := failure_of(lambda: check(reduce_edited(alone, [each], self.search)), alone.device):  # noqa: B023
                failures[each.prefix.key] = failure
            else:
                good.append(row)
        some = self.logits[to_device(np.array(good, np.int64), self.logits.device)]
        rows = reduce_edited(some, [self.edited[row] for row in good], self.search)
        rows.failures.update(failures)
        return rows


def num_listed(params: SamplingParams, vocab_size: int) -> int:
    """How many candidates a request's rows list."""
    wanted = params.logprobs or 0
    if params.is_greedy:
        return min(max(1, wanted), vocab_size)
    return min(max(min(params.top_k or LISTED, MAX_LISTED), wanted), vocab_size)


def reduce(logits: torch.Tensor, sequences: list[Sequence], search: RowSearch, masks: Masks = NO_MASKS) -> CandidateRows:
    """Begin a reduction of rows that decide these sequences' next tokens, and wait for it."""
    return begin_reduction(logits, [sequence.prefix() for sequence in sequences], search, masks).finish()


@torch.inference_mode()
def begin_reduction(logits: torch.Tensor, prefixes: list[Prefix], search: RowSearch, masks: Masks = NO_MASKS) -> Reduction:
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
        if failure := failure or failure_of(lambda: edits.update({row: edits_of(prefix, mask, logits.shape[1])}), logits.device):  # noqa: B023
            failures[key] = failure
    apply_edits(logits, edits, search)
    edited = {row: EditedRow(prefix := prefixes[row], prefix.previous_token_id, prefix.sequence.request.params) for row in edits}
    if any(each.has_chain for each in edited.values()):
        failures |= apply_chains(logits, edited, search)
    if len(edited) < len(prefixes):
        logits = logits[to_device(np.array(list(edited), np.int64), logits.device)]
    wanted = wanted_of(list(edited.values()), logits.shape[1])
    return Reduction(logits, list(edited.values()), wanted, search.start(logits, wanted), search, failures)


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


def wanted_of(edited: list[EditedRow], vocab_size: int) -> SearchRequest:
    """The search that decides the draws of these rows. It follows from their requests and positions
    alone."""
    params = [each.params for each in edited]
    drawn = [row for row, each in enumerate(params) if not each.is_greedy]
    seeds, positions = np.array([each.seed for each in params], np.uint64), np.array([each.prefix.position for each in edited], np.int32)
    num = np.array([num_listed(each, vocab_size) for each in params], np.int32)
    scored = np.array([row for row, each in enumerate(params) if each.logprobs is not None], np.int64)
    whole = np.array([row for row in drawn if params[row].top_k == 0 and (params[row].top_p < 1.0 or params[row].min_p == 0.0)], np.int64)
    temperatures = np.array([params[row].temperature for row in whole], np.float32)
    return SearchRequest(params, seeds, positions, num, MassRequest(scored, np.ones(len(scored), np.float32)), MassRequest(whole, temperatures))


def reduce_edited(logits: torch.Tensor, edited: list[EditedRow], search: RowSearch) -> CandidateRows:
    """The candidates of rows that are edited already."""
    wanted = wanted_of(edited, logits.shape[1])
    return reduce_found(logits, edited, wanted, search.start(logits, wanted).read(), search)


def reduce_found(logits: torch.Tensor, edited: list[EditedRow], wanted: SearchRequest, found: SearchResult, search: RowSearch) -> CandidateRows:
    """The candidates of rows that were searched. Raises ArithmeticError if the largest number of
    one is not finite: so it is where any is NaN."""
    num_rows, vocab_size = logits.shape
    values, token_ids, num = found.values, found.token_ids.astype(np.int32), wanted.num_listed
    if not np.isfinite(values[:, 0]).all():
        raise ArithmeticError(NOT_FINITE)
    values[np.arange(values.shape[1]) >= num[:, None]] = -np.inf
    counts = (values > -np.inf).sum(axis=1).astype(np.int32)  # what is masked is no candidate
    is_whole = (counts < num) | (counts == vocab_size)
    logsumexp, rows = np.zeros(num_rows, np.float32), wanted.scored.rows
    if len(rows):
        logsumexp[rows] = values[rows, 0] + np.log(found.scored_masses)
        logsumexp[rows] = [each if edited[row].logsumexp is None else edited[row].logsumexp for row, each in zip(rows, logsumexp[rows], strict=True)]
    drawn = draw(logits, wanted, values, token_ids, counts, is_whole, found.whole_masses, search)
    return CandidateRows(
        handles=np.array([each.prefix.sequence.handle for each in edited], np.int32),
        positions=wanted.positions,
        previous_token_ids=np.array([each.previous_token_id for each in edited], np.int32),
        counts=counts, token_ids=token_ids, logits=values, logsumexp=logsumexp,
        num_kept=drawn.num_kept, tail_mass=drawn.tail_mass, tail_token_ids=drawn.tail_token_ids, tail_logits=drawn.tail_logits,
        chosen=pick(drawn.columns, counts, token_ids, drawn.tail_token_ids, drawn.tail_token_ids).astype(np.int32),
        temperatures=np.array([each.temperature for each in edited], np.float32),
    )  # fmt: skip


def apply_chains(logits: torch.Tensor, edited: dict[int, EditedRow], search: RowSearch) -> dict[RowKey, RequestError]:
    """Ban what llama.cpp's chain takes away from rows of logits [R, vocab], in place, and say so in
    `edited`, by row. Rows that fail are taken out of it: their errors are returned."""
    rows = np.array([row for row, each in edited.items() if each.has_chain], np.int64)
    numbers = dict(zip(rows.tolist(), logits[to_device(rows, logits.device)].cpu().numpy(), strict=True))
    found: dict[int, tuple[Array, float]] = {}
    failures: dict[RowKey, RequestError] = {}
    for row, values in numbers.items():
        prefix, params = edited[row].prefix, edited[row].params
        assert params.chain is not None
        chain = params.chain
        if failure := failure_of(lambda: found.update({row: truncate(values, params, chain, prefix.position)}), logits.device):  # noqa: B023
            failures[prefix.key] = failure
            del edited[row]
    scored = np.array([row for row in found if edited[row].params.logprobs is not None], np.int64)
    if len(scored):
        largest = np.array([numbers[row].max() for row in scored.tolist()], np.float32)
        masses = search.total_masses(logits, scored, largest, np.ones(len(scored), np.float32))
        for row, logsumexp in zip(scored.tolist(), (largest + np.log(masses)).tolist(), strict=True):
            edited[row].logsumexp = logsumexp
    for row, (_, temperature) in found.items():
        own = edited[row].params.chain
        edited[row].temperature = temperature if own is not None and own.dynatemp_range else REQUESTS_OWN
        edited[row].params = replace(edited[row].params, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    if found:
        search.ban(logits, np.array(list(found), np.int64), [bits_of(np.flatnonzero(~dropped), logits.shape[1]) for dropped, _ in found.values()])
    return failures
