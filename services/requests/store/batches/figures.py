"""Figures of batches, over all workers: a hash in Redis, because workers die and batches do not.

A line is counted by the script that notes it in its batch, an end by the script that makes it: once,
even if a worker repeats either. How much waits, and since when, was counted at the workers' last sweep
(services/jobs/upkeep.py); a new batch enters itself until then. Every gateway shows the same.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.wire.line import Pipeline
from shared.wire.script import load_script
from shared.wire.streams import BATCH_FIGURES, FILE_TTL_S, batch_key

OUTCOMES = ("completed", "failed", "not_executed")  # of lines; the last: their batch was cancelled or has expired
ENDS = ("completed", "failed", "expired", "cancelled")  # of batches
ENDED = "ended:"  # before the status in a count of ends (move_batch.lua)

NOTE_BATCH = load_script("note_batch")


def queue_note(pipe: Pipeline, batch_id: str, counts: dict[str, int]) -> None:
    """Note how far a batch is."""
    pairs = [each for pair in counts.items() for each in pair]
    NOTE_BATCH.call(pipe, [batch_key(batch_id), BATCH_FIGURES], FILE_TTL_S, int(time.time()), *pairs)


def queue_created(pipe: Pipeline, created_at: int) -> None:
    """Note that a batch was made: if no other waits, it is the oldest."""
    pipe.hsetnx(BATCH_FIGURES, "oldest_at", created_at)
    pipe.hsetnx(BATCH_FIGURES, "progressed_at", created_at)
    pipe.expire(BATCH_FIGURES, FILE_TTL_S)


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """The figures of batches that Redis holds."""

    num_running: int = 0
    values: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, num_running: int, values: dict[bytes, bytes]) -> "BatchFigures":
        return cls(num_running, {name.decode(): int(value) for name, value in values.items()})

    def age(self, name: str) -> float:
        """Seconds since then; 0 if no batch is running."""
        return max(0.0, time.time() - self.values[name]) if self.num_running and name in self.values else 0.0

    def families(self) -> Iterator[Metric]:
        waiting = self._of("lines_waiting") if self.num_running else 0
        yield GaugeMetricFamily("penstock_batches_running", "Batches that have not ended", value=self.num_running)
        yield GaugeMetricFamily(
            "penstock_batch_lines_waiting", "Their lines without an answer, of those that are checked", value=waiting
        )
        yield GaugeMetricFamily(
            "penstock_batch_oldest_seconds", "Since the oldest of them was made", value=self.age("oldest_at")
        )
        yield GaugeMetricFamily(
            "penstock_batch_longest_pause_seconds",
            "For which one of them has not moved",
            value=self.age("progressed_at"),
        )
        lines = CounterMetricFamily(
            "penstock_batch_lines", "Lines of batches that were answered, or never will be", labels=["outcome"]
        )
        for outcome in OUTCOMES:
            lines.add_metric([outcome], self._of(outcome))
        yield lines
        ended = CounterMetricFamily("penstock_batches_ended", "Batches that have ended", labels=["status"])
        for status in ENDS:
            ended.add_metric([status], self._of(ENDED + status))
        yield ended
        yield CounterMetricFamily(
            "penstock_batch_prompt_tokens", "Prompt tokens of lines that were answered", value=self._of("input_tokens")
        )
        yield CounterMetricFamily(
            "penstock_batch_generation_tokens", "Tokens generated for them", value=self._of("output_tokens")
        )

    def _of(self, name: str) -> Any:
        return self.values.get(name, 0)
