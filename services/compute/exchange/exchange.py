"""Compute's side of the pipeline. Sending and collecting are apart, so that no step waits for a
round trip.

Redis errors are retried until Redis serves again. Then all undecided rows are sent again: deciding is
idempotent.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from services.compute.cache.block_manager import BlockManager
from services.compute.candidates.rows import CandidateRows
from services.compute.exchange.active import ActiveRequest, Decision, Record
from services.compute.exchange.inbox import Inbox
from services.compute.exchange.outbox import Outbox
from services.compute.exchange.prefixes import Prefixes
from services.compute.exchange.samplers import Samplers
from services.compute.exchange.undecided import Undecided
from shared.model.arrays import Array
from shared.process.telemetry import get_logger
from shared.wire.entries import DeadLetter, Delivery, DirectReader, GroupReader
from shared.wire.line import Pipeline, RedisConnection
from shared.wire.messages import Control, Moments, Offer, StepDecisions, TokenEvent
from shared.wire.offers import take_up
from shared.wire.redis_clock import follow_clock
from shared.wire.stage import Stage
from shared.wire.streams import CONTROL, decisions, offered, prompts
from shared.wire.token_log import finish_ended, write_end

log = get_logger("penstock.compute")

RESEND_EVERY_S = 0.1
WARN_EVERY_S = 10.0
UNKNOWN = -2  # a decision's token id: the sampler must be told about the sequence


@dataclass(slots=True)
class Received:
    """Messages and prompts that have come."""

    prompts: list[Delivery] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    control: list[Control] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)


class Exchange:
    """Owns this replica's lines, its place in the prompts group, and its undecided rows. `active`, by handle,
    is the service's."""

    def __init__(
        self,
        stage: Stage,
        active: Mapping[int, ActiveRequest],
        blocks: BlockManager,
        *,
        publish_interval_s: float = 0.0,
        max_held: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """blocks: tokenizers are told which of them are cached; publish_interval_s, max_held: how long
        candidates are held back, as Outbox says; clock, wall_clock: s."""
        assert stage.model is not None
        self.stage = stage
        self.model = stage.model
        self.active = active
        self.clock = clock
        self.wall_clock = wall_clock
        self.prompts = GroupReader(stage.transport, prompts(stage.model), stage.replica_id)
        self.decisions = DirectReader(stage.transport, decisions(stage.replica_id))
        self.control = DirectReader(stage.transport, CONTROL)
        self.offered = DirectReader(stage.transport, offered(stage.replica_id))
        self.prefixes = Prefixes(stage, blocks, clock)
        self.samplers = Samplers(stage.replica_id, active, stage.fingerprint)
        self.undecided = Undecided(active, clock)
        out, news, requests = (RedisConnection(stage.transport.client) for _ in range(3))
        self.outbox = Outbox(
            out,
            self.prompts.stream,
            self.decisions,
            self.prefixes,
            publish_interval_s=publish_interval_s,
            max_held=max_held,
            clock=clock,
        )
        self.inbox = Inbox(news, requests, self.prompts, self.decisions, self.control, self.offered)
        # of the next message: beyond any of an earlier life of this replica
        self._step = int(wall_clock() * 1e6)
        self._looked_at = self._warned_at = 0.0
        self.num_taken_up = 0  # prompts that came because their prefix is here

    def start(self) -> None:
        self.prompts.ensure_group()
        self.control.start_at_end()

    def send(self, rows: CandidateRows, *, is_urgent: bool = True) -> None:
        """A step's rows, each to the sampler of its sequence; if they are not urgent, perhaps with
        the next step's.

        Returns when they are written, not when they have arrived.
        """
        self.undecided.add(rows, self._step)
        if self.outbox.hold(is_urgent=is_urgent):
            self._publish()
            self._flush()

    def remember(self, records: list[Record]) -> None:
        """Keys that are set with the next write."""
        self.outbox.next.records += records

    def publish_held(self) -> None:
        """Send the rows that are held back: a long step begins."""
        if self.outbox.num_held:
            self._publish()
        if self.outbox.next.messages or self.outbox.next.records:
            self._flush()

    def receive(self, num_prompts: int, *, wait_s: float = 0.0) -> Received:
        """Receive what has come: decisions, control, and up to num_prompts prompts; if nothing has,
        waits up to wait_s for the first."""
        received, offers = Received(), list[Offer]()
        if self.outbox.num_held and (wait_s or self.outbox.is_overdue()):
            self._publish()
        if self.outbox.next:
            self._flush()
        try:
            self.inbox.ask(num_prompts)
            if wait_s:
                self.inbox.wait(wait_s, for_decisions=bool(self.undecided.handles))
            if (news := self.inbox.take_news()) is not None:
                received.control, offers = news.control, news.offers
                for message in news.decisions:
                    received.decisions += self._settle(message)
                self.stage.transport.backoff.succeeded()
            received.prompts, received.dead = self.inbox.take_prompts()
            if self.outbox.line.has_reply():
                self.outbox.confirm()
            self.inbox.ask(num_prompts)
        except (RedisError, OSError) as error:
            self._recover(error)
        if (num_left := num_prompts - len(received.prompts)) > 0 and offers:
            # the prompts left over stay on offer: any replica may steal them, this one included
            taken, dead = take_up(self.prompts, self.model, [offer.entry_id for offer in offers[:num_left]])
            received.prompts += taken
            self.num_taken_up += len(taken)
            received.dead += dead
        return received

    def resend_overdue(self) -> list[int]:
        """Now and then: ask again where samplers are silent or gone. Returns the handles of
        sequences that no sampler decides."""
        now = self.clock()
        if now - self._looked_at < RESEND_EVERY_S or not self.undecided.handles:
            return []
        self._looked_at = now
        self._follow_samplers()
        self._warn_if_alone()
        late = self.undecided.silent(seen_since=self.stage.sight_since)
        if late:
            log.warning("decisions are missing, sending their candidates again", num_sequences=len(late))
            self._send_again(late)
        return self.undecided.given_up()

    def follow_clock(self) -> None:
        """Now and then: what Redis' clock has done to the streams that are read here."""
        follow_clock(self.stage.transport, [self.decisions, self.control, self.offered])

    def tell_prefixes(self) -> None:
        """Now and then: which blocks are in the prefix cache, though nothing else is written."""
        if self.prefixes.has_readers:
            self._flush()

    def forget(self, active: ActiveRequest, *, tell_sampler: bool) -> None:
        """The request has ended: its entry is acknowledged with the next write, and its sampler told
        unless it knows."""
        if tell_sampler:
            self.samplers.forget(active)
        self.acknowledge(active.entry_id, active.message.request_id)

    def end_embedded(self, ended: Ordered[tuple[ActiveRequest, Array]]) -> None:
        """Write the ends of requests for embeddings, each with its vector: no sampler has a part in them."""
        now = self.wall_clock()

        def fill(pipe: Pipeline) -> None:
            for active, vector in ended:
                sequence, request = active.sequence, active.message
                moments = Moments(
                    request.request_id, 0, request.tokenized_at, active.scheduled_at, now, self.stage.replica_id
                )
                event = TokenEvent(
                    request.request_id,
                    0,
                    None,
                    "",
                    sequence.tokens.num_prompt,
                    sequence.num_cached_tokens,
                    finish_reason="stop",
                    embedding=vector,
                )
                write_end(pipe, self.model, event, active.gateway_id, (moments,))

        self.stage.transport.run(fill)

    def acknowledge(self, entry_id: bytes, request_id: str) -> None:
        """Acknowledge the entry of a request that has ended, with the next write."""
        self.outbox.next.ended[entry_id] = request_id

    def leave(self) -> None:
        """Leave unfinished entries to the replicas that claim them, and delete this replica's keys."""
        self.outbox.start_over()
        self.inbox.close()
        ended = self.outbox.next.ended

        def fill(pipe: Pipeline) -> None:
            finish_ended(pipe, self.prompts.stream, ended)
            pipe.delete(self.decisions.stream.key, self.offered.stream.key, self.prefixes.key)

        self.stage.transport.run(fill)
        self.prompts.release_all()

    def _settle(self, message: StepDecisions) -> list[Decision]:
        self.undecided.record_reply(message.sampler_id, message.step)
        columns = [
            message.handles.tolist(),
            message.positions.tolist(),
            message.token_ids.tolist(),
            message.is_finished.tolist(),
        ]
        decisions = [
            Decision(handle, position, token_id, bool(is_end))
            for handle, position, token_id, is_end in zip(*columns, strict=True)
        ]
        unknown = {
            decision.handle
            for decision in decisions
            if decision.token_id == UNKNOWN
            and (active := self.active.get(decision.handle)) is not None
            and decision.position in active.rows
        }
        if unknown:
            self._send_again(sorted(unknown))
        return self.undecided.settle(message.step, [decision for decision in decisions if decision.token_id != UNKNOWN])

    def _follow_samplers(self) -> None:
        """Send the undecided rows of sequences whose sampler is another now to that one."""
        moved = self.samplers.follow(self.stage.registry.ids("sampler", self.stage.model))
        self._send_again(moved)

    def _send_again(self, handles: list[int]) -> None:
        """Send all undecided rows of some sequences again, with introductions."""
        self.samplers.reintroduce(handles)
        self._address(self.undecided.of(handles, self._step))

    def _publish(self) -> None:
        """Queue the rows that were held back for the next write."""
        self._follow_samplers()
        self._address(self.undecided.unsent(self._step))
        self.outbox.rows_are_queued()

    def _address(self, rows: CandidateRows | None) -> None:
        if rows is not None:
            self.outbox.queue(self.samplers.address(rows, self._step))
            self._step += 1

    def _flush(self) -> None:
        try:
            self.outbox.flush()
        except (RedisError, OSError) as error:
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Wait until Redis can serve, and send again all that may not have arrived. Raises if the error is
        not temporary."""
        self.outbox.start_over()
        self.inbox.close()
        self.stage.transport.wait_out(error)
        self._send_again(self.undecided.handles)

    def _warn_if_alone(self) -> None:
        if not self.samplers.live and self.clock() - self._warned_at > WARN_EVERY_S:
            self._warned_at = self.clock()
            log.warning("no sampler of this model is alive, waiting for one", model=self.stage.model)
