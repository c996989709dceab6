"""Admitting prompts: a claimed message becomes a sequence, or is refused, or is a second copy of
one that is here."""

import itertools
import time
from typing import Any

from msgspec.structs import replace

from services.compute.candidates.constraints import Constraints
from services.compute.exchange.active import ActiveRequest
from services.compute.exchange.exchange import Exchange
from services.compute.intake.quarantine import Attempts, Quarantine
from services.compute.loop.engine import Engine
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.speculation.speculation import Speculation
from shared.model.dry_breakers import unpack_breakers
from shared.model.segments import Layout, length_of
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
LEFT_FOR_S = 5.0  # what another fingerprint began: its replicas look for it every second
REMEMBERED_S = 60.0  # so that nothing is left twice
# prompts that wait here, where tenants and priorities count; gateways admit as many by default
BACKLOG = 1024
TIMEOUT_ERROR = RequestError("the request's deadline passed while it waited for its turn", 504, "deadline_s", "deadline_exceeded")
STEAL_EVERY_S, STEAL_BUSY_EVERY_S = 0.1, 1.0  # without sequences that wait for the reply, and with


def is_prepared(request: TokenizedRequest) -> bool:
    """Whether something is made for the request before its first step, which may kill: a grammar, or
    embeddings of images."""
    return request.constraint is not None or bool(request.images)


