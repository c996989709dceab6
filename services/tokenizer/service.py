"""The tokenizer's loop: read what is waiting, encode it as one batch, hand it on, acknowledge."""

from typing import Any

from msgspec.structs import replace

from services.tokenizer.affinity import Affinity, ChosenReplica
from services.tokenizer.answers import TokenizerAnswer
from services.tokenizer.encoder import Encoder
from services.tokenizer.pending import PendingPrompt
from services.tokenizer.slow_templates import SlowTemplates, brings_template
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.errors import Invalid
from shared.process.settings import TokenizerSettings
from shared.process.telemetry import get_logger
from shared.wire.entries import DeadLetter, Delivery, GroupReader, append_to_group
from shared.wire.line import Pipeline
from shared.wire.load import Load
from shared.wire.messages import GenerateRequest, RequestError, TokenEvent, TokenizedRequest
from shared.wire.offers import offer
from shared.wire.registry import decode_replicas, look
from shared.wire.replica import Replica
from shared.wire.stage import Stage
from shared.wire.streams import prompts, requests, served_key, tombstone_key
from shared.wire.token_log import end_request, write_end

log = get_logger("penstock.tokenizer")

# encoding a batch takes far less: an entry idle for longer belongs to a dead replica
CLAIM_IDLE_MS = 5000
CLAIM_EVERY_S = 1.0
FORGET_CONSUMERS_EVERY_S = 30.0
MAX_DELIVERIES = 5
BLOCK_MS = 500
RENDERING_BLOCK_MS = 20  # while slow templates are being rendered
UNBOUNDED = 1 << 31  # tokens, until a compute replica says how many it takes


