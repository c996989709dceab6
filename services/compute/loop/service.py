"""THE LOOP: receive, apply, schedule, run, reduce, collect, send. All other work is one call away.

No step waits for its decisions. Compute has the candidates, the parameters, the seed and the
position, and deciding is a pure function: so it takes the token that the sampler will decide and
goes on. The sampler stays the authority. The log's tokens come in while a later step runs; where one
differs, the sequence is truncated to the log. No client sees a token that is not in the log.

One pipeline has three depths. A step is launched; it leaves the model, at once or when later steps
have filled the model's stages; then it is in flight until it is collected. Where the host draws the
tokens it is collected at once (depth 0), where a device draws them when the next step has been
launched (depth 1), and a model in n stages has n steps on their way. All send the same rows.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.compute.candidates.constraints import Constraints
from services.compute.candidates.prompt_logprobs import score_prompts
from services.compute.candidates.reduction import NO_MASKS, begin_reduction
from services.compute.exchange.active import ActiveRequest, Decision
from services.compute.exchange.exchange import Exchange
from services.compute.exchange.undecided import LOST
from services.compute.execution.executor import DrawnTokens, Executor
from services.compute.execution.pooling import pool
from services.compute.intake.admit import TIMEOUT_ERROR, Admitter
from services.compute.intake.readers import Readers
from services.compute.loop.engine import Engine
from services.compute.loop.flight import Flight, StepInModel, collect, drop_orphans, launch, rows_still_valid
from services.compute.scheduling.policy import StepPolicy
from services.compute.sequence import Prefix, Sequence
from services.compute.sequence.batch import ScheduledBatch
from services.compute.speculation.model_free import make_proposers
from services.compute.speculation.speculation import Speculation
from services.compute.telemetry.spans import RequestSpans
from services.compute.telemetry.step_meter import StepMeter
from services.compute.telemetry.view import Snapshot, load_figures, make_view
from shared.process.settings import ComputeSettings
from shared.process.telemetry import get_logger
from shared.wire.line import Pipeline
from shared.wire.messages import Control, RequestError
from shared.wire.registry import show
from shared.wire.stage import Stage
from shared.wire.token_log import end_request

log = get_logger("penstock.compute")

UPKEEP_EVERY_S = 1.0
FIGURES_EVERY_S = 0.5  # as often as the heartbeat of a replica that is watched
IDLE_WAIT_S = 0.2  # for prompts or decisions, with nothing to compute
OPENING_WAIT_S = 0.002  # the same, while a grammar is being compiled, or masks are being filled
MASK_BUDGET_S = 0.01  # for masks, when a step's forward pass is over; rows without one sit out
STATES_MASK_BUDGET_S = 2.0  # the same, of a model that would compute the row's whole sequence again


class ComputeService:
    def __init__(
        self,
        stage: Stage,
        settings: ComputeSettings,
        engine: Engine,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """clock, wall_clock: s."""
        assert stage.model is not None
        self.clock = clock
        self.wall_clock = wall_clock
        self.stage = stage
        self.settings = settings
        self.model = stage.model
        self.scheduler = engine.scheduler
        self.tier = engine.tier
        self.images = engine.images
        self.dense_layers = engine.dense_layers
        self.executor: Executor = engine.runner
        self.active: dict[int, ActiveRequest] = {}  # by handle: the requests that this replica answers for
        self.exchange = Exchange(
            stage,
            self.active,
            self.scheduler.block_manager,
            publish_interval_s=engine.publish_interval_s,
            max_held=max(1, settings.run_ahead - 1),
            clock=clock,
            wall_clock=wall_clock,
        )
        self.constraints = Constraints(engine.load_vocabulary, self.executor.vocab_size)
        proposers = make_proposers(engine.speculators, self.constraints, engine.proposers)
        self.speculation = Speculation(proposers, self.constraints, self.executor.vocab_size)
        # the bounds that all steps have; `next_policy` adds those of one step
        self.base_policy = StepPolicy(
            num_stages=engine.num_stages,
            drafting=self.speculation.drafting(settings.num_speculative_tokens, engine.max_sampled),
            splits_prompts=engine.runner.model.splits_prompts,
            awaits_restoring=self.tier is not None,
        )
        self.admitter = Admitter(
            stage,
            engine,
            self.exchange,
            self.constraints,
            self.speculation,
            self.active,
            clock=clock,
            wall_clock=wall_clock,
        )
        self.readers = Readers(settings.reader_timeout_s)
        self.in_model: deque[StepInModel] = deque()  # oldest first: steps that have not left the model
        self.flight: Flight | None = None  # the step that has left the model, and is not collected yet
        self.meter = StepMeter()
        self.spans = RequestSpans(stage.tracer, wall_clock) if stage.tracer is not None else None
        self.num_prompt_tokens = self.num_output_tokens = self.num_surplus_tokens = 0
        self._upkept_at = self._figures_at = 0.0
        self._num_changes = 0  # the admitter's, when the snapshot was left
        self.snapshot = Snapshot()
        stage.on_heartbeat = self.on_heartbeat

    def run(self) -> None:
        self.stage.catch_signals()
        self.stage.transport.wait_until_up(self.stage.settings.redis_timeout_s)
        self.exchange.start()
        if self.images is not None:
            self.images.start(self.stage)
        self.leave_snapshot()
        self.stage.join()
        while not self.stage.stopping.is_set():
            self.step()
            self.stage.mark_alive()
            if self.clock() - self._upkept_at > UPKEEP_EVERY_S:
                self.upkeep()
        self.stage.leave()
        for active in self.active.values():
            self.trace_end(active, "handed over")
        if self.tier is not None:
            self.tier.close()
        self.exchange.leave()

    def step(self) -> None:
        """One step. Messages that have come are applied first: a sequence that has ended must not run
        again. As many steps are on their way as the model has stages; one that has left the last stage is
        reduced, and collected when the next one runs, or at once."""
        self.leave_snapshot()
        self.encode()
        self.meter.begin()
        self.receive()
        self.leave_snapshot()
        policy = self.next_policy()
        is_restored = self.restore(policy)
        batch = self.scheduler.schedule(policy)
        self.meter.lap("schedule")
        if batch is not None:
            self.start_step(batch)
        if self.in_model and (batch is None or len(self.in_model) == policy.num_stages):
            self.reduce(self.in_model.popleft())
        elif batch is None and self.flight is not None:
            self.collect(self.flight)
        elif batch is None and is_restored:
            self.wait(policy)

    def encode(self) -> None:
        """One call of the images' encoder, if it has something to do and it is its turn."""
        for sequence, error in self.admitter.encode():
            self.cancel(self.active[sequence.handle], error)

    def restore(self, policy: StepPolicy) -> bool:
        """Read blocks of sequences that may begin in the next step from the second tier, for a bounded time.
        Returns whether all are read."""
        return self.tier is None or self.tier.restore(
            self.scheduler.next_to_begin(policy), self.scheduler.step_cost.token_s
        )

    def wait(self, policy: StepPolicy) -> None:
        """Wait for messages: there is nothing to compute. A short wait if an image, a grammar or a mask may
        be ready first."""
        is_encoding = self.images is not None and bool(self.images.opening)
        self.receive(wait_s=OPENING_WAIT_S if is_encoding or self.constraints.opening or policy.held else IDLE_WAIT_S)

    def next_policy(self) -> StepPolicy:
        """The bounds of the next step. Steps that are on their way are collected first where the next one must
        know their tokens, or must run alone."""
        quarantine = self.admitter.quarantine
        if quarantine.suspects:
            self.empty_stages()  # a step that kills this replica is blamed on the sequences in it
        apart = quarantine.step(self.admitter.begin)
        held = self.constraints.sitting_out()
        if self.flight is not None and (apart or self.speculation.waits_for(self.flight.batch)):
            # a trial's step runs with no other; drafts follow tokens that are known
            self.collect(self.flight)
        if apart:
            self.empty_stages()
        in_stages = frozenset(
            row.handle for step in self.in_model for row in step.batch.rows if row.sampled or row.pooled
        )
        return replace(self.base_policy, apart=apart, held=held, in_stages=in_stages)

    def start_step(self, batch: ScheduledBatch) -> None:
        """Run a scheduled step, on the tokens that the step before it draws; then collect that one, which
        shows the rows of this one that are still valid. With no step before it, masks are filled while it
        runs."""
        sequences = {row.handle: self.scheduler.get(row.handle) for row in batch.rows}
        before, began_at = self.flight, self.meter.began_at
        rows = rows_still_valid(batch, self.scheduler) if before is None and self.base_policy.num_stages == 1 else None
        masking = self.constraints.start(rows.values()) if rows is not None else None
        hidden = self.run_step(batch, before.drawn if before is not None else None)
        if before is not None:
            self.collect(before)
        self.in_model.append(StepInModel(batch, hidden, sequences, began_at, rows, masking))

    def empty_stages(self) -> None:
        """Take all steps from the model's stages."""
        while self.in_model:
            self.reduce(self.in_model.popleft())

    def run_step(self, batch: ScheduledBatch, drawn: DrawnTokens | None = None) -> Any:
        """Run the step up to the head, and save whole blocks."""
        self.announce(batch)
        hidden = self.executor.run(batch, drawn)
        if self.tier is not None:
            self.tier.save()
        return hidden

    def announce(self, batch: ScheduledBatch) -> None:
        """Write down the requests that are blamed if the step kills this replica."""
        if batch.num_decodes < len(batch.rows):
            self.begin_chunks([self.active[row.handle] for row in batch.rows[batch.num_decodes :]], self.wall_clock())
        self.admitter.quarantine.blame(row.handle for row in batch.rows)

    def reduce(self, step: StepInModel) -> None:
        """Make candidates of a step that has left the model, for the rows that are valid. It is in flight
        then; it is collected at once unless a device has drawn the tokens that the next step needs."""
        batch, hidden, get = step.batch, step.hidden, step.sequences.__getitem__
        has_stages = self.base_policy.num_stages > 1
        if has_stages:
            drop_orphans(step, self.scheduler)
        rows, masking = step.rows, step.masking
        if rows is None:
            rows = rows_still_valid(batch, self.scheduler)
            masking = self.constraints.start(rows.values())
        failures = score_prompts(self.executor.prompt_logits(batch, hidden), batch, get, self.executor.row_search)
        rows = {key: prefix for key, prefix in rows.items() if key.handle not in failures}
        logits = self.executor.logits(batch, hidden, rows)
        self.meter.lap("forward")
        masks = masking.result(MASK_BUDGET_S) if masking is not None else NO_MASKS
        if masking is not None and masks.late and self.scheduler.block_manager.begins_again:
            # the next are filled before their rows run
            self.constraints.hold_back({key.handle for key in masks.late}, for_life=True)
            masks = masking.result(STATES_MASK_BUDGET_S)
        reduction = begin_reduction(logits, list(rows.values()), self.executor.row_search, masks)
        self.hold_back(
            [rows[key] for key in batch.firsts if key in masks.late and key in rows], {key.handle for key in masks.late}
        )
        self.flight = launch(batch, hidden, reduction, self.scheduler, step.began_at)
        self.meter.lap("reduce")
        is_embedding = any(not row.sampled and get(row.handle).request.embedding is not None for row in batch.rows)
        if self.flight.drawn is None or is_embedding or has_stages:
            self.collect(self.flight)
        if is_embedding:
            failures |= self.embed(batch, hidden, get)
        self.fail(failures | {key.handle: reduction.failures[key] for key in batch.firsts if key in reduction.failures})

    def begin_chunks(self, chunks: list[ActiveRequest], started_at: float) -> None:
        """Before a step with chunks, which takes long: send rows that are held back, and write down the
        requests that begin here, for a sequence begins with a chunk."""
        if new := [active for active in chunks if not active.scheduled_at]:
            for active in new:
                active.scheduled_at = started_at
            groups = {active.sequence.request.group_id for active in new} - {None}
            if groups:  # the other choices of a prompt are blamed with the first
                new += [
                    active
                    for active in self.active.values()
                    if active.sequence.request.group_id in groups and not active.scheduled_at
                ]
            self.exchange.remember(self.admitter.quarantine.records_of(new, has_run=True))
        self.exchange.publish_held()

    def hold_back(self, late: list[Prefix], handles: set[int]) -> None:
        """Drop the rows whose masks were late; they run again when the masks are there. handles: of all
        sequences with late masks, also of rows behind drafts."""
        self.constraints.hold_back(handles)
        for prefix in late:
            self.scheduler.take_back(prefix)
        self.num_surplus_tokens += len(late)

    def collect(self, flight: Flight) -> None:
        """The step in flight is over: each of its sequences has the token that the sampler will
        decide, and its candidates are sent."""
        batch, self.flight = flight.batch, None
        flight.reduction.searching.wait()
        self.meter.lap("forward")
        if self.spans is not None:
            self.spans.computed(batch, self.active, self.wall_clock() - (time.perf_counter() - flight.began_at))
        rows, failures, num_surplus = collect(flight, self.scheduler)
        num_decided = Counter(rows.handles.tolist())
        self.speculation.computed(batch, flight.hidden, num_decided)
        self.meter.lap("reduce")
        if num_decided:
            is_end = any(self.active[handle].sequence.tokens.is_ending for handle in num_decided)
            self.exchange.send(rows, is_urgent=is_end or bool((rows.positions == 1).any()))
            self.meter.lap("publish")
        self.fail(failures)
        self.num_surplus_tokens += num_surplus
        self.num_prompt_tokens += batch.num_prompt_tokens
        seconds = self.meter.end(batch.num_tokens, flight.began_at)
        self.speculation.timed(batch, seconds)
        if not batch.has_targets:  # the head's work for a prompt is no part of what tokens cost
            self.scheduler.step_cost.observe(batch.num_tokens, batch.num_context_tokens, seconds)

    def fail(self, failures: dict[int, RequestError]) -> None:
        for handle, error in failures.items():
            if handle in self.active:  # it may have ended while its step was in the stages
                self.cancel(self.active[handle], error)

    def embed(self, batch: ScheduledBatch, hidden: Any, get: Callable[[int], Sequence]) -> dict[int, RequestError]:
        """End the requests whose embeddings are complete now. Returns the errors of those that failed, by
        handle."""
        embeddings, failures = pool(self.executor.pooled_states(batch, hidden).numpy(), batch, get, self.dense_layers)
        ended = [(self.active[handle], vector) for handle, vector in embeddings.items() if handle in self.active]
        if ended:
            self.exchange.end_embedded(ended)
        for active, _ in ended:
            self.end(active, tell_sampler=False, is_complete=False, outcome="finished")
        return {handle: RequestError(reason) for handle, reason in failures.items()}

    def receive(self, *, wait_s: float = 0.0) -> None:
        """Apply the messages that have come; with wait_s, wait for the first up to that time."""
        inbox = self.exchange.receive(self.admitter.num_wanted, wait_s=wait_s)
        if wait_s and self.active:
            self.meter.lap("wait")
        for decision in inbox.decisions:
            self.apply(decision)
        for handle in self.exchange.resend_overdue():
            self.cancel(self.active[handle], RequestError("no sampler could decide this request's next token"))
        for message in inbox.control:
            self.handle_control(message)
        self.admitter.admit(inbox.prompts, inbox.dead)
        self.admitter.steal()
        for sequence, error in self.admitter.queue_compiled():
            self.cancel(self.active[sequence.handle], error)
        for sequence in self.scheduler.waiting.expired(self.wall_clock()):
            self.cancel(self.active[sequence.handle], TIMEOUT_ERROR)

    def apply(self, decision: Decision) -> None:
        """The log holds this token now; if it is not the foreseen one, or ends the sequence, all that was
        computed behind it is dropped."""
        active = self.active.get(decision.handle)
        if active is None:
            return  # ended by an earlier one of this batch
        sequence = active.sequence
        at = sequence.tokens.num_decided
        if decision.token_id == LOST:
            log.warning(
                "Redis has lost a part of a log, computing it again",
                request_id=sequence.request.request_id,
                num_tokens=at,
            )
            self.give_up(active, "log lost")
            self.release([active.entry_id])
            return
        if decision.token_id < 0:
            self.scheduler.truncate(sequence, at)
            self.end(active, tell_sampler=False, is_complete=False, outcome="ended elsewhere")
            return
        self.num_output_tokens += 1
        if at < len(sequence.tokens) and sequence.tokens.ids[at] == decision.token_id:
            self.scheduler.confirm(sequence)
        else:
            log.warning(
                "decided token differs from the predicted one",
                request_id=sequence.request.request_id,
                position=decision.position,
            )
            self.drop_surplus(active, at, decision.position)
            self.scheduler.append(sequence, decision.token_id)
        if decision.is_finished:
            self.drop_surplus(active, at + 1, decision.position)
            self.end(active, tell_sampler=False, is_complete=True, outcome="finished")

    def drop_surplus(self, active: ActiveRequest, num_tokens: int, position: int) -> None:
        """Drop tokens foreseen beyond the first num_tokens, and the rows after that position."""
        self.num_surplus_tokens += len(active.sequence.tokens) - num_tokens
        self.scheduler.truncate(active.sequence, num_tokens)
        self.exchange.undecided.truncate(active.sequence.handle, position)

    def hand_on(self) -> None:
        """Hand sequences that have not begun, the last in rank, to replicas with less to do."""
        num_surplus = min(self.admitter.num_places_elsewhere(2), len(self.active) - 2 * self.scheduler.max_num_seqs)
        if num_surplus <= 0:
            return
        waiting = [
            sequence
            for sequence in self.scheduler.waiting
            if not sequence.has_begun
            and not sequence.tokens.num_output
            and sequence.handle not in self.scheduler.policy.apart
        ]
        waiting.sort(key=lambda sequence: (sequence.rank, sequence.handle))
        surplus = [self.active[sequence.handle] for sequence in waiting[-num_surplus:]]
        for active in surplus:
            self.give_up(active, "handed over")
        self.release([active.entry_id for active in surplus])

    def release(self, entry_ids: list[bytes]) -> None:
        """Let others claim entries at once; the heartbeat must not keep them any more."""
        self.leave_snapshot()
        self.stage.transport.run(lambda pipe: self.exchange.prompts.release(pipe, entry_ids))

    def give_up(self, active: ActiveRequest, outcome: str) -> None:
        """Another replica has the request, or will."""
        self.trace_end(active, outcome)
        self.leave_scheduler(active, is_complete=False)
        self.exchange.samplers.forget(active)
        self.admitter.forget(active)

    def handle_control(self, message: Control) -> None:
        request_ids = frozenset(message.request_ids)
        requests = [active for active in self.active.values() if active.message.request_id in request_ids]
        if message.action == "cancel":
            for active in requests:
                self.cancel(active)
        elif message.action == "attach":
            for active in requests:
                active.gateway_id = message.gateway_id
        elif message.action == "refresh":
            self.stage.refresh()

    def cancel(self, active: ActiveRequest, error: RequestError | None = None) -> None:
        """End a request before its time, with an error if this replica is the cause. Its blocks are free
        before the next step."""
        sequence = active.sequence
        self.stage.transport.run(
            lambda pipe: end_request(
                pipe,
                self.model,
                sequence.request.request_id,
                active.gateway_id,
                error=error,
                num_prompt_tokens=sequence.num_prompt_ids,
            )
        )
        self.end(active, tell_sampler=True, is_complete=False, outcome="failed" if error else "cancelled")
        log.info(
            "request failed" if error else "request cancelled",
            request_id=sequence.request.request_id,
            num_output_tokens=sequence.tokens.num_output,
            error=error.message if error else "-",
        )

    def end(self, active: ActiveRequest, *, tell_sampler: bool, is_complete: bool, outcome: str) -> None:
        """The request's log has its end."""
        self.trace_end(active, outcome)
        self.leave_scheduler(active, is_complete=is_complete)
        self.exchange.forget(active, tell_sampler=tell_sampler)
        self.admitter.forget(active)

    def trace_end(self, active: ActiveRequest, outcome: str) -> None:
        if self.spans is not None:
            self.spans.ended(active, outcome)

    def leave_scheduler(self, active: ActiveRequest, *, is_complete: bool) -> None:
        if self.admitter.is_scheduled(active):
            self.scheduler.finish(active.sequence, is_complete=is_complete)

    def drop_taken_over(self) -> None:
        """Give up requests that another replica claimed while this one was silent for too long."""
        active_by_entry = {active.entry_id: active for active in self.active.values()}
        for entry_id in self.exchange.prompts.taken_over(list(active_by_entry)):
            active = active_by_entry[entry_id]
            log.warning("taken over by another replica", request_id=active.message.request_id)
            self.give_up(active, "taken over")

    def upkeep(self) -> None:
        """Every second: claim the requests that dead replicas left, and end those whose gateways are gone."""
        self._upkept_at = self.clock()
        self.drop_taken_over()
        self.exchange.follow_clock()
        self.exchange.tell_prefixes()
        self.admitter.claim(self.admitter.num_wanted)
        self.hand_on()
        gone = self.readers.gone(
            {active.gateway_id for active in self.active.values() if active.gateway_id is not None}, self.stage.registry
        )
        for active in list(self.active.values()):
            if active.gateway_id in gone:
                log.info(
                    "the gateway that read this request is gone",
                    request_id=active.message.request_id,
                    gateway_id=active.gateway_id,
                )
                self.cancel(active)

    def leave_snapshot(self) -> None:
        """Make the snapshot that the heartbeat sends: entries to keep, whenever requests have come or gone; figures
        and view now and then."""
        if self.admitter.num_changes != self._num_changes:
            self._num_changes = self.admitter.num_changes
            self.snapshot = replace(self.snapshot, entry_ids=tuple(active.entry_id for active in self.active.values()))
        if self.clock() < self._figures_at + FIGURES_EVERY_S:
            return
        self._figures_at = self.clock()
        figures = (self.tier.figures() if self.tier is not None else {}) | (
            self.images.figures() if self.images is not None else {}
        )
        self.stage.load = load_figures(
            self.meter,
            self.scheduler,
            self.speculation,
            num_active=len(self.active),
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_output_tokens,
            surplus_tokens=self.num_surplus_tokens,
            claimed=self.admitter.num_claimed,
            stolen=self.admitter.num_stolen,
            offered=self.exchange.num_taken_up,
            **figures,
        )
        view = None
        if self.stage.registry.is_watched:
            view = make_view(
                self.stage.replica_id,
                self.active.values(),
                self.scheduler.running,
                self.scheduler.block_manager,
                self.speculation.tallies,
            )
        self.snapshot = replace(self.snapshot, view=view)

    def on_heartbeat(self, pipe: Pipeline) -> None:
        """Send the snapshot that the loop left. Runs in the heartbeat's thread, and reads nothing else."""
        snapshot = self.snapshot
        self.exchange.prompts.renew(pipe, snapshot.entry_ids)
        if snapshot.view is not None:
            show(pipe, snapshot.view)
