"""The loop as services/compute/service.py has it, without a pipeline: every token is decided when it lands. With a step in flight, or without."""

from services.compute.backends.backend import RowSearch
from services.compute.candidates.reduction import begin_reduction
from services.compute.flight import Flight, Landing, land, standing, take_off
from services.compute.model_runner import ModelRunner
from services.compute.scheduling.scheduler import Scheduler


class Steps:
    def __init__(self, scheduler: Scheduler, runner: ModelRunner, search: RowSearch, *, is_ahead: bool) -> None:
        """is_ahead: a step lands when the next has been launched, which a scheduler with run_ahead of 0 does not allow."""
        self.scheduler = scheduler
        self.runner = runner
        self.search = search
        self.is_ahead = is_ahead
        self.flight: Flight | None = None
        self.num_surplus = 0

    def step(self) -> Landing | None:
        """Run a step, or what is left in flight. Returns what landed, if anything did."""
        batch = self.scheduler.schedule()
        if batch is None:
            return self.land()
        hidden = self.runner.run(batch, None if self.flight is None else self.flight.drawn)
        landing = self.land()
        sequences = standing(batch, self.scheduler)
        logits = self.runner.logits(batch, hidden, sequences)
        self.flight = take_off(batch, begin_reduction(logits, list(sequences.values()), self.search), self.scheduler)
        return landing if self.is_ahead else self.land()

    def land(self) -> Landing | None:
        if self.flight is None:
            return None
        flight, self.flight = self.flight, None
        landing = land(flight, self.scheduler)
        self.num_surplus += landing.num_surplus
        for handle in landing.rows.handles.tolist():
            sequence = flight.sequences[handle]
            self.scheduler.confirm(sequence)
            if sequence.is_ending:
                self.scheduler.finish(sequence, is_complete=True)
        return landing
