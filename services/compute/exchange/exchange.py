"""Compute's side of the pipeline. Sending and collecting are apart, so that no step waits for a round trip.

Three lines: on one, candidates go out and ended requests are acknowledged; on another, a read stands that Redis answers as soon as
there are decisions or control messages; on the third, one that it answers as soon as there are prompts. Whatever goes wrong with Redis is
waited out, and what is undecided is then sent again: deciding is idempotent.

The candidates of short steps go out together: each message costs Redis, sampler and gateway a wake-up, whose caches the model has emptied
meanwhile, and on a CPU they all share the cores with the model.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from services.compute.candidates.reduction import CandidateRows
from services.compute.exchange.active import ActiveRequest
from services.compute.exchange.samplers import Samplers
from services.compute.exchange.undecided import Decision, Undecided
from services.compute.quarantine import Record, queue_records
from shared.process.telemetry import get_logger
from shared.wire.line import Line
from shared.wire.messages import Control, StepCandidates, StepDecisions
from shared.wire.redis_clock import follow_clock
from shared.wire.stage import Stage
from shared.wire.streams import CONTROL, GroupStream, attempts_key, candidates, decisions
from shared.wire.token_log import finish_ended
from shared.wire.transport import DeadLetter, Delivery, DirectReader, GroupReader, Pipeline, append

log = get_logger("penstock.compute")

STANDING_MS = 1000  # how long Redis holds a standing read before it is asked again
MAX_TAKEN = 64  # prompts in a reply: more would hold up the steps of those that run
TEND_EVERY_S = 0.1
WARN_EVERY_S = 10.0
UNKNOWN = -2  # a decision's token id: the sampler must be told about the sequence


@dataclass(slots=True)
class Inbox:
    """What has come."""

    prompts: list[Delivery] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    control: list[Control] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)


class Exchange:
    """Owns this replica's lines, its place in the prompts group, and what is undecided. `active`, by handle, is the service's."""

    def __init__(self, stage: Stage, prompts: GroupStream, active: Mapping[int, ActiveRequest], *, publish_interval_s: float = 0.0, max_held: int = 1) -> None:
        """Candidates are held back until publish_interval_s have passed since the last, for max_held steps at most."""
        self.stage = stage
        self.active = active
        self.publish_interval_s = publish_interval_s
        self.max_held = max_held
        self.prompts = GroupReader(stage.transport, prompts, stage.replica_id)
        self.decisions = DirectReader(stage.transport, decisions(stage.replica_id))
        self.control = DirectReader(stage.transport, CONTROL)
        self.samplers = Samplers(stage.replica_id, active)
        self.undecided = Undecided()
        self._out, self._news, self._requests = (Line(stage.transport.client) for _ in range(3))
        self._outgoing: list[tuple[str, StepCandidates]] = []  # to samplers, with the next write
        self._ended: dict[bytes, str] = {}  # entries to acknowledge with the next write, and their requests
        self._acknowledging: dict[bytes, str] = {}  # written, and not answered yet
        self._records: list[Record] = []  # keys to set with the next write
        self._recording: list[Record] = []  # written, and not answered yet
        self._step = time.time_ns() // 1000  # of the next message: beyond any of an earlier life of this replica
        self._num_held = 0  # steps whose rows have not been sent
        self._held_at = self._published_at = 0.0  # when the last step's rows came; when rows were last sent
        self._tended_at = self._warned_at = 0.0

    def start(self) -> None:
        self.prompts.ensure_group()
        self.control.start_at_end()

    def send(self, rows: CandidateRows, *, is_urgent: bool = True) -> None:
        """A step's rows, each to the sampler of its sequence; if they are not urgent, perhaps with the next step's.

        Returns when they are written, not when they have arrived.
        """
        now = time.monotonic()
        step_s, self._held_at = now - self._held_at, now
        self.undecided.add(rows, self._step)
        self._num_held += 1
        if is_urgent or self._num_held >= self.max_held or now + step_s > self._published_at + self.publish_interval_s:
            self._publish()
            self._flush()

    def remember(self, records: list[Record]) -> None:
        """Keys that are set with the next write."""
        self._records += records

    def publish_held(self) -> None:
        """Before something long: what is held back goes out now."""
        if self._num_held:
            self._publish()
        if self._outgoing or self._records:
            self._flush()

    def collect(self, room: int, *, wait_s: float = 0.0) -> Inbox:
        """What has come: decisions, control, and up to `room` prompts; if nothing has, waits up to wait_s for what is awaited."""
        inbox = Inbox()
        if self._num_held and (wait_s or time.monotonic() > self._published_at + self.publish_interval_s):
            self._publish()
        if self._ended or self._outgoing or self._records:
            self._flush()
        try:
            self._ask(room)
            if wait_s:
                line = self._news if self.undecided.rows or not self._requests.num_awaited else self._requests
                line.has_reply(wait_s)
            self._take_news(inbox)
            if self._requests.has_reply():
                inbox.prompts, inbox.dead = self.prompts.take(self._requests.receive()[-1])
            if self._out.has_reply():
                self._confirm()
            self._ask(room)
        except (RedisError, OSError) as error:
            self._recover(error)
        return inbox

    def tend(self) -> list[int]:
        """Now and then: ask again where samplers are silent or gone. Returns the handles of sequences that no sampler decides."""
        now = time.monotonic()
        if now - self._tended_at < TEND_EVERY_S or not self.undecided.rows:
            return []
        self._tended_at = now
        self._follow_samplers()
        self._warn_if_alone()
        samplers = {handle: self.active[handle].sampler_id for handle in self.undecided.rows}
        late = self.undecided.silent(samplers, seen_since=self.stage.sight_since)
        if late:
            log.warning("decisions are missing, sending their candidates again", num_sequences=len(late))
            self._send_again(late)
        return self.undecided.given_up()

    def follow_clock(self) -> None:
        """Now and then: what Redis' clock has done to the streams that are read here."""
        follow_clock(self.stage.transport, [self.decisions, self.control])

    def forget(self, active: ActiveRequest, *, tell_sampler: bool) -> None:
        """The request has ended: its entry is acknowledged with the next write, its sampler told unless it knows."""
        self.undecided.forget(active.sequence.handle)
        if tell_sampler:
            self.samplers.forget(active)
        self._ended[active.entry_id] = active.request.request_id

    def drop(self, active: ActiveRequest) -> None:
        """Another replica has claimed the request: it is no business of this one any more."""
        self.undecided.forget(active.sequence.handle)
        self.samplers.forget(active)

    def acknowledge(self, entry_id: bytes, request_id: str) -> None:
        """An entry whose request ended without becoming a sequence."""
        self._ended[entry_id] = request_id

    def leave(self) -> None:
        """Hand the unfinished entries to whoever claims them, and take this replica's traces away."""
        for line in (self._out, self._news, self._requests):
            line.close()
        ended = self._acknowledging | self._ended

        def fill(pipe: Pipeline) -> None:
            finish_ended(pipe, self.prompts.stream, ended)
            pipe.delete(self.decisions.stream.key)

        self.stage.transport.run(fill)
        self.prompts.release_all()

    def _ask(self, room: int) -> None:
        """Leave the reads standing."""
        if not self._news.num_awaited:
            last_ids = {self.decisions.stream.key: self.decisions.last_id, CONTROL.key: self.control.last_id}
            self._news.send(lambda pipe: pipe.xread(last_ids, block=STANDING_MS))
        if room > 0 and not self._requests.num_awaited:
            self._requests.send(lambda pipe: self.prompts.queue_read(pipe, count=min(room, MAX_TAKEN), block_ms=STANDING_MS))

    def _take_news(self, inbox: Inbox) -> None:
        if not self._news.has_reply():
            return
        reply = self._news.receive()[-1]
        inbox.control = self.control.take(reply)
        for message in self.decisions.take(reply):
            inbox.decisions += self._settle(message)
        self.stage.transport.backoff.succeeded()

    def _settle(self, message: StepDecisions) -> list[Decision]:
        self.undecided.heard(message.sampler_id)
        columns = (message.handles, message.positions, message.token_ids, message.is_finished)
        found = [Decision(handle, position, token, bool(end)) for handle, position, token, end in zip(*(each.tolist() for each in columns), strict=True)]
        unknown = {each.handle for each in found if each.token_id == UNKNOWN and each.position in self.undecided.rows.get(each.handle, {})}
        if unknown:
            self._send_again(sorted(unknown))
        return self.undecided.settle(message.step, [each for each in found if each.token_id != UNKNOWN])

    def _follow_samplers(self) -> None:
        """When samplers come or go, what is undecided of the sequences that move goes to their new ones."""
        moved = self.samplers.follow(self.stage.registry.ids("sampler", self.stage.model))
        self._send_again(moved)

    def _send_again(self, handles: list[int]) -> None:
        """All that is undecided of some sequences, with their introductions."""
        self.samplers.reintroduce(handles)
        self._address(self.undecided.of(handles))

    def _publish(self) -> None:
        """What was held back goes out with the next write."""
        self._follow_samplers()
        self._address(self.undecided.unsent())
        self._num_held, self._published_at = 0, time.monotonic()

    def _address(self, rows: CandidateRows | None) -> None:
        if rows is not None:
            self._outgoing += self.samplers.address(rows, self._step)
            self._step += 1

    def _flush(self) -> None:
        """Write what is to go out. What was written before has been answered by now, or nearly."""
        try:
            if self._out.num_awaited:
                self._confirm()
            outgoing, ended, records = self._outgoing, self._ended, self._records
            self._outgoing, self._ended, self._acknowledging = [], {}, ended
            self._records, self._recording = [], records
            self._out.send(lambda pipe: self._fill(pipe, outgoing, ended, records))
        except (RedisError, OSError) as error:
            self._recover(error)

    def _fill(self, pipe: Pipeline, outgoing: list[tuple[str, StepCandidates]], ended: dict[bytes, str], records: list[Record]) -> None:
        queue_records(pipe, records)
        for sampler_id, message in outgoing:
            append(pipe, candidates(sampler_id), message)
        finish_ended(pipe, self.prompts.stream, ended)
        if ended:
            pipe.delete(*map(attempts_key, ended.values()))
        self.decisions.trim_now_and_then(pipe)

    def _confirm(self) -> None:
        """What was written has arrived. Raises what Redis said instead."""
        self._out.receive()
        self._acknowledging, self._recording = {}, []

    def _recover(self, error: Exception) -> None:
        """Wait until Redis can serve, and begin anew: nobody knows what arrived. Raises if the error is not temporary."""
        for line in (self._out, self._news, self._requests):
            line.close()
        self._ended, self._acknowledging = self._acknowledging | self._ended, {}
        self._records, self._recording = self._recording + self._records, []
        self._outgoing.clear()
        self.stage.transport.wait_out(error)
        self._send_again(list(self.undecided.rows))

    def _warn_if_alone(self) -> None:
        if not self.samplers.live and time.monotonic() - self._warned_at > WARN_EVERY_S:
            self._warned_at = time.monotonic()
            log.warning("no sampler of this model is alive, waiting for one", model=self.stage.model)
