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
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.compute.backends.backend import MassRequest, RowSearch, RunningSearch, SearchRequest, SearchResult
from services.compute.backends.buffers import ensure_works, to_device
from services.compute.candidates.chain import NOT_FINITE, truncate
from services.compute.candidates.constraints import Masks
from services.compute.candidates.draw import draw
from services.compute.candidates.dry import dry_penalties
from services.compute.candidates.failures import error_of
from services.compute.candidates.row_mask import allowed_tokens, apply_mask, banned_tokens
from services.compute.candidates.rows import REQUESTS_OWN, CandidateRows
from services.compute.sequence import Prefix, RowKey, Sequence
from shared.model.arrays import Array
from shared.model.decision import pick
from shared.model.sampling_params import ChainParams, SamplingParams
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
    edited: list[EditedRow] = []
    good: list[int] = []
    for row, prefix in enumerate(prefixes):
        key = prefix.key
        if key in masks.late:
            continue
        mask, failure = masks.by_row.get(key), masks.failures.get(key)
        if failure := failure or failure_of(lambda: edited.append(edit(logits[row], prefix, search, mask)), logits.device):  # noqa: B023
            failures[key] = failure
        else:
            good.append(row)
    if len(good) < len(prefixes):
        logits = logits[to_device(np.array(good, np.int64), logits.device)]
    wanted = wanted_of(edited, logits.shape[1])
    return Reduction(logits, edited, wanted, search.start(logits, wanted), search, failures)


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


def edit(row: torch.Tensor, prefix: Prefix, search: RowSearch, grammar_mask: Array | None = None) -> EditedRow:
    """Apply to a row of logits [vocab], in place, what its request asks: penalties, then bias, then
    DRY, then what is not allowed, then llama.cpp's chain. Raises Invalid if nothing is allowed.

    Repetition: Keskar et al., "CTRL" (2019), section 4.1, over prompt and output. Frequency and
    presence: over the output, as OpenAI defines them.
    """
    sequence, num_tokens = prefix.sequence, prefix.num_tokens
    params = sequence.params
    if params.edits_logits:
        if params.repetition_penalty != 1.0:
            seen = to_device(sequence.seen_counts(num_tokens).token_ids.copy(), row.device)
            values = row[seen]
            row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if (params.frequency_penalty or params.presence_penalty) and prefix.num_output_tokens:
            counts = sequence.output_counts(num_tokens)
            used, times = to_device(counts.token_ids.copy(), row.device), to_device(counts.times.copy(), row.device)
            row[used] -= params.frequency_penalty * times + params.presence_penalty
        if params.logit_bias:
            biased = to_device(np.array(list(params.logit_bias), np.int64), row.device)
            row[biased] += to_device(np.array(list(params.logit_bias.values()), np.float32), row.device)
    if params.dry is not None and params.dry.multiplier > 0.0:
        repeating, penalties = dry_penalties(sequence.history(num_tokens), params.dry, sequence.dry_breakers)
        row[to_device(repeating, row.device)] -= to_device(penalties, row.device)
    mask = allowed_tokens(prefix, grammar_mask, len(row))
    if mask is not None:
        apply_mask(row, mask)
    elif banned := banned_tokens(prefix):
        row[to_device(np.array(banned, np.int64), row.device)] = -torch.inf
    edited = EditedRow(prefix, prefix.previous_token_id, params)
    return chained(row, edited, params.chain, search) if params.chain is not None and params.chain.is_on else edited


def chained(row: torch.Tensor, edited: EditedRow, chain: ChainParams, search: RowSearch) -> EditedRow:
    """Ban what llama.cpp's chain takes away from a row [vocab]."""
    params, numbers = edited.params, row.cpu().numpy()
    dropped, temperature = truncate(numbers, params, chain, edited.prefix.position)
    logsumexp = None
    if params.logprobs is not None:
        largest = numbers.max()
        logsumexp = float(largest + np.log(search.total_masses(row[None], np.zeros(1, np.int64), largest[None], np.ones(1, np.float32))[0]))
    row[to_device(dropped, row.device)] = -torch.inf
    own = temperature if chain.dynatemp_range else REQUESTS_OWN
    return replace(edited, params=replace(params, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0), logsumexp=logsumexp, temperature=own)
