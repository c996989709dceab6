"""Steps in the stages of a model (pipeline parallelism): as many at once as there are stages, so that
none is idle. No sequence is in two of them that decide its tokens."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.compute.batch import ScheduledBatch
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepInStages:
    batch: ScheduledBatch
    hidden: Any  # as Executor.run returned it
    sequences: dict[int, Sequence]  # by handle; some may have ended since, or run no more
    began_at: float  # perf_counter, s


class StepsInStages:
    def __init__(self, scheduler: Scheduler, count: int, reduce: Callable[[StepInStages], None]) -> None:
        """reduce: makes candidates of a step that comes from the last stage, and waits for them."""
        self.scheduler = scheduler
        self.scheduler.num_stages = count
        self.reduce = reduce
        self.steps: deque[StepInStages] = deque()  # oldest first

    def step(self, batch: ScheduledBatch | None, run: Callable[[ScheduledBatch], Any], began_at: float) -> None:
        """Hand a scheduled step to the first stage; and where none is idle then, or nothing is to be
        scheduled, take the oldest step from the last one."""
        if batch is not None:
            sequences = {row.handle: self.scheduler.get(row.handle) for row in batch.rows}
            self.steps.append(StepInStages(batch, run(batch), sequences, began_at))
        if batch is None or len(self.steps) == self.scheduler.num_stages:
            self._drop_orphans(self.steps[0])
            self.reduce(self.steps.popleft())
        self.scheduler.in_stages = frozenset(row.handle for each in self.steps for row in each.batch.rows if row.sampled or row.pooled)

    def _drop_orphans(self, step: StepInStages) -> None:
        """Sequences that have lost their blocks since: the drafts of their rows come to nothing, too."""
        for row in step.batch.rows:
            sequence, first = step.sequences[row.handle], row.num_computed_tokens + row.sampled.start + 1
            is_valid = row.handle in self.scheduler.running and sequence.kv.num_computed == row.num_context_tokens
            if len(row.sampled) > 1 and not is_valid and not sequence.is_finished and len(sequence.tokens) > first:
                self.scheduler.truncate(sequence, first)

    def empty(self) -> None:
        """Take all steps from the stages."""
        while self.steps:
            self.step(None, lambda batch: batch, 0.0)
