"""Outbox: what goes out to samplers and to Redis, written without waiting for the reply.

The candidates of short steps go out together: each message costs Redis, sampler and gateway a
wake-up, whose caches the model has emptied meanwhile, and on a CPU they all share the cores with
the model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.compute.exchange.active import Record, queue_records
from services.compute.exchange.prefixes import Prefixes
from shared.wire.entries import DirectReader, append
from shared.wire.line import Pipeline, RedisConnection
from shared.wire.messages import StepCandidates
from shared.wire.streams import GroupStream, attempts_key, candidates
from shared.wire.token_log import finish_ended


@dataclass(slots=True)
class Write:
    """The commands of one write."""

    messages: list[tuple[str, StepCandidates]] = field(default_factory=list)  # by sampler
    # entries to acknowledge, and their requests
    ended: dict[bytes, str] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)  # keys to set

    def __bool__(self) -> bool:
        return bool(self.messages or self.ended or self.records)


class Outbox:
    """A line to write on, and the commands of the next write. decisions: the stream that is trimmed with
    the writes; prefixes: are written with them.

    Steps are held back until publish_interval_s have passed since the last were sent, max_held of
    them at most.
    """

    def __init__(
        self,
        line: RedisConnection,
        prompts: GroupStream,
        decisions: DirectReader,
        prefixes: Prefixes,
        *,
        publish_interval_s: float,
        max_held: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.line = line
        self.prompts = prompts
        self.decisions = decisions
        self.prefixes = prefixes
        self.publish_interval_s = publish_interval_s
        self.max_held = max_held
        self.next = Write()
        self.unanswered = Write()
        self.num_held = 0  # steps whose rows have not been queued
        # when the last step's rows came; when rows were last queued
        self._held_at = self._published_at = 0.0

    def hold(self, *, is_urgent: bool) -> bool:
        """A step has rows. Returns whether they go out now, with all that is held back."""
        now = self.clock()
        step_s, self._held_at = now - self._held_at, now
        self.num_held += 1
        return (
            is_urgent or self.num_held >= self.max_held or now + step_s > self._published_at + self.publish_interval_s
        )

    def is_overdue(self) -> bool:
        """Whether the rows that are held back have waited for the interval."""
        return self.clock() > self._published_at + self.publish_interval_s

    def queue(self, messages: list[tuple[str, StepCandidates]]) -> None:
        """Messages for the next write, by sampler."""
        self.next.messages += messages

    def rows_are_queued(self) -> None:
        """Note that nothing is held back any more."""
        self.num_held, self._published_at = 0, self.clock()

    def flush(self) -> None:
        """Write the next commands. Redis has answered the last by now, or nearly. Raises redis-py's
        errors."""
        if self.line.num_awaited:
            self.confirm()
        write, self.next = self.next, Write()
        self.unanswered = write
        self.line.send(lambda pipe: self._fill(pipe, write))

    def confirm(self) -> None:
        """Wait for the answer to the last write. Raises redis-py's errors."""
        self.line.receive()
        self.unanswered = Write()

    def start_over(self) -> None:
        """The last write may not have arrived: the next one repeats it, without the messages to samplers,
        which are made again."""
        self.line.close()
        self.next = Write([], self.unanswered.ended | self.next.ended, self.unanswered.records + self.next.records)
        self.unanswered = Write()
        self.prefixes.start_over()

    def _fill(self, pipe: Pipeline, write: Write) -> None:
        queue_records(pipe, write.records)
        for sampler_id, message in write.messages:
            append(pipe, candidates(sampler_id), message)
        finish_ended(pipe, self.prompts, write.ended)
        if write.ended:
            pipe.delete(*map(attempts_key, write.ended.values()))
        self.decisions.trim_now_and_then(pipe)
        self.prefixes.queue(pipe)
