"""The generation loop without a pipeline: for simulation, benchmarks and tests.
services/compute/loop/service.py is the one with it."""

from collections.abc import Callable, Iterable

from services.compute.scheduling.policy import PLAIN, StepPolicy
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Sequence
from services.compute.sequence.batch import ScheduledBatch

Decide = Callable[[ScheduledBatch, list[Sequence]], Iterable[int]]


def has_all_tokens(sequence: Sequence) -> bool:
    """The usual end: as many tokens as were asked for."""
    return sequence.tokens.num_output == sequence.request.params.max_tokens


def run_step(
    scheduler: Scheduler,
    decide: Decide,
    *,
    is_over: Callable[[Sequence], bool] = has_all_tokens,
    policy: StepPolicy = PLAIN,
) -> ScheduledBatch | None:
    """Schedule a step; `decide` runs it and returns a token for each of its sampled sequences.
    Returns the step, or None if there was none to run."""
    batch = scheduler.schedule(policy)
    if batch is None:
        return None
    sequences = [scheduler.get(handle) for handle, _ in batch.sampled]
    for sequence, token_id in zip(sequences, decide(batch, sequences), strict=True):
        scheduler.append(sequence, token_id)
        if is_over(sequence):
            scheduler.finish(sequence, is_complete=True)
    return batch
