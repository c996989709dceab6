"""Admitting prompts: a delivered message becomes a sequence, or is refused, or is a second copy of a
request that is here already."""

import itertools
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from services.compute.candidates.constraints import Constraints
from services.compute.exchange.active import ActiveRequest, Attempts, Suspect
from services.compute.exchange.exchange import Exchange
from services.compute.intake.quarantine import MAX_ALONE, Quarantine, is_poison
from services.compute.loop.engine import Engine
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.speculation.speculation import Speculation
from shared.model.dry_breakers import unpack_breakers
from shared.model.segments import layout_of, length_of
from shared.model.vision.images import place_images
from shared.process.errors import Invalid, Lost
from shared.process.telemetry import get_logger
from shared.wire.entries import DeadLetter, Delivery, write_dead_letter
from shared.wire.line import Pipeline
from shared.wire.messages import RequestError, TokenEvent, TokenizedRequest, encode
from shared.wire.offers import steal
from shared.wire.stage import Stage
from shared.wire.streams import MESSAGE, REQUEST_ID, inflight_key, reader_key, response_of, tombstone_key
from shared.wire.token_log import end_request, parse_log, queue_read

log = get_logger("penstock.compute")

CLAIM_IDLE_MS = 5000  # entries are renewed every second: idle for longer, their replica is dead
MAX_CLAIMED = 256  # at a time, with their logs
FORGET_CONSUMERS_EVERY = 30  # claims
LEFT_FOR_S = 5.0  # for a replica with the fingerprint of the request's tokens: it looks every second
REMEMBERED_S = 60.0  # so that no entry is left twice
# prompts that wait here, where tenants and priorities count; gateways admit as many by default
BACKLOG = 1024
TIMEOUT_ERROR = RequestError(
    "the request's deadline passed while it waited for its turn", 504, "deadline_s", "deadline_exceeded"
)
STEAL_EVERY_S, STEAL_BUSY_EVERY_S = 0.1, 1.0  # without sequences that wait for the reply, and with


def is_prepared(request: TokenizedRequest) -> bool:
    """Whether something is made for the request before its first step, which may kill: a grammar, or
    embeddings of images."""
    return request.constraint is not None or bool(request.images)


