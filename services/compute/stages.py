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


class Stages:
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
            self.reduce(self.steps.popleft())
        self.scheduler.in_stages = frozenset(row.handle for each in self.steps for row in each.batch.rows if row.sampled or row.pooled)

    def empty(self) -> None:
        """Take all steps from the stages."""
        while self.steps:
            self.step(None, lambda batch: batch, 0.0)