class TokenizerService:
    def __init__(
        self,
        stage: Stage,
        settings: TokenizerSettings,
        encoder: Encoder,
        max_model_len: int | None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.stage = stage
        self.settings = settings
        self.clock = clock
        self.encoder = encoder
        self.max_model_len = max_model_len
        self.prompts = prompts(encoder.model)
        self.reader = GroupReader(stage.transport, requests(encoder.model), stage.replica_id)
        self.templates = SlowTemplates(
            encoder.tokenizer, lambda request, template: encoder.prepare([request], template)[0], clock.monotonic
        )
        self.affinity = Affinity(stage, self.prompts, encoder.model) if settings.prefix_affinity else None
        self.num_requests = 0
        self._claimed_at = self._forgot_at = 0.0

    def run(self) -> None:
        self.stage.catch_signals()
        self.stage.transport.wait_until_up(self.settings.redis_timeout_s)
        self.reader.ensure_group()
        self.stage.join()
        while not self.stage.stopping.is_set():
            self.handle(
                *self.reader.read(
                    count=self.settings.max_batch, block_ms=BLOCK_MS if self.templates.is_empty else RENDERING_BLOCK_MS
                )
            )
            self.finish_slow()
            self.claim()
            self.stage.mark_alive()
        self.stage.leave()
        # a delivery whose reply was lost is pending, though nothing is being done
        self.reader.release_all()

    def claim(self) -> None:
        """Now and then, keep what is held here, and take over what dead replicas left. One entry at
        a time, for one of them may be what they died of."""
        now = self.clock.monotonic()
        if now - self._claimed_at > CLAIM_EVERY_S:
            self._claimed_at = now
            idle_ms = self.stage.claim_idle_ms(CLAIM_IDLE_MS)
            if self.templates.entry_ids:
                self.stage.transport.run(lambda pipe: self.reader.renew(pipe, self.templates.entry_ids))
            for _ in range(self.settings.max_batch):
                deliveries, dead = self.reader.claim(idle_ms=idle_ms, count=1, max_deliveries=MAX_DELIVERIES)
                if not deliveries and not dead:
                    break
                self.handle(deliveries, dead)
        if now - self._forgot_at > FORGET_CONSUMERS_EVERY_S:
            self._forgot_at = now
            self.reader.forget_consumers(self.stage.registry.ids("tokenizer"))

    def handle(self, deliveries: list[Delivery], dead: list[DeadLetter]) -> None:
        """Encode and hand on. Those whose templates take long come back by finish_slow: no other
        request waits for them."""
        fresh = [delivery for delivery in deliveries if delivery.entry_id not in self.templates.entry_ids]
        slow = [delivery for delivery in fresh if brings_template(delivery.message)]
        ordinary = [delivery for delivery in fresh if not brings_template(delivery.message)]
        started_at = self.clock.wall()
        prepared = list(
            zip(
                ordinary,
                self.encoder.prepare([each.message for each in ordinary], self.encoder.chat_template),
                strict=True,
            )
        )
        slow += [delivery for delivery, each in prepared if each.is_slow]
        refused = [
            (delivery, PendingPrompt(delivery.message, error=error))
            for delivery in slow
            if (error := self.templates.hold(delivery)) is not None
        ]
        self.hand_on([(delivery, each) for delivery, each in prepared if not each.is_slow] + refused, dead, started_at)

    def finish_slow(self) -> None:
        self.hand_on(self.templates.done(), [], self.clock.wall())

    def hand_on(
        self, prepared: list[tuple[Delivery, PendingPrompt]], dead: list[DeadLetter], started_at: float
    ) -> None:
        """Encode and hand on, in one transaction with the acknowledgement: a request is in exactly
        one stream."""
        if not prepared and not dead:
            return
        requests = [delivery.message for delivery, _ in prepared]
        tombstones = self.stage.transport.persist(
            lambda: (
                self.stage.transport.client.mget([tombstone_key(request.request_id) for request in requests])
                if requests
                else []
            )
        )
        waited_for = [each for (_, each), tombstone in zip(prepared, tombstones, strict=True) if tombstone is None]
        live = [each.request for each in waited_for]
        cancelled = [request for request, tombstone in zip(requests, tombstones, strict=True) if tombstone is not None]
        results = self.encoder.finish(waited_for, self.longest_sequence())
        choices = self.choose_replicas(results)
        tokenized_at = self.clock.wall()

        def write(pipe: Pipeline) -> None:
            model = self.encoder.model
            # those first that are given to a certain replica: they wait behind no others of this batch
            for request, result in sorted(
                zip(live, results, strict=True), key=lambda each: each[0].request_id not in choices
            ):
                if isinstance(result, Invalid):
                    error = RequestError(str(result), result.status, result.param, result.code)
                    end_request(pipe, model, request.request_id, request.gateway_id, error=error)
                elif isinstance(result, TokenizerAnswer):
                    write_end(
                        pipe,
                        model,
                        TokenEvent(request.request_id, 0, None, result.text, finish_reason="stop"),
                        request.gateway_id,
                    )
                else:
                    self.write_prompt(pipe, replace(result, tokenized_at=tokenized_at), choices.get(request.request_id))
            for request in cancelled:
                end_request(pipe, model, request.request_id, request.gateway_id)
            for letter in dead:
                error = RequestError(f"this request could not be handled: {letter.reason}")
                end_request(pipe, model, letter.request_id, letter.gateway_id, error=error)
            self.reader.finish(
                pipe, [delivery.entry_id for delivery, _ in prepared] + [letter.entry_id for letter in dead]
            )

        self.stage.transport.run(write, atomic=True)
        self.num_requests += len(requests)
        self.stage.load = Load(requests=self.num_requests)
        for request, result in zip(live, results, strict=True):
            if isinstance(result, Invalid):
                log.info("request refused", request_id=request.request_id, error=result)
            self.trace(request, result, started_at, tokenized_at, len(live))

    def choose_replicas(self, results: list[TokenizedRequest | TokenizerAnswer | Invalid]) -> dict[str, ChosenReplica]:
        """The compute replicas of prompts that are better off with a certain one, by request."""
        prompts = [result for result in results if isinstance(result, TokenizedRequest)]
        choices = self.affinity.choose(prompts) if self.affinity is not None else []
        return {
            prompt.request_id: choice for prompt, choice in zip(prompts, choices, strict=False) if choice is not None
        }

    def write_prompt(self, pipe: Pipeline, prompt: TokenizedRequest, choice: ChosenReplica | None) -> None:
        if choice is None:
            append_to_group(pipe, self.prompts, prompt)
        else:
            offer(pipe, self.prompts, prompt, choice.compute_id, round(choice.wait_s * 1000))

    def trace(
        self,
        request: GenerateRequest,
        result: TokenizedRequest | TokenizerAnswer | Invalid,
        started_at: float,
        ended_at: float,
        batch_size: int,
    ) -> None:
        """`tokenize`: the whole batch's time, for a request waits for all of its batch."""
        if self.stage.tracer is None or not request.traceparent:
            return
        attributes: dict[str, str | int] = {
            "penstock.request_id": request.request_id,
            "penstock.batch_size": batch_size,
        }
        if isinstance(result, TokenizedRequest):
            attributes["penstock.num_prompt_tokens"] = len(result.prompt_token_ids)
        elif isinstance(result, Invalid):
            attributes["error.type"] = result.code or str(result.status)
        self.stage.tracer.record("tokenize", request.traceparent, started_at, ended_at, attributes)

    def longest_sequence(self) -> int:
        """The length that the model was made for, or less where a live compute replica has less, or
        had, if its like is to be started. If the registry knows no compute replica, it is looked at
        again: a gateway may have seen the first one before this process did."""
        model = self.encoder.model
        computes = (
            self.stage.registry.of("compute", model)
            or self.stage.transport.persist(lambda: look(self.stage.transport.client)).of("compute", model)
            or self.last_compute()
        )
        limits = [self.max_model_len, *(replica.max_model_len for replica in computes)]
        return min((limit for limit in limits if limit is not None), default=UNBOUNDED)

    def last_compute(self) -> tuple[Replica, ...]:
        """The last compute replica, as gateways remember it; nothing, where no request may wait for
        one."""
        key = served_key("compute", self.encoder.model)
        announcement: Any = self.stage.transport.persist(lambda: self.stage.transport.client.get(key))
        return decode_replicas([(key, announcement)])
