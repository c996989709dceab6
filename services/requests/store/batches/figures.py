"""Figures of batches, over all workers: a hash in Redis, because workers die and batches do not.

A line is counted by the script that notes it in its batch, an end by the one that makes it: once,
also if either is done a second time. What waits, and since when, is as of the workers' last sweep
(services/jobs/upkeep.py); a batch that no worker has swept yet says so itself. Every gateway tells the
same.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.wire.line import Pipeline
from shared.wire.streams import BATCH_FIGURES, FILE_TTL_S, batch_key

OUTCOMES = ("completed", "failed", "not_executed")  # of lines; the last: their batch was cancelled or has expired
ENDS = ("completed", "failed", "expired", "cancelled")  # of batches
ENDED = "ended:"  # what the count of such an end begins with

# KEYS: batch key, figures key. ARGV: their life in seconds, the time, then counts of the batch and their
# values. Counts only grow: who begins a batch again knows less of it at first. One that is gone
# stays so.
NOTE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return end
for at = 3, #ARGV, 2 do
  local more = tonumber(ARGV[at + 1]) - tonumber(redis.call('HGET', KEYS[1], ARGV[at]) or 0)
  if more > 0 then
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1], 'progressed_at', ARGV[2])
    redis.call('HINCRBY', KEYS[2], ARGV[at], more)
    redis.call('EXPIRE', KEYS[2], ARGV[1])
  end
end
"""


def queue_note(pipe: Pipeline, batch_id: str, counts: dict[str, int]) -> None:
    """Note how far a batch is."""
    pairs = [each for pair in counts.items() for each in pair]
    pipe.eval(NOTE, 2, batch_key(batch_id), BATCH_FIGURES, FILE_TTL_S, int(time.time()), *pairs)


def queue_created(pipe: Pipeline, created_at: int) -> None:
    """A batch was made: should none be waiting, it is the oldest."""
    pipe.hsetnx(BATCH_FIGURES, "oldest_at", created_at)
    pipe.hsetnx(BATCH_FIGURES, "progressed_at", created_at)
    pipe.expire(BATCH_FIGURES, FILE_TTL_S)


@dataclass(frozen=True, slots=True)
class Backlog:
    """The work that waits, over all batches that have not ended. Times: wall clock, s."""

    lines_waiting: int  # of batches that are checked
    oldest_at: int  # when the oldest batch was made
    progressed_at: int  # when the batch moved that has not moved for the longest


def queue_backlog(pipe: Pipeline, backlog: Backlog | None) -> None:
    """Note what waits; None: nothing."""
    if backlog is None:
        pipe.hdel(BATCH_FIGURES, "lines_waiting", "oldest_at", "progressed_at")
        return
    found = {"lines_waiting": backlog.lines_waiting, "oldest_at": backlog.oldest_at, "progressed_at": backlog.progressed_at}
    pipe.hset(BATCH_FIGURES, mapping=found)
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
        yield GaugeMetricFamily("penstock_batch_lines_waiting", "Their lines without an answer, of those that are checked", value=waiting)
        yield GaugeMetricFamily("penstock_batch_oldest_seconds", "Since the oldest of them was made", value=self.age("oldest_at"))
        yield GaugeMetricFamily("penstock_batch_longest_pause_seconds", "For which one of them has not moved", value=self.age("progressed_at"))
        lines = CounterMetricFamily("penstock_batch_lines", "Lines of batches that were answered, or never will be", labels=["outcome"])
        for outcome in OUTCOMES:
            lines.add_metric([outcome], self._of(outcome))
        yield lines
        ended = CounterMetricFamily("penstock_batches_ended", "Batches that have ended", labels=["status"])
        for status in ENDS:
            ended.add_metric([status], self._of(ENDED + status))
        yield ended
        yield CounterMetricFamily("penstock_batch_prompt_tokens", "Prompt tokens of lines that were answered", value=self._of("input_tokens"))
        yield CounterMetricFamily("penstock_batch_generation_tokens", "Tokens generated for them", value=self._of("output_tokens"))

    def _of(self, name: str) -> Any:
        return self.values.get(name, 0)
