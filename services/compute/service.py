"""THE LOOP: schedule, run, reduce, exchange, apply. What it does not do itself is one call away."""

import itertools
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from services.compute.batch import ScheduledBatch
from services.compute.candidates.reduction import reduce
from services.compute.exchange.exchange import Exchange, Inbox
from services.compute.model_runner import ModelRunner
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Sequence
from services.compute.step_meter import StepMeter
from shared.messages import Control, RequestError, TokenEvent, TokenizedRequest
from shared.settings import ComputeSettings
from shared.stage import Stage
from shared.streams import reader_key, tombstone_key
from shared.telemetry import get_logger
from shared.token_log import end_request, read_log
from shared.transport import DeadLetter, Delivery, Pipeline

log = get_logger("penstock.compute")

CLAIM_IDLE_MS = 5000  # entries are renewed every second: idle for longer, their replica is dead
UPKEEP_EVERY_S = 1.0
BACKLOG = 64  # prompts that wait here, at least


@dataclass(slots=True)
class Running:
    """A sequence and what it answers to."""

    sequence: Sequence
    request: TokenizedRequest
    entry_id: bytes


class ComputeService:
    def __init__(self, stage: Stage, settings: ComputeSettings, scheduler: Scheduler, runner: ModelRunner, exchange: Exchange) -> None:
        self.stage = stage
        self.settings = settings
        self.scheduler = scheduler
        self.runner = runner
        self.exchange = exchange
        self.running: dict[int, Running] = {}  # by handle
        self.handle_by_request: dict[str, int] = {}
        self.handles = itertools.count(1)
        self.upkept_at = 0.0
        self.gateway_seen_at: dict[str, float] = {}
        self.meter = StepMeter()
        self.num_prompt_tokens = self.num_output_tokens = 0
        stage.upkeep = self.renew

    def run(self) -> None:
        self.stage.catch_signals()
        self.stage.transport.wait_until_up(self.stage.settings.redis_timeout_s)
        self.exchange.start()
        self.report()
        self.stage.join()
        while not self.stage.stopping.is_set():
            self.step()
            self.stage.turn()
            if time.monotonic() - self.upkept_at > UPKEEP_EVERY_S:
                self.upkeep()
        self.stage.leave()
        self.exchange.leave([running.entry_id for running in self.running.values()])

    def step(self) -> None:
        """One step. What was decided is applied before anything is scheduled: a sequence that has ended must not run again."""
        self.drop_expired()
        self.meter.begin()
        batch = self.scheduler.schedule()
        inbox = self.exchange.wait(self.room) if batch is None else self.compute(batch)
        self.apply(inbox)
        self.obey(inbox.control)
        self.admit(inbox)
        self.report()

    def compute(self, batch: ScheduledBatch) -> Inbox:
        """Run a scheduled step, up to the decisions for its tokens."""
        self.meter.lap("schedule")
        logits = self.runner.forward(batch)
        self.meter.lap("forward")
        num_tokens, num_context_tokens, sampled = batch.num_tokens, batch.num_context_tokens, batch.sampled
        self.scheduler.advance(batch)
        self.meter.lap("schedule")
        if sampled:
            rows = reduce(logits, sampled)
            self.meter.lap("reduce")
            inbox = self.exchange.decide(rows, self.room)
        else:
            inbox = self.exchange.poll(self.room)
        self.meter.lap("wait")
        self.meter.move(self.exchange.publish_s, "wait", "publish")
        seconds = self.meter.end(num_tokens)
        if not inbox.unanswered:
            self.scheduler.step_cost.observe(num_tokens, num_context_tokens, seconds)
        self.num_prompt_tokens += num_tokens - len(batch.decodes)
        return inbox

    @property
    def room(self) -> int:
        """How many prompts to take: for the free places in a step, and a backlog to wait here, where priorities count.

        But nothing waits here that another replica could begin at once.
        """
        places = self.scheduler.max_num_seqs
        others = [each for each in self.stage.registry.of("compute", self.stage.model) if each.replica_id != self.stage.replica_id]
        is_needed = any(each.load.get("running", 0) + each.load.get("waiting", 0) < each.load.get("max_num_seqs", 0) for each in others)
        return max(0, places + (0 if is_needed else max(places, BACKLOG)) - self.scheduler.num_unfinished)

    def drop_expired(self) -> None:
        """End what has not begun by its deadline."""
        for sequence in self.scheduler.waiting.expired(time.time()):
            error = RequestError("the request's deadline passed while it waited for its turn", 504, "deadline_s", "deadline_exceeded")
            self.cancel(self.running[sequence.handle], error)

    def apply(self, inbox: Inbox) -> None:
        """Append the decided tokens; take out what has ended."""
        for handle, (token_id, is_finished) in inbox.token_by_handle.items():
            running, is_token = self.running[handle], token_id >= 0
            if is_token:
                self.num_output_tokens += 1
                self.scheduler.append(running.sequence, token_id)
            if is_finished:
                self.end(running, tell_sampler=False, is_complete=is_token)
        for handle in inbox.unanswered:
            self.cancel(self.running[handle], RequestError("no sampler could decide this request's next token"))

    def admit(self, inbox: Inbox) -> None:
        """New prompts become waiting sequences, unless they were cancelled meanwhile, don't fit, or are here already."""
        for letter in inbox.dead:
            self.bury(letter)
        if not inbox.prompts:
            return
        ids = [delivery.message.request_id for delivery in inbox.prompts]
        keys = [tombstone_key(request_id) for request_id in ids] + [reader_key(request_id) for request_id in ids]
        values: Any = self.stage.transport.persist(lambda: self.stage.transport.client.mget(keys))
        for delivery, tombstone, reader in zip(inbox.prompts, values[: len(ids)], values[len(ids) :], strict=True):
            if delivery.message.request_id in self.handle_by_request:
                self.take_over_entry(delivery)
            elif tombstone is not None:
                self.refuse(delivery, None)
            else:
                self.begin(delivery, reader.decode() if reader is not None else delivery.message.gateway_id)

    def begin(self, delivery: Delivery, gateway_id: str | None) -> None:
        """A sequence, with the tokens its log already holds if another replica had it before."""
        request: TokenizedRequest = delivery.message
        blocks = self.scheduler.block_manager
        num_tokens = len(request.prompt_token_ids) + (request.params.max_tokens or 0)
        longest = min(self.stage.max_model_len or num_tokens, blocks.num_blocks * blocks.block_size)
        if num_tokens > longest:
            self.refuse(delivery, RequestError(f"the request takes up to {num_tokens} tokens, this replica {longest}", 400, "max_tokens"))
            return
        logged: list[TokenEvent] = []
        if delivery.was_claimed:
            logged = self.stage.transport.persist(lambda: read_log(self.stage.transport.client, request.request_id))
            if logged and logged[-1].finish_reason is not None:
                self.exchange.acknowledge(delivery.entry_id)
                return
            log.info("request claimed", request_id=request.request_id, num_logged_tokens=len(logged))
        prompt = request.prompt_token_ids.tolist()
        tokens = prompt + [event.token_id for event in logged if event.token_id is not None]
        scheduling = request.scheduling
        sequence = Sequence(
            next(self.handles),
            request.request_id,
            tokens,
            len(prompt),
            request.params,
            request.eos_token_ids,
            priority=scheduling.priority,
            arrived_at=request.created_at,
            deadline=scheduling.deadline_at if scheduling.deadline_at and not logged else None,
            group_id=scheduling.group_id or None,
            cache_salt=scheduling.cache_salt,
        )
        self.running[sequence.handle] = Running(sequence, request, delivery.entry_id)
        self.handle_by_request[request.request_id] = sequence.handle
        self.exchange.introduce(sequence, request)
        self.exchange.gateway_by_handle[sequence.handle] = gateway_id
        self.scheduler.add(sequence)

    def take_over_entry(self, delivery: Delivery) -> None:
        """A second copy of a request that is here: keep one entry for it."""
        running = self.running[self.handle_by_request[delivery.message.request_id]]
        if delivery.entry_id != running.entry_id:
            self.exchange.acknowledge(delivery.entry_id)

    def refuse(self, delivery: Delivery, error: RequestError | None) -> None:
        """A request that will not run: cancelled, or with an error."""
        request = delivery.message
        self.stage.transport.run(lambda pipe: end_request(pipe, request.request_id, request.gateway_id, error=error))
        self.exchange.acknowledge(delivery.entry_id)

    def bury(self, letter: DeadLetter) -> None:
        """A message that can't be handled: its request gets the error."""
        error = RequestError(f"this request could not be handled: {letter.reason}")
        self.stage.transport.run(lambda pipe: end_request(pipe, letter.request_id, letter.gateway_id, error=error))
        self.exchange.acknowledge(letter.entry_id)

    def obey(self, control: list[Control]) -> None:
        for message in control:
            handles = [self.handle_by_request[each] for each in dict.fromkeys(message.request_ids) if each in self.handle_by_request]
            if message.action == "cancel":
                for handle in handles:
                    self.cancel(self.running[handle])
            elif message.action == "attach":
                for handle in handles:
                    self.exchange.gateway_by_handle[handle] = message.gateway_id
            elif message.action == "refresh":
                self.stage.refresh()

    def cancel(self, running: Running, error: RequestError | None = None) -> None:
        """End a sequence before its time, with an error if it is ours. Its blocks are free before the next step."""
        sequence, gateway_id = running.sequence, self.exchange.gateway_by_handle[running.sequence.handle]
        self.stage.transport.run(
            lambda pipe: end_request(
                pipe, sequence.request_id, gateway_id, position=sequence.num_output_tokens, error=error, num_prompt_tokens=sequence.num_prompt_tokens
            )
        )
        self.end(running, tell_sampler=True, is_complete=False)
        log.info("request failed" if error else "request cancelled", request_id=sequence.request_id, num_output_tokens=sequence.num_output_tokens)

    def end(self, running: Running, *, tell_sampler: bool, is_complete: bool) -> None:
        self.scheduler.finish(running.sequence, is_complete=is_complete)
        self.exchange.forget(running.sequence, running.entry_id, tell_sampler=tell_sampler)
        del self.running[running.sequence.handle], self.handle_by_request[running.sequence.request_id]

    def upkeep(self) -> None:
        """Every second: take over what dead replicas left, and end what nobody reads any more."""
        self.upkept_at = now = time.monotonic()
        if self.room > 0:
            prompts, dead = self.exchange.prompts.claim(idle_ms=CLAIM_IDLE_MS, count=self.room)
            self.admit(Inbox(prompts=prompts, dead=dead))
        self.cancel_abandoned(now)

    def cancel_abandoned(self, now: float) -> None:
        """End the sequences whose gateway has been gone for too long: it died, and no other gateway has resumed them."""
        live = self.stage.registry.ids("gateway")
        gateway_by_handle = {handle: gateway for handle, gateway in self.exchange.gateway_by_handle.items() if gateway is not None}
        seen_at = {gateway: self.gateway_seen_at.get(gateway, now) for gateway in gateway_by_handle.values()}
        self.gateway_seen_at = seen_at | dict.fromkeys(live, now)
        for handle, gateway_id in gateway_by_handle.items():
            if now - self.gateway_seen_at[gateway_id] > self.settings.reader_timeout_s:
                log.info("nobody reads this request", request_id=self.running[handle].request.request_id, gateway_id=gateway_id)
                self.cancel(self.running[handle])

    def renew(self, pipe: Pipeline) -> None:
        """From the heartbeat's thread: keep the entries of what runs here."""
        self.exchange.prompts.renew(pipe, [running.entry_id for running in list(self.running.values())])

    def report(self) -> None:
        """What the registry shows of this replica."""
        scheduler, blocks = self.scheduler, self.scheduler.block_manager
        self.stage.load = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "max_num_seqs": scheduler.max_num_seqs,
            "preemptions": scheduler.num_preemptions,
            "kv_cache_usage": blocks.num_used_blocks / blocks.num_blocks,
            "prefix_cache_queries": scheduler.num_prefix_queries,
            "prefix_cache_hits": scheduler.num_prefix_hits,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            **scheduler.admission.metrics(),
            **({} if scheduler.step_cost.cost is None else {f"step_cost_{name}": value for name, value in asdict(scheduler.step_cost.cost).items()}),
            **self.meter.load(),
        }


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)