class Admitter:
    """Fills `active`. Every prompt that was delivered ends up there, or its entry is
    acknowledged."""

    def __init__(
        self, stage: Stage, engine: Engine, exchange: Exchange, constraints: Constraints, speculation: Speculation, active: dict[int, ActiveRequest]
    ) -> None:
        assert stage.model is not None
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
        self.quarantine = Quarantine(stage.transport)
        self._handle_by_request: dict[str, int] = {}
        self._handles = itertools.count(1)
        self._left_at: dict[bytes, float] = {}  # by entry id, when it was left to another replica
        self._num_claims = 0
        self._stole_at = 0.0
        self.num_changes = 0  # requests that have come into `active`, or have left it
        self.num_claimed = 0  # requests that were taken over from replicas that died or left
        self.num_stolen = 0  # that waited too long for another, which has their prefix

    def handles_of(self, request_ids: tuple[str, ...]) -> list[int]:
        """Handles of the requests among these that this replica has."""
        return [self._handle_by_request[each] for each in dict.fromkeys(request_ids) if each in self._handle_by_request]

    def forget(self, active: ActiveRequest) -> None:
        """The request has ended."""
        self.quarantine.forget(active.sequence)
        self.constraints.forget(active.sequence.handle)
        if self.images is not None:
            self.images.forget(active.sequence.handle)
        if (tally := self.speculation.forget(active.sequence.handle)).num_drafts:
            log.info(
                "drafts of a request", request_id=active.message.request_id, num_drafts=tally.num_drafts, num_draft_tokens=tally.num_draft_tokens,
                num_accepted_tokens=tally.num_accepted_tokens,
            )  # fmt: skip
        self.num_changes += 1
        del self.active[active.sequence.handle], self._handle_by_request[active.message.request_id]

    @property
    def num_wanted(self) -> int:
        """How many prompts to take: for the free places in a step, and a backlog to wait here,
        where tenants and priorities count.

        But nothing waits here that another replica could begin at once.
        """
        return max(0, self.scheduler.max_num_seqs + (0 if self.num_places_elsewhere(1) else BACKLOG) - len(self.active))

    def num_places_elsewhere(self, depth: int) -> int:
        """How many sequences other replicas lack that are to have `depth` for each place, as they
        said last."""
        others = [each.load for each in self.stage.registry.of("compute", self.model) if each.replica_id != self.stage.replica_id]
        return int(sum(max(0, depth * (load.max_num_seqs or 0) - (load.running or 0) - (load.waiting or 0)) for load in others))

    def claim(self, num_wanted: int) -> None:
        """Take over what dead replicas left, and forget their names."""
        if num_wanted > 0:
            now = time.monotonic()
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
        now, num_free = time.monotonic(), self.scheduler.max_num_seqs - len(self.active)
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
            self._end(letter.request_id, letter.gateway_id, letter.entry_id, RequestError(f"this request could not be handled: {letter.reason}"))
        fresh: dict[str, Delivery] = {}
        second: list[bytes] = []  # copies of what is here
        for delivery in deliveries:
            request_id = delivery.message.request_id
            handle = self._handle_by_request.get(request_id)
            known = fresh.setdefault(request_id, delivery).entry_id if handle is None else self.active[handle].entry_id
            if delivery.entry_id != known:
                second.append(delivery.entry_id)
        if second:
            self.stage.transport.run(lambda pipe: self.exchange.prompts.finish(pipe, second))
        if fresh:
            self._admit_fresh(list(fresh.values()))

    def _admit_fresh(self, deliveries: list[Delivery]) -> None:
        """One round trip for what Redis knows of them: whether they were cancelled, who reads them,
        and the logs of those that were claimed."""
        claimed = [each for each in deliveries if each.was_claimed]

        def ask(pipe: Pipeline) -> None:
            for delivery in deliveries:
                pipe.exists(tombstone_key(delivery.message.request_id))
                pipe.hget(reader_key(response_of(delivery.message.request_id)), "gateway")
            for delivery in claimed:
                queue_read(pipe, delivery.message.request_id)
                pipe.hget(inflight_key(self.model), delivery.message.request_id)

        replies = self.stage.transport.run(ask)
        known = replies[2 * len(deliveries) :]
        logs = dict(zip((each.entry_id for each in claimed), known[::2], strict=True))
        over = [each for each, entries, in_flight in zip(claimed, known[::2], known[1::2], strict=True) if not entries and in_flight is None]
        if over:  # they have ended, so long ago that their logs have expired
            self.stage.transport.run(lambda pipe: self.exchange.prompts.finish(pipe, [each.entry_id for each in over]))
        admitted = []
        for delivery, is_cancelled, reader in zip(deliveries, replies[0 : 2 * len(deliveries) : 2], replies[1 : 2 * len(deliveries) : 2], strict=True):
            if any(delivery is each for each in over):
                log.info("a claimed request had ended long ago", request_id=delivery.message.request_id)
            elif is_cancelled:
                self._refuse(delivery, None)
            elif (active := self._open(delivery, logs.get(delivery.entry_id, []), reader.decode() if reader else delivery.message.gateway_id)) is not None:
                admitted.append((delivery, active))
        self._begin(admitted)

    def _open(self, delivery: Delivery, log_entries: Any, gateway_id: str | None) -> ActiveRequest | None:
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
        if self._is_another_s(delivery, logged):
            return None
        if (error := self._mistake(request)) is not None:
            self._refuse(delivery, error)
            return None
        try:
            sequence = self._sequence(request, logged)
        except Invalid as invalid:
            self._refuse(delivery, RequestError(str(invalid), invalid.status, invalid.param, invalid.code))
            return None
        return ActiveRequest(sequence, request, delivery.entry_id, gateway_id, was_claimed=delivery.was_claimed, num_logged_tokens=sequence.tokens.num_output)

    def _is_another_s(self, delivery: Delivery, logged: list[TokenEvent]) -> bool:
        """Whether a replica has the fingerprint of the request's last token, and a free place, and
        this one has another: the entry is left to it, for LEFT_FOR_S. If none has, or none takes it,
        this one goes on, and the next token says so."""
        began = next((event.fingerprint for event in reversed(logged) if event.fingerprint), self.stage.fingerprint)
        if began == self.stage.fingerprint:
            return False
        equal = [each.load for each in self.stage.registry.of("compute", self.model) if each.fingerprint == began]
        has_place = any((load.running or 0) + (load.waiting or 0) < (load.max_num_seqs or 0) for load in equal)
        if not has_place or delivery.entry_id in self._left_at:
            log.warning("goes on with what another fingerprint began", request_id=delivery.message.request_id, fingerprint=self.stage.fingerprint, began=began)
            return False
        self._left_at[delivery.entry_id] = time.monotonic()
        num_deliveries = 0 if delivery.was_released else 1  # who died with it is judged by whoever runs it
        self.stage.transport.run(lambda pipe: self.exchange.prompts.release(pipe, [delivery.entry_id], num_deliveries=num_deliveries))
        return True

    def _mistake(self, request: TokenizedRequest) -> RequestError | None:
        """Why this model can't run the request; None: it can."""
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
            return RequestError(f"the request takes up to {num_tokens} tokens, this replica {longest}", 400, "max_tokens")
        if self.engine.is_encoder and request.embedding is None:
            return RequestError("this model makes embeddings, and no text", 400, "model", "model_not_supported")
        if (name := field_with_unknown_token(request, self.vocab_size)) is not None:
            return RequestError(f"{name} holds token ids outside the vocabulary, [0, {self.vocab_size})", 400, name)
        return None

    def _cannot_see(self, request: TokenizedRequest) -> str:
        """Why the request's images can't be understood here; empty: they can."""
        if self.images is None:
            return "this model's compute stage reads text only: images can't be understood"
        if request.segments or request.embedding is not None or request.params.prompt_logprobs is not None:
            return "a prompt with images takes no modules, has no logprobs, and makes no embedding"
        return ""

    def _sequence(self, request: TokenizedRequest, logged: list[TokenEvent]) -> Sequence:
        layout = Layout(request.segments, self.scheduler.block_manager.block_size) if request.segments else None
        placed = place_images(request.prompt_token_ids, request.images, request.image_token_id)
        prompt = placed.token_ids.tolist() if layout is None else layout.pad(placed.token_ids.tolist())
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
                embedding=request.embedding and replace(request.embedding, pooling=request.embedding.pooling or self.engine.pooling),
            ),
            Tokens(prompt + [event.token_id for event in logged if event.token_id is not None], len(prompt)),
        )

    def _begin(self, admitted: list[tuple[Delivery, ActiveRequest]]) -> None:
        """Hand requests to the scheduler; those that a replica died with, to the quarantine
        first."""
        verdicts = self._judge([(delivery, active) for delivery, active in admitted if delivery.was_claimed and not delivery.was_released])
        begun = []
        for delivery, active in admitted:
            sequence, attempts = active.sequence, verdicts.get(delivery.entry_id)
            if attempts is not None and attempts.is_poison:
                self._give_up(delivery)
                continue
            self.active[sequence.handle] = active
            self.num_changes += 1
            self.num_claimed += delivery.was_claimed
            self._handle_by_request[sequence.request.request_id] = sequence.handle
            if attempts is not None:
                self.quarantine.hold(sequence, attempts, is_prepared=is_prepared(active.message))
                continue
            if delivery.entry_id in verdicts and sequence.tokens.num_output:
                self.quarantine.watch(sequence)
            begun.append(active)
        if opening := [active.sequence for active in begun if is_prepared(active.message)]:
            # a grammar may kill while it is compiled, and an image while it is encoded
            self.exchange.remember(self.quarantine.told(opening, has_run=True))
            self.exchange.publish_held()
        for active in begun:
            self.begin(active.sequence)

    def _judge(self, orphans: list[tuple[Delivery, ActiveRequest]]) -> dict[bytes, Attempts | None]:
        """The quarantine's verdicts on requests that dead replicas left, by entry."""
        if not orphans:
            return {}
        logged = [active.sequence.tokens.num_output for _, active in orphans]
        found = self.quarantine.judge([active.message.request_id for _, active in orphans], logged)
        num_suspects = sum(each is not None for each in found)
        log.info("requests claimed", num_requests=len(orphans), num_logged_tokens=sum(logged), num_suspects=num_suspects)
        return dict(zip((delivery.entry_id for delivery, _ in orphans), found, strict=True))

    def open(self) -> list[tuple[Sequence, RequestError]]:
        """Sequences whose grammars are compiled now wait like any other. Returns those of which that
        failed."""
        return self._opened(self.constraints.opened())

    def encode(self) -> list[tuple[Sequence, RequestError]]:
        """Go on with images. Sequences that have all of theirs wait like any other. Returns those that
        will not get one, or not in time."""
        if self.images is None or not self.images.opening:
            return []
        late = [(sequence, TIMEOUT_ERROR) for sequence in self.images.expired(time.time())]
        return late or self._opened(self.images.step(is_busy=bool(self.scheduler.running)))

    def _opened(self, found: list[tuple[Sequence, RequestError | None]]) -> list[tuple[Sequence, RequestError]]:
        """Queue those without an error, and return the others."""
        for sequence in [sequence for sequence, error in found if error is None]:
            self.queue(sequence)
            if self.is_scheduled(sequence):
                self.exchange.remember(self.quarantine.told([sequence], has_run=False))
        return [(sequence, error) for sequence, error in found if error is not None]

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

    def is_scheduled(self, sequence: Sequence) -> bool:
        """Whether the scheduler has it, among those that wait or those that run."""
        is_opening = sequence.handle in self.constraints.opening or (self.images is not None and sequence.handle in self.images.opening)
        return sequence.handle not in self.quarantine.suspects and not is_opening

    def _give_up(self, delivery: Delivery) -> None:
        """End a request of which replicas died, each time it ran alone."""
        request = delivery.message
        reason = "replica after replica died when it began this request, also alone"
        values = {MESSAGE: encode(request), REQUEST_ID: request.request_id.encode()}
        self.stage.transport.run(lambda pipe: write_dead_letter(self.exchange.prompts.stream.key, values, RuntimeError(reason), 1, pipe))
        self._refuse(delivery, RequestError(f"this request could not be handled: {reason}"))

    def _refuse(self, delivery: Delivery, error: RequestError | None) -> None:
        """A request that will not run: cancelled, or with an error."""
        self._end(delivery.message.request_id, delivery.message.gateway_id, delivery.entry_id, error)

    def _end(self, request_id: str, gateway_id: str | None, entry_id: bytes, error: RequestError | None) -> None:
        self.stage.transport.run(lambda pipe: end_request(pipe, self.model, request_id, gateway_id, error=error))
        self.exchange.acknowledge(entry_id, request_id)


def field_with_unknown_token(request: TokenizedRequest, vocab_size: int) -> str | None:
    """The field that names a token that this model has not. A GPU that is given such an index is lost,
    with all that it computes."""
    # of which none is negative: see TokenizedRequest
    params, prompt = request.params, request.prompt_token_ids
    named = {
        "prompt": (int(prompt.max()),), "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids, "bad_words": itertools.chain.from_iterable(params.bad_words_token_ids),
        "eos_token_ids": request.eos_token_ids,
    }  # fmt: skip
    return next((name for name, token_ids in named.items() if any(not 0 <= token_id < vocab_size for token_id in token_ids)), None)
