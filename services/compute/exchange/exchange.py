"""Compute's side of the pipeline: one Redis round trip a step.

A trip sends the step's candidates, acknowledges what has ended, asks for new prompts and waits for decisions, all in one pipeline. While
decisions are missing it waits on, and sends the undecided rows again, elsewhere if their sampler has gone: deciding is idempotent.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import redis

from services.compute.candidates.reduction import CandidateRows
from services.compute.sequence import Sequence
from shared.messages import Control, SequenceIntro, StepDecisions, TokenizedRequest
from shared.registry import choose_replica
from shared.stage import Stage
from shared.streams import CONTROL, GroupStream, candidates, decisions
from shared.telemetry import get_logger
from shared.transport import DeadLetter, Delivery, DirectReader, GroupReader, Pipeline, append

log = get_logger("penstock.compute")

WAIT_MS = 200  # for decisions, before looking whether their sampler is still there
RESEND_AFTER_S = 2.0  # a live sampler answers in milliseconds; it may have lost its memory, or Redis the message
MAX_SENDS = 20  # of the same rows; what no sampler has answered then, none will
IDLE_WAIT_MS = 200  # for prompts, with nothing to compute
PROMPT_TAIL = 8  # last prompt tokens that seed the detokenizer
WARN_EVERY_S = 10.0


@dataclass(slots=True)
class Inbox:
    """What one exchange brought."""

    prompts: list[Delivery] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    control: list[Control] = field(default_factory=list)
    token_by_handle: dict[int, tuple[int, bool]] = field(default_factory=dict)  # the token, and whether the sequence has ended
    unanswered: list[int] = field(default_factory=list)  # handles whose rows were sent too often


class Exchange:
    """Owns this replica's connection: its decisions stream, its place in the prompts group, and which sampler knows which sequence."""

    def __init__(self, stage: Stage, prompts: GroupStream) -> None:
        self.stage = stage
        self.prompts = GroupReader(stage.transport, prompts, stage.replica_id)
        self.decisions = DirectReader(stage.transport, decisions(stage.replica_id))
        self.control = DirectReader(stage.transport, CONTROL)
        self.request_by_handle: dict[int, TokenizedRequest] = {}
        self.gateway_by_handle: dict[int, str | None] = {}
        self._sampler_by_handle: dict[int, str] = {}
        self._forget: dict[str, list[int]] = defaultdict(list)  # by sampler: handles it need not remember
        self._done: list[bytes] = []  # entries to acknowledge with the next trip
        self.publish_s = 0.0  # of the last exchange: what it took to write its messages
        self._step = 0
        self._warned_at = 0.0

    def start(self) -> None:
        self.prompts.ensure_group()
        self.control.start_at_end()

    def introduce(self, sequence: Sequence, request: TokenizedRequest) -> None:
        """From now on rows of this sequence may be exchanged."""
        self.request_by_handle[sequence.handle] = request
        self.gateway_by_handle[sequence.handle] = request.gateway_id

    def forget(self, sequence: Sequence, entry_id: bytes, *, tell_sampler: bool) -> None:
        """The sequence has ended: its entry is acknowledged with the next trip, its sampler told unless it knows."""
        self.request_by_handle.pop(sequence.handle)
        self.gateway_by_handle.pop(sequence.handle)
        sampler_id = self._sampler_by_handle.pop(sequence.handle, None)
        if tell_sampler and sampler_id is not None:
            self._forget[sampler_id].append(sequence.handle)
        self._done.append(entry_id)

    def acknowledge(self, entry_id: bytes) -> None:
        """An entry whose request ended without becoming a sequence."""
        self._done.append(entry_id)

    def wait(self, room: int) -> Inbox:
        """Nothing to compute: wait for prompts, or for control."""
        inbox = Inbox()
        self._trip(inbox, [], room, block_prompts=room > 0)
        return inbox

    def poll(self, room: int) -> Inbox:
        """A step without decisions (all of it chunks of prompts): look without waiting."""
        self.publish_s = 0.0
        inbox = Inbox()
        self._trip(inbox, [], room, block_prompts=False)
        return inbox

    def decide(self, rows: CandidateRows, room: int) -> Inbox:
        """Send the rows' candidates and wait for all their decisions, through any number of samplers coming and going.

        Comes back early, with some undecided, if the stage is told to stop: whoever claims those sequences asks again.
        """
        self._step += 1
        self.publish_s = 0.0
        inbox = Inbox()
        row_by_handle = {sequence.handle: row for row, sequence in enumerate(rows.sequences)}
        expected = {sequence.handle: sequence.next_position for sequence in rows.sequences}
        sent_at, num_sends = 0.0, 0
        while expected and not self.stage.stopping.is_set():
            live = self.stage.registry.ids("sampler")
            has_gone = any(self._sampler_by_handle.get(handle) not in live for handle in expected)
            if num_sends and time.monotonic() - sent_at > RESEND_AFTER_S:
                for handle in expected:  # with their introductions, in case the sampler has forgotten them
                    self._sampler_by_handle.pop(handle, None)
                log.warning("decisions are missing, sending their candidates again", num_rows=len(expected))
                has_gone = True
            if num_sends == MAX_SENDS:
                inbox.unanswered = list(expected)
                return inbox
            began_at = time.perf_counter()
            if (not num_sends or has_gone) and live:
                messages = list(self._address(rows, [row_by_handle[handle] for handle in expected], live))
                sent_at, num_sends = time.monotonic(), num_sends + 1
            else:
                messages = []
                self._warn_if_alone(live)
            self.publish_s += time.perf_counter() - began_at
            self._trip(inbox, messages, room, expected=expected)
            room = 0  # asked once a step
        return inbox

    def leave(self, pending: list[bytes]) -> None:
        """Hand the unfinished entries to whoever claims them, and take this replica's traces away."""

        def fill(pipe: Pipeline) -> None:
            self.prompts.finish(pipe, self._done)
            self.prompts.release(pipe, pending)
            if not pending:
                self.prompts.leave(pipe)
            pipe.delete(self.decisions.stream.key)

        self.stage.transport.run(fill)

    def _address(self, rows: CandidateRows, which: list[int], live: set[str]) -> Iterator[tuple[str, object]]:
        """One message per sampler, each sequence to the one that rendezvous hashing gives it."""
        rows_by_sampler: dict[str, list[int]] = defaultdict(list)
        for row in which:
            sampler_id = choose_replica(rows.sequences[row].request_id, live)
            assert sampler_id is not None
            rows_by_sampler[sampler_id].append(row)
        for sampler_id, own in rows_by_sampler.items():
            intros = tuple(self._intro(rows.sequences[row]) for row in own if self._sampler_by_handle.get(rows.sequences[row].handle) != sampler_id)
            for row in own:
                handle = rows.sequences[row].handle
                previous = self._sampler_by_handle.get(handle)
                if previous is not None and previous != sampler_id and previous in live:
                    self._forget[previous].append(handle)
                self._sampler_by_handle[handle] = sampler_id
            yield sampler_id, rows.for_sampler(own, self.stage.replica_id, self._step, intros, self._forget.pop(sampler_id, []))

    def _intro(self, sequence: Sequence) -> SequenceIntro:
        request = self.request_by_handle[sequence.handle]
        return SequenceIntro(
            handle=sequence.handle,
            request_id=sequence.request_id,
            gateway_id=self.gateway_by_handle[sequence.handle],
            params=sequence.params,
            eos_token_ids=sequence.eos_token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            prompt_tail=request.prompt_token_ids[-PROMPT_TAIL:],
            echo_text=request.echo_text,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _trip(
        self, inbox: Inbox, messages: list[tuple[str, object]], room: int, *, expected: dict[int, int] | None = None, block_prompts: bool = False
    ) -> None:
        """The one round trip. Fills the inbox and takes from `expected` what was decided."""
        done = list(self._done)

        def fill(pipe: Pipeline) -> None:
            began_at = time.perf_counter()
            for sampler_id, message in messages:
                append(pipe, candidates(sampler_id), message)
            self.publish_s += time.perf_counter() - began_at
            self.prompts.finish(pipe, done)
            self.decisions.trim(pipe)
            if room > 0:
                self.prompts.queue_read(pipe, count=room, block_ms=IDLE_WAIT_MS if block_prompts else None)
            block = WAIT_MS if expected else (IDLE_WAIT_MS if room == 0 and expected is None and block_prompts else None)
            pipe.xread({self.decisions.stream.key: self.decisions.last_id, CONTROL.key: self.control.last_id}, block=block)

        replies = self._run(fill)
        del self._done[: len(done)]
        if room > 0:
            prompts, dead = self.prompts.take(replies[-2])
            inbox.prompts.extend(prompts)
            inbox.dead.extend(dead)
        inbox.control.extend(self.control.take(replies[-1]))
        for message in self.decisions.take(replies[-1]):
            self._apply(message, inbox, expected or {})

    def _run(self, fill: Callable[[Pipeline], None]) -> list[Any]:
        """One pipeline; where Redis has come back empty, once more with a new group. Sending twice is harmless."""
        try:
            return self.stage.transport.run(fill)
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            log.warning("redis has lost its data", error=str(error)[-120:])
            self.prompts.ensure_group()
            self.decisions.last_id = self.control.last_id = "0-0"
            return self.stage.transport.run(fill)

    def _apply(self, message: StepDecisions, inbox: Inbox, expected: dict[int, int]) -> None:
        """Take the decisions that are awaited; a repeated one, or one of an earlier step, is nobody's."""
        rows = zip(message.handles.tolist(), message.positions.tolist(), message.token_ids.tolist(), message.is_finished.tolist(), strict=True)
        for handle, position, token_id, is_finished in rows:
            if expected.get(handle) == position:
                del expected[handle]
                inbox.token_by_handle[handle] = (token_id, bool(is_finished))

    def _warn_if_alone(self, live: set[str]) -> None:
        if not live and time.monotonic() - self._warned_at > WARN_EVERY_S:
            self._warned_at = time.monotonic()
            log.warning("no sampler is alive, waiting for one")
