"""A step in flight: it runs on a device that draws its tokens, and its results have not been read yet.

`launch`: each sequence of the step has a token that is PENDING. So the next step can be scheduled,
and launched on the token that the device draws. `collect`: the candidates are read, and the token
becomes the one that the sampler will decide. The device's draw has no authority: where the host draws
another token, or one that ends the sequence, the next step's row is discarded, like everything
computed from a wrong token.

A sequence with drafts has several rows, and PENDING is the token that the last of them decides. A
draft stands if the row before it draws it, and all drafts before it stand; the token of the last
standing row follows, and all rows behind it are discarded. So each token is the one that a step of its
own would have decided. The number of drafts that stand is not known before: a step with drafts is
collected before another is scheduled.

Where only the host draws, a step is collected as soon as it is launched.
"""

from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from services.compute.candidates.constraints import Masking
from services.compute.candidates.reduction import Reduction
from services.compute.candidates.rows import CandidateRows
from services.compute.execution.executor import DrawnTokens
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import PENDING, Prefix, RowKey, Sequence
from services.compute.sequence.batch import ScheduledBatch
from shared.wire.messages import RequestError


@dataclass(frozen=True, slots=True)
class StepInModel:
    """A step on its way through the model, up to the head."""

    batch: ScheduledBatch
    hidden: Any  # as Executor.run returned it
    sequences: dict[int, Sequence]  # by handle; some may have ended since, or run no more
    began_at: float  # perf_counter, s
    # of a step with no other on its way: the rows that are valid, and masks that were begun with it
    rows: dict[RowKey, Prefix] | None = None
    masking: Masking | None = None


@dataclass(frozen=True, slots=True)
class Flight:
    batch: ScheduledBatch
    hidden: Any  # as Executor.run returned it: good until the next step runs
    reduction: Reduction
    rows: dict[RowKey, Prefix]  # of each sequence its first ones, without a gap
    began_at: float  # perf_counter, s: when the step was begun
    # the tokens that the next step may be launched on before this one is collected; None: the host draws
    drawn: DrawnTokens | None


def rows_still_valid(batch: ScheduledBatch, scheduler: Scheduler) -> dict[RowKey, Prefix]:
    """The rows of logits that a step samples, in its order, without those of sequences that have ended
    since, or whose rows were computed from a wrong token."""
    rows: dict[RowKey, Prefix] = {}
    for row in batch.rows:
        sequence = scheduler.running.get(row.handle)
        if sequence is not None and sequence.kv.num_computed == row.num_context_tokens:
            prefixes = [Prefix(sequence, row.num_computed_tokens + index + 1) for index in row.sampled]
            rows.update({prefix.key: prefix for prefix in prefixes})
    return rows


def drop_orphans(step: StepInModel, scheduler: Scheduler) -> None:
    """Drop the drafts of sequences that have lost their blocks since: their rows are not valid."""
    for row in step.batch.rows:
        sequence, first = step.sequences[row.handle], row.num_computed_tokens + row.sampled.start + 1
        is_valid = row.handle in scheduler.running and sequence.kv.num_computed == row.num_context_tokens
        if len(row.sampled) > 1 and not is_valid and not sequence.is_finished and len(sequence.tokens) > first:
            scheduler.truncate(sequence, first)


def launch(
    batch: ScheduledBatch, hidden: Any, reduction: Reduction, scheduler: Scheduler, began_at: float = 0.0
) -> Flight:
    """The step's reduction has begun. A row that could not be edited gets no PENDING token, and the
    sequence's drafts behind it are dropped."""
    edited = {prefix.key: prefix for prefix in reduction.prefixes}
    rows: dict[RowKey, Prefix] = {}
    for row in batch.rows:
        prefixes = [edited[key] for key in takewhile(edited.__contains__, row.decides)]
        if prefixes:
            rows.update({prefix.key: prefix for prefix in prefixes})
            sequence = prefixes[-1].sequence
            if len(sequence.tokens) > prefixes[-1].num_tokens:
                scheduler.truncate(sequence, prefixes[-1].num_tokens)
            sequence.tokens.foresee(PENDING)
            if sequence.tokens.num_output >= (sequence.request.params.max_tokens or 1):
                sequence.tokens.end()
    token_ids = reduction.searching.drawn
    drawn = None if token_ids is None else DrawnTokens(token_ids, {key: row for row, key in enumerate(edited)})
    return Flight(batch, hidden, reduction, rows, began_at, drawn)


def collect(flight: Flight, scheduler: Scheduler) -> tuple[CandidateRows, dict[int, RequestError], int]:
    """Wait for the candidates. A PENDING token becomes the one that the sampler will decide, or is dropped
    with the drafts that were not drawn; behind a token that ends its sequence nothing is computed.

    Returns, for the sequences that still wait for the step, the rows of the tokens that stand, and failures
    by handle; and how many rows of the next step, which runs already, are dropped.
    """
    rows = flight.reduction.finish()
    chosen = dict(zip(rows.keys, rows.chosen.tolist(), strict=True))
    drawn_ids = flight.reduction.searching.read_drawn()
    drawn = (
        {}
        if drawn_ids is None
        else dict(zip([prefix.key for prefix in flight.reduction.prefixes], drawn_ids.tolist(), strict=True))
    )
    kept: set[RowKey] = set()
    failures: dict[int, RequestError] = {}
    num_surplus = 0
    for row in flight.batch.rows:
        prefixes = [flight.rows[key] for key in takewhile(flight.rows.__contains__, row.decides)]
        if not prefixes or not is_waiting(prefixes[0]):
            continue
        if (error := rows.failures.get(prefixes[0].key)) is not None:
            failures[row.handle] = error
            continue
        standing = stands(prefixes, chosen)
        last, sequence = standing[-1], prefixes[0].sequence
        token_id, num_computed = chosen[last.key], sequence.kv.num_computed
        all_stand, is_last = len(standing) == len(prefixes), is_end(last, token_id)
        is_continued = all_stand and not is_last and not sequence.tokens.is_ending and drawn.get(last.key) == token_id
        scheduler.settle(sequence, token_id, num_standing=len(standing) - 1, is_continued=is_continued)
        if is_last:
            sequence.tokens.end()
        if all_stand:
            num_surplus += num_computed - sequence.kv.num_computed
        kept.update(prefix.key for prefix in standing)
    if len(kept) < len(chosen):
        rows = rows.only([at for at, key in enumerate(chosen) if key in kept])
    return rows, failures, num_surplus


def stands(prefixes: list[Prefix], chosen: dict[RowKey, int]) -> list[Prefix]:
    """The sequence's rows that are computed on the tokens that the rows before them draw. No row stands
    behind one without a token, or with the sequence's last token."""
    standing = [prefixes[0]]
    for before, prefix in pairwise(prefixes):
        token_id = chosen[before.key]
        if (
            prefix.sequence.tokens.ids[before.num_tokens] != token_id
            or is_end(before, token_id)
            or prefix.key not in chosen
        ):
            break
        standing.append(prefix)
    return standing


def is_end(prefix: Prefix, token_id: int) -> bool:
    """Whether the sequence ends with this token behind the prefix, as far as compute knows."""
    request = prefix.sequence.request
    return token_id in request.end_token_ids or prefix.position >= (request.params.max_tokens or 1)


def is_waiting(prefix: Prefix) -> bool:
    """Whether the token after it is still PENDING, or a draft: its sequence has neither ended nor
    been truncated since the step was launched."""
    return not prefix.sequence.is_finished and prefix.sequence.tokens.is_pending