class Admitter:
    """Fills `active`. Every prompt that was delivered ends up there, or its entry is
    acknowledged."""

    def __init__(
        self,
        stage: Stage,
        engine: Engine,
        exchange: Exchange,
        constraints: Constraints,
        speculation: Speculation,
        active: dict[int, ActiveRequest],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """clock, wall_clock: s."""
        assert stage.model is not None
        self.clock = clock
        self.wall_clock = wall_clock
        self.stage = stage
        self.model = stage.model
        self.engine = engine
        self.scheduler = engine.scheduler
        self.exchange = exchange
        self.constraints = constraints
        self.speculation = speculation
        self.active = active
        self.images = engine.images
        self.vocab_size = engine.runner.vocab_size
        self.quarantine = Quarantine(stage.transport, active)
        self._handles = itertools.count(1)
        self._left_at: dict[bytes, float] = {}  # by entry id, when it was left to another replica
        self._num_claims = 0
        self._stole_at = 0.0
        self.num_changes = 0  # requests that have come into `active`, or have left it
        self.num_claimed = 0  # requests that were taken over from replicas that died or left
        self.num_stolen = 0  # requests that waited too long for another replica, which has their prefix

    def forget(self, active: ActiveRequest) -> None:
        """The request has ended: what was made for it is let go, and all else goes with its ActiveRequest."""
        handle = active.sequence.handle
        self.constraints.forget(handle)
        if self.images is not None:
            self.images.forget(handle)
        if (tally := self.speculation.forget(handle)).num_drafts:
            log.info(
                "drafts of a request",
                request_id=active.message.request_id,
                num_drafts=tally.num_drafts,
                num_draft_tokens=tally.num_draft_tokens,
                num_accepted_tokens=tally.num_accepted_tokens,
            )
        self.num_changes += 1
        del self.active[handle]

    @property
    def num_wanted(self) -> int:
        """How many prompts to take: for the free places in a step, and a backlog that waits here, where
        tenants and priorities count; no backlog while another replica has a free place."""
        return max(0, self.scheduler.max_num_seqs + (0 if self.num_places_elsewhere(1) else BACKLOG) - len(self.active))

    def num_places_elsewhere(self, depth: int) -> int:
        """How many sequences other replicas could take to have `depth` for each place, by their last
        figures."""
        others = [
            replica.load
            for replica in self.stage.registry.of("compute", self.model)
            if replica.replica_id != self.stage.replica_id
        ]
        return int(
            sum(max(0, depth * (load.max_num_seqs or 0) - (load.running or 0) - (load.waiting or 0)) for load in others)
        )

    def claim(self, num_wanted: int) -> None:
        """Take over what dead replicas left, and forget their names."""
        if num_wanted > 0:
            now = self.clock()
            self._left_at = {entry_id: at for entry_id, at in self._left_at.items() if now - at < REMEMBERED_S}
            left = {entry_id for entry_id, at in self._left_at.items() if now - at < LEFT_FOR_S}
            idle_ms, count = self.stage.claim_idle_ms(CLAIM_IDLE_MS), min(num_wanted, MAX_CLAIMED)
            self.admit(*self.exchange.prompts.claim(idle_ms=idle_ms, count=count, besides=left))
        self._num_claims += 1
        if self._num_claims % FORGET_CONSUMERS_EVERY == 0:
            self.exchange.prompts.forget_consumers(self.stage.registry.ids("compute", self.model))

    def steal(self) -> None:
        """Now and then, if there are free places: take prompts that wait too long for the replica that
        they were offered to."""
        now, num_free = self.clock(), self.scheduler.max_num_seqs - len(self.active)
        pause_s = STEAL_BUSY_EVERY_S if self.active else STEAL_EVERY_S
        if num_free > 0 and now - self._stole_at > pause_s and len(self.stage.registry.of("compute", self.model)) > 1:
            self._stole_at = now
            loot = steal(self.exchange.prompts, self.model, num_free)
            self.num_stolen += loot.num_stolen
            self.admit(loot.deliveries, loot.dead)

    def admit(self, deliveries: list[Delivery], dead: list[DeadLetter]) -> None:
        """New prompts become waiting sequences, unless they were cancelled meanwhile, don't fit, or
        are here already."""
        for letter in dead:
            self._end(
                letter.request_id,
                letter.gateway_id,
                letter.entry_id,
                RequestError(f"this request could not be handled: {letter.reason}"),
            )
        fresh: dict[str, Delivery] = {}
        second: list[bytes] = []  # entries of requests that are here by another entry
        known = {active.message.request_id: active for active in self.active.values()} if deliveries else {}
        for delivery in deliveries:
            request_id = delivery.message.request_id
            first = known.get(request_id) or fresh.setdefault(request_id, delivery)
            if delivery.entry_id != first.entry_id:
                second.append(delivery.entry_id)
        if second:
            self.stage.transport.run(lambda pipe: self.exchange.prompts.finish(pipe, second))
        if fresh:
            self._admit_fresh(list(fresh.values()))

    def _admit_fresh(self, deliveries: list[Delivery]) -> None:
        """Ask Redis in one round trip whether they were cancelled, for the gateways that read them, and for
        the logs of those that were claimed."""
        claimed = [delivery for delivery in deliveries if delivery.was_claimed]

        def ask(pipe: Pipeline) -> None:
            for delivery in deliveries:
                pipe.exists(tombstone_key(delivery.message.request_id))
                pipe.hget(reader_key(response_of(delivery.message.request_id)), "gateway")
            for delivery in claimed:
                queue_read(pipe, delivery.message.request_id)
                pipe.hget(inflight_key(self.model), delivery.message.request_id)

        replies = self.stage.transport.run(ask)
        known = replies[2 * len(deliveries) :]
        logs = dict(zip((delivery.entry_id for delivery in claimed), known[::2], strict=True))
        over = [
            delivery.entry_id
            for delivery, entries, in_flight in zip(claimed, known[::2], known[1::2], strict=True)
            if not entries and in_flight is None
        ]
        if over:  # they have ended, so long ago that their logs have expired
            self.stage.transport.run(lambda pipe: self.exchange.prompts.finish(pipe, over))
        admitted = []
        for delivery, is_cancelled, reader in zip(
            deliveries, replies[0 : 2 * len(deliveries) : 2], replies[1 : 2 * len(deliveries) : 2], strict=True
        ):
            if delivery.entry_id in over:
                log.info("a claimed request had ended long ago", request_id=delivery.message.request_id)
            elif is_cancelled:
                self._refuse(delivery, None)
            elif (
                active := self._make_active(
                    delivery,
                    logs.get(delivery.entry_id, []),
                    reader.decode() if reader else delivery.message.gateway_id,
                )
            ) is not None:
                admitted.append((delivery, active))
        self._begin_or_hold(admitted)

    def _make_active(self, delivery: Delivery, log_entries: Any, gateway_id: str | None) -> ActiveRequest | None:
        """A request with the tokens its log already holds; None if it has ended, or ends here."""
        request: TokenizedRequest = delivery.message
        try:
            logged = parse_log(log_entries)
        except Lost as lost:
            self._refuse(delivery, RequestError(str(lost)))
            return None
        if logged and logged[-1].finish_reason is not None:
            self.exchange.acknowledge(delivery.entry_id, request.request_id)
            return None
        if self._leave_to_matching_replica(delivery, logged):
            return None
        if (error := self._mistake(request)) is not None:
            self._refuse(delivery, error)
            return None
        try:
            sequence = self._sequence(request, logged)
        except Invalid as invalid:
            self._refuse(delivery, RequestError(str(invalid), invalid.status, invalid.param, invalid.code))
            return None
        return ActiveRequest(
            sequence,
            request,
            delivery.entry_id,
            gateway_id,
            was_claimed=delivery.was_claimed,
            num_logged_tokens=sequence.tokens.num_output,
            taken_at=self.wall_clock(),
        )

    def _leave_to_matching_replica(self, delivery: Delivery, logged: list[TokenEvent]) -> bool:
        """Leave the entry, for LEFT_FOR_S, to a replica that has the fingerprint of the request's last token,
        and a free place, if this replica has another fingerprint. Returns whether it did. If there is no
        such replica, or none takes it, this one goes on, and the next token has its fingerprint."""
        began = next((event.fingerprint for event in reversed(logged) if event.fingerprint), self.stage.fingerprint)
        if began == self.stage.fingerprint:
            return False
        equal = [
            replica.load for replica in self.stage.registry.of("compute", self.model) if replica.fingerprint == began
        ]
        has_place = any((load.running or 0) + (load.waiting or 0) < (load.max_num_seqs or 0) for load in equal)
        if not has_place or delivery.entry_id in self._left_at:
            log.warning(
                "continuing a request that another fingerprint began",
                request_id=delivery.message.request_id,
                fingerprint=self.stage.fingerprint,
                began=began,
            )
            return False
        self._left_at[delivery.entry_id] = self.clock()
        num_deliveries = 0 if delivery.was_released else 1  # the replica that runs it judges whether it is poison
        self.stage.transport.run(
            lambda pipe: self.exchange.prompts.release(pipe, [delivery.entry_id], num_deliveries=num_deliveries)
        )
        return True

    def _mistake(self, request: TokenizedRequest) -> RequestError | None:
        """The reason why this model can't run the request; None if it can."""
        length = length_of(request.segments) if request.segments else len(request.prompt_token_ids)
        num_tokens, blocks = length + (request.params.max_tokens or 0), self.scheduler.block_manager
        if request.segments and (request.params.prompt_logprobs is not None or request.embedding is not None):
            return RequestError("a prompt with modules has no logprobs, and makes no embedding", 400, "prompt_modules")
        if request.segments and (reason := self.engine.no_segments):
            return RequestError(f"prompt modules: {reason}", 400, "prompt_modules", "model_not_supported")
        if request.images and (reason := self._cannot_see(request)):
            return RequestError(reason, 400, "messages", "model_not_supported")
        longest = min(self.stage.max_model_len or num_tokens, blocks.num_blocks * blocks.block_size)
        if num_tokens > longest:
            return RequestError(
                f"the request takes up to {num_tokens} tokens, this replica {longest}", 400, "max_tokens"
            )
        if self.engine.is_encoder and request.embedding is None:
            return RequestError("this model makes embeddings, and no text", 400, "model", "model_not_supported")
        if (name := field_with_unknown_token(request, self.vocab_size)) is not None:
            return RequestError(f"{name} holds token ids outside the vocabulary, [0, {self.vocab_size})", 400, name)
        return None

    def _cannot_see(self, request: TokenizedRequest) -> str:
        """The reason why the request's images can't be encoded here; empty if they can."""
        if self.images is None:
            return "this model's compute stage reads text only: images can't be understood"
        if request.segments or request.embedding is not None or request.params.prompt_logprobs is not None:
            return "a prompt with images takes no modules, has no logprobs, and makes no embedding"
        return ""

    def _sequence(self, request: TokenizedRequest, logged: list[TokenEvent]) -> Sequence:
        layout = layout_of(request.segments, self.scheduler.block_manager.block_size)
        placed = place_images(request.prompt_token_ids, request.images, request.image_token_id)
        prompt = layout.pad(placed.token_ids.tolist())
        # the first token's entry holds them
        params = replace(request.params, prompt_logprobs=None) if logged else request.params
        scheduling = request.scheduling
        return Sequence(
            Request(
                next(self._handles),
                request.request_id,
                params,
                request.eos_token_ids,
                priority=scheduling.priority,
                arrived_at=request.created_at,
                deadline=scheduling.deadline_at if scheduling.deadline_at and not logged else None,
                group_id=scheduling.group_id or None,
                cache_salt=scheduling.cache_salt,
                tenant_id=scheduling.tenant_id,
                dry_breakers=unpack_breakers(request.dry_breakers),
                prediction=request.prediction_token_ids.tolist(),
                layout=layout,
                images=placed.runs,
                positions=placed.positions,
                position_shift=placed.position_shift,
                sees_whole_images=self.images is not None and self.images.family.num_whole > 0,
                embedding=request.embedding
                and replace(request.embedding, pooling=request.embedding.pooling or self.engine.pooling),
            ),
            Tokens(prompt + [event.token_id for event in logged if event.token_id is not None], len(prompt)),
        )

    def _begin_or_hold(self, admitted: list[tuple[Delivery, ActiveRequest]]) -> None:
        """Hand requests to the scheduler; those that were in a step when their replica died, to the
        quarantine first."""
        verdicts = self._judge(
            [(delivery, active) for delivery, active in admitted if delivery.was_claimed and not delivery.was_released]
        )
        begun = []
        for delivery, active in admitted:
            sequence, attempts = active.sequence, verdicts.get(delivery.entry_id)
            if attempts is not None and is_poison(attempts):
                self._give_up(delivery)
                continue
            self.active[sequence.handle] = active
            self.num_changes += 1
            self.num_claimed += delivery.was_claimed
            if attempts is not None:
                self.quarantine.hold(active, attempts, is_prepared=is_prepared(active.message))
                continue
            if delivery.entry_id in verdicts and sequence.tokens.num_output:
                self.quarantine.watch(active)
            begun.append(active)
        if opening := [active for active in begun if is_prepared(active.message)]:
            # a grammar may kill while it is compiled, and an image while it is encoded
            self.exchange.remember(self.quarantine.records_of(opening, has_run=True))
            self.exchange.publish_held()
        for active in begun:
            self.begin(active.sequence)

    def _judge(self, orphans: list[tuple[Delivery, ActiveRequest]]) -> dict[bytes, Attempts | None]:
        """The quarantine's verdicts on requests that dead replicas left, by entry."""
        if not orphans:
            return {}
        logged = [active.sequence.tokens.num_output for _, active in orphans]
        verdicts = self.quarantine.judge([active.message.request_id for _, active in orphans], logged)
        num_suspects = sum(attempts is not None for attempts in verdicts)
        log.info(
            "requests claimed", num_requests=len(orphans), num_logged_tokens=sum(logged), num_suspects=num_suspects
        )
        return dict(zip((delivery.entry_id for delivery, _ in orphans), verdicts, strict=True))

    def queue_compiled(self) -> list[tuple[Sequence, RequestError]]:
        """Queue the sequences whose grammars have been compiled. Returns those whose grammars can't be."""
        return self._queue_opened(self.constraints.opened())

    def encode(self) -> list[tuple[Sequence, RequestError]]:
        """Go on with images, and queue the sequences that have all of theirs. Returns those whose images
        can't be encoded, or not in time."""
        if self.images is None or not self.images.opening:
            return []
        late = [(sequence, TIMEOUT_ERROR) for sequence in self.images.expired(self.wall_clock())]
        return late or self._queue_opened(self.images.step(is_busy=bool(self.scheduler.running)))

    def _queue_opened(
        self, outcomes: list[tuple[Sequence, RequestError | None]]
    ) -> list[tuple[Sequence, RequestError]]:
        """Queue those without an error, and return the others."""
        for sequence in [sequence for sequence, error in outcomes if error is None]:
            self.queue(sequence)
            active = self.active[sequence.handle]
            if self.is_scheduled(active):
                self.exchange.remember(self.quarantine.records_of([active], has_run=False))
        return [(sequence, error) for sequence, error in outcomes if error is not None]

    def begin(self, sequence: Sequence) -> None:
        """Hand a sequence to the scheduler; with a constraint, once its grammar is compiled."""
        constraint = self.active[sequence.handle].message.constraint
        if constraint is None:
            self.queue(sequence)
        else:
            self.constraints.open(sequence, constraint)

    def queue(self, sequence: Sequence) -> None:
        """The sequence waits for its turn; with images, once they are embeddings."""
        request = self.active[sequence.handle].message
        if self.images is None or not request.images or self.images.has(sequence, request.images):
            self.scheduler.add(sequence)
        else:
            self.images.open(sequence, response_of(sequence.request.request_id), request.images)

    def is_scheduled(self, active: ActiveRequest) -> bool:
        """Whether the scheduler has it, among those that wait or those that run."""
        handle = active.sequence.handle
        is_opening = handle in self.constraints.opening or (self.images is not None and handle in self.images.opening)
        return not isinstance(active.quarantine, Suspect) and not is_opening

    def _give_up(self, delivery: Delivery) -> None:
        """End a request that killed replicas, the last ones when it ran alone."""
        request = delivery.message
        reason = f"it crashed {MAX_ALONE} compute replicas in a row while it ran alone"
        values = {MESSAGE: encode(request), REQUEST_ID: request.request_id.encode()}
        self.stage.transport.run(
            lambda pipe: write_dead_letter(self.exchange.prompts.stream.key, values, RuntimeError(reason), 1, pipe)
        )
        self._refuse(delivery, RequestError(f"this request could not be handled: {reason}"))

    def _refuse(self, delivery: Delivery, error: RequestError | None) -> None:
        """A request that will not run: cancelled, or with an error."""
        self._end(delivery.message.request_id, delivery.message.gateway_id, delivery.entry_id, error)

    def _end(self, request_id: str, gateway_id: str | None, entry_id: bytes, error: RequestError | None) -> None:
        self.stage.transport.run(lambda pipe: end_request(pipe, self.model, request_id, gateway_id, error=error))
        self.exchange.acknowledge(entry_id, request_id)


def field_with_unknown_token(request: TokenizedRequest, vocab_size: int) -> str | None:
    """The field that names a token outside this model's vocabulary. Such an index would crash a GPU's
    context, with all that it computes."""
    # TokenizedRequest has checked that none is negative
    params, prompt = request.params, request.prompt_token_ids
    named = {
        "prompt": (int(prompt.max()),),
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": itertools.chain.from_iterable(params.bad_words_token_ids),
        "eos_token_ids": request.eos_token_ids,
    }
    return next(
        (name for name, token_ids in named.items() if any(not 0 <= token_id < vocab_size for token_id in token_ids)),
        None,
    )
