"""The loop as services/compute/loop/service.py has it, without a pipeline: every token is decided
when it lands. With a step in flight, or without.
"""

from services.compute.backends.backend import RowSearch
from services.compute.candidates.reduction import begin_reduction
from services.compute.candidates.rows import CandidateRows
from services.compute.execution.model_runner import ModelRunner
from services.compute.loop.flight import Flight, collect, launch, rows_still_valid
from services.compute.scheduling.scheduler import Scheduler


class Steps:
    def __init__(self, scheduler: Scheduler, runner: ModelRunner, search: RowSearch, *, is_ahead: bool) -> None:
        """is_ahead: a step lands when the next has been launched, which a scheduler with run_ahead
        of 0 does not allow.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.search = search
        self.is_ahead = is_ahead
        self.flight: Flight | None = None
        self.num_surplus = 0

    def step(self) -> CandidateRows | None:
        """Run a step, or what is left in flight. Returns what landed, if anything did."""
        batch = self.scheduler.schedule()
        if batch is None:
            return self.collect()
        hidden = self.runner.run(batch, None if self.flight is None else self.flight.drawn)
        collected = self.collect()
        rows = rows_still_valid(batch, self.scheduler)
        logits = self.runner.logits(batch, hidden, rows)
        self.flight = launch(batch, hidden, begin_reduction(logits, list(rows.values()), self.search), self.scheduler)
        return collected if self.is_ahead else self.collect()

    def collect(self) -> CandidateRows | None:
        if self.flight is None:
            return None
        flight, self.flight = self.flight, None
        rows, _, num_surplus = collect(flight, self.scheduler)
        self.num_surplus += num_surplus
        for key in rows.keys:
            sequence = flight.rows[key].sequence
            is_last = sequence.tokens.is_ending
            self.scheduler.confirm(sequence)
            if is_last:
                self.scheduler.finish(sequence, is_complete=True)
        return rows
