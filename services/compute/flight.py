"""A step in flight: it runs on a device that draws its tokens, and nothing of it has been read yet.

`launch`: each sequence of the step has a token that is PENDING. So the next step can be scheduled,
and launched on what the device draws. `collect`: the candidates are read, and the token becomes
what the sampler will decide. The device's draw has no authority: where the host's is another, or
ends its sequence, the next step's row is discarded, like everything computed from a wrong token.

Where only the host draws, a step is collected as soon as it is launched.
"""

from dataclasses import dataclass

from services.compute.batch import ScheduledBatch
from services.compute.candidates.reduction import Reduction
from services.compute.candidates.rows import CandidateRows
from services.compute.executor import DrawnTokens
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import PENDING, Prefix, RowKey
from shared.wire.messages import RequestError


@dataclass(frozen=True, slots=True)
class Flight:
    batch: ScheduledBatch
    reduction: Reduction
    rows: dict[RowKey, Prefix]  # the tokens that are PENDING, and what each follows
    began_at: float  # perf_counter, s: when the step was begun
    # what the next step may be launched on before this one is collected; None: nothing
    drawn: DrawnTokens | None


@dataclass(frozen=True, slots=True)
class Collected:
    """The outcome of a step, for the sequences that still wait for it."""

    rows: CandidateRows
    failures: dict[int, RequestError]  # by handle
    is_urgent: bool  # a sequence begins or ends with its token
    num_surplus: int  # rows of the next step, which runs already, that are dropped


def rows_still_valid(batch: ScheduledBatch, scheduler: Scheduler) -> dict[RowKey, Prefix]:
    """The rows of logits that a step samples, in its order: not of sequences that have ended since,
    or whose rows were computed from a wrong token."""
    found: dict[RowKey, Prefix] = {}
    for row in batch.rows:
        sequence = scheduler.running.get(row.handle)
        if sequence is not None and sequence.num_computed_tokens == row.num_context_tokens:
            prefixes = [Prefix(sequence, row.num_computed_tokens + index + 1) for index in row.sampled]
            found.update({prefix.key: prefix for prefix in prefixes})
    return found


def launch(batch: ScheduledBatch, reduction: Reduction, scheduler: Scheduler, began_at: float = 0.0) -> Flight:
    """The step's reduction has begun; what could not be edited has no token PENDING."""
    rows = {each.prefix.key: each.prefix for each in reduction.edited}
    for prefix in rows.values():
        sequence = prefix.sequence
        scheduler.append(sequence, PENDING, is_decided=False)
        sequence.is_ending = sequence.num_output_tokens >= (sequence.params.max_tokens or 1)
    token_ids = reduction.searching.drawn
    drawn = None if token_ids is None else DrawnTokens(token_ids, {key: row for row, key in enumerate(rows)})
    return Flight(batch, reduction, rows, began_at, drawn)


def collect(flight: Flight, scheduler: Scheduler) -> Collected:
    """Wait for the candidates. What is PENDING becomes the token that the sampler will decide;
    after one that ends its sequence nothing is computed."""
    rows = flight.reduction.finish()
    failures = {key.handle: error for key, error in rows.failures.items() if is_waiting(flight.rows.get(key))}
    keys = rows.keys
    waiting = [row for row, key in enumerate(keys) if is_waiting(flight.rows[key])]
    if len(waiting) < len(keys):
        rows, keys = rows.only(waiting), [keys[row] for row in waiting]
    drawn_ids = flight.reduction.searching.read_drawn()
    drawn = {} if drawn_ids is None else dict(zip(flight.rows, drawn_ids.tolist(), strict=True))
    is_urgent, num_surplus = False, 0
    for key, token_id in zip(keys, rows.chosen.tolist(), strict=True):
        sequence = flight.rows[key].sequence
        num_computed = sequence.num_computed_tokens
        sequence.is_ending = sequence.is_ending or token_id in sequence.eos_token_ids or token_id in sequence.params.stop_token_ids
        scheduler.reveal(sequence, token_id, is_continued=drawn.get(key) == token_id and not sequence.is_ending)
        num_surplus += num_computed - sequence.num_computed_tokens
        is_urgent |= sequence.is_ending or sequence.num_output_tokens == 1
    return Collected(rows, failures, is_urgent, num_surplus)


def is_waiting(prefix: Prefix | None) -> bool:
    """Whether the token after it is still PENDING: its sequence has neither ended nor been
    truncated since the step was launched."""
    return prefix is not None and not prefix.sequence.is_finished and prefix.sequence.is_pending
