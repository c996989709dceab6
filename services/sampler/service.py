"""The sampler's loop: read a step's candidates, decide, write log, events and decisions in one round trip, trim.

Deciding is idempotent. A row whose position is already in the log is answered from the log, whether this replica decided it, another
one did, or compute came back from a crash and asks again; the log refuses a second entry at a position, and what it holds wins.
"""

import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from services.sampler.detokenizer import TokenTable
from services.sampler.request_state import RequestState
from shared.decision import decide, pad, uniform
from shared.messages import Control, RequestError, SequenceIntro, StepCandidates, StepDecisions, StepEvents, TokenEvent, TokenLogprob, TopLogprob
from shared.settings import SamplerSettings
from shared.stage import Stage
from shared.streams import CONTROL, DirectStream, candidates, decisions, events
from shared.telemetry import get_logger
from shared.token_log import LogEntry, log_entry, read_entry, read_log, write_step
from shared.transport import DirectReader, Pipeline

log = get_logger("penstock.sampler")

BLOCK_MS = 500
FORGET_AFTER_S = 600.0  # a state nobody has asked about: its compute replica died, or another sampler has it
FORGET_EVERY_S = 10.0
FAILED = -1  # the token id of a decision without one: the sequence is over


@dataclass(frozen=True, slots=True)
class Decided:
    """What one row came to. Exactly one of entry (new, to be logged) and event (logged before) is set, or neither: the request is over."""

    handle: int
    position: int
    state: RequestState | None
    entry: LogEntry | None = None
    event: TokenEvent | None = None


class SamplerService:
    def __init__(self, stage: Stage, settings: SamplerSettings, tokenizer: Tokenizer) -> None:
        self.stage = stage
        self.settings = settings
        self.tokenizer = tokenizer
        self.tokens = TokenTable(tokenizer)
        self.states: dict[tuple[str, int], RequestState] = {}  # by compute replica and handle
        self.reader = DirectReader(stage.transport, candidates(stage.replica_id))
        self.control = DirectReader(stage.transport, CONTROL)
        self.num_tokens = 0
        self.forgot_at = time.monotonic()

    def run(self) -> None:
        self.stage.catch_signals()
        self.stage.transport.wait_until_up(self.settings.redis_timeout_s)
        self.control.start_at_end()
        self.stage.join()
        quiet_since = time.monotonic()
        while not (self.stage.stopping.is_set() and time.monotonic() - quiet_since > self.settings.drain_s):
            if self.stage.stopping.is_set():
                self.stage.leave()  # compute sends elsewhere from its next look at the registry; until then, go on
            steps = self.read()
            for step in steps:
                self.answer(step)
                quiet_since = time.monotonic()
            self.stage.turn()
            self.stage.load.update(sequences=len(self.states), tokens=self.num_tokens)
            if quiet_since - self.forgot_at > FORGET_EVERY_S:
                self.forget_untouched()
        self.stage.leave()
        self.stage.transport.run(lambda pipe: pipe.delete(self.reader.stream.key))

    def read(self) -> list[StepCandidates]:
        """Trim what was answered, then wait for more."""

        def fill(pipe: Pipeline) -> None:
            self.reader.trim(pipe)
            pipe.xread({self.reader.stream.key: self.reader.last_id, CONTROL.key: self.control.last_id}, block=BLOCK_MS)

        reply = self.stage.transport.run(fill)[-1]
        for message in self.control.take(reply):
            self.obey(message)
        return self.reader.take(reply)

    def answer(self, step: StepCandidates) -> None:
        """Decide the step's rows and write them: log, events, decisions."""
        for handle in step.forget.tolist():
            self.states.pop((step.compute_id, handle), None)
        for intro in step.intros:
            self.states[step.compute_id, intro.handle] = self.rebuild(intro)
        decided = self.decide(step)
        decided = self.write(step, decided)
        self.num_tokens += len(decided)
        for row in decided:
            if row.state is None or row.state.is_finished:
                self.states.pop((step.compute_id, row.handle), None)

    def rebuild(self, intro: SequenceIntro) -> RequestState:
        """The state of a request that is new here: replayed from its log, which is empty for one that is new everywhere."""
        state = RequestState.begin(intro, self.tokenizer, time.monotonic())
        for event in self.stage.transport.persist(lambda: read_log(self.stage.transport.client, intro.request_id)):
            state.replay(event)
        return state

    def decide(self, step: StepCandidates) -> list[Decided]:
        """Each row's next token: the draw for all rows at once, then text and stop strings row by row."""
        known = [self.states.get((step.compute_id, handle)) for handle in step.handles.tolist()]
        logits = pad(step.logits, step.counts, -np.inf)
        temperatures = np.array([0.0 if state is None else state.intro.params.temperature for state in known])
        seeds = np.array([0 if state is None else state.intro.params.seed for state in known], np.uint64)
        columns = decide(logits, step.counts, temperatures, step.kept_mass, uniform(seeds, step.positions)).tolist()
        starts = (np.cumsum(step.counts) - step.counts).tolist()
        rows = zip(step.handles.tolist(), step.positions.tolist(), known, columns, starts, step.counts.tolist(), strict=True)
        decided = []
        for row, (handle, position, state, column, start, count) in enumerate(rows):
            if state is None:
                log.warning("candidates of an unknown sequence, waiting for its introduction", compute_id=step.compute_id, handle=handle)
            elif state.is_finished:
                decided.append(Decided(handle, position, state, event=state.last_event))
            elif state.position >= position:
                decided.append(Decided(handle, position, state, event=self.logged(state, position)))
            elif state.position == position - 1:
                is_tail = column >= count and step.tail_token_ids[row] >= 0
                at = start + min(column, count - 1)
                token_id = int(step.tail_token_ids[row] if is_tail else step.token_ids[at])
                logit = float(step.tail_logits[row] if is_tail else step.logits[at])
                decided.append(self.append(state, handle, token_id, self.logprob(step, row, start, state, token_id, logit)))
            else:
                log.warning("candidates ahead of the log, waiting for an introduction", request_id=state.intro.request_id, position=position)
                self.states.pop((step.compute_id, handle))
        return decided

    def append(self, state: RequestState, handle: int, token_id: int, logprob: TokenLogprob | None) -> Decided:
        """The state one token on. What goes wrong in a request's text is that request's error alone."""
        state.touched_at = time.monotonic()
        position = state.position + 1
        try:
            event = state.append(token_id, logprob)
        except Exception as error:  # a tokenizer's own failure on these tokens
            log.exception("request failed", request_id=state.intro.request_id)
            failure = RequestError(f"the text of the answer could not be made: {error}")
            event = TokenEvent(state.intro.request_id, state.position, None, "", finish_reason="error", error=failure)
            state.last_event = event
        return Decided(handle, position, state, entry=log_entry(event))

    def logprob(self, step: StepCandidates, row: int, start: int, state: RequestState, token_id: int, logit: float) -> TokenLogprob | None:
        """The token's logprob and the likeliest alternatives', if the request asked for them."""
        wanted = state.intro.params.logprobs
        if wanted is None:
            return None
        logsumexp = float(step.logsumexp[row])
        listed = range(start, start + min(wanted, int(step.counts[row])))
        top = tuple(TopLogprob(*self.tokens.describe(int(step.token_ids[at])), float(step.logits[at]) - logsumexp) for at in listed)
        return TokenLogprob(*self.tokens.describe(token_id), logit - logsumexp, top)

    def logged(self, state: RequestState, position: int) -> TokenEvent | None:
        """What was decided at an earlier position."""
        last = state.last_event
        if last is not None and last.position == position:
            return last
        return self.stage.transport.persist(lambda: read_entry(self.stage.transport.client, state.intro.request_id, f"{position}-0"))

    def write(self, step: StepCandidates, decided: list[Decided]) -> list[Decided]:
        """One round trip. If a position was decided elsewhere meanwhile, take over what the log holds, and send that."""
        entries = [row.entry for row in decided if row.entry is not None]
        refused = self._send(step, decided, entries)
        if not refused:
            return decided
        rejected = {entries[index - 1].event.request_id: entries[index - 1] for index in refused}
        settled = [self.settle(row) if row.entry and row.entry.event.request_id in rejected else row for row in decided]
        self._send(step, settled, [])
        return settled

    def settle(self, row: Decided) -> Decided:
        """The log refused this entry: what does it hold?"""
        assert row.entry is not None and row.state is not None
        request_id = row.entry.event.request_id
        logged = self.stage.transport.persist(lambda: read_entry(self.stage.transport.client, request_id, row.entry.entry_id if row.entry else ""))
        if logged == row.entry.event:
            return Decided(row.handle, row.position, row.state, event=logged)
        log.info("decided elsewhere", request_id=request_id, position=row.position)
        if logged is None:  # the request has ended: cancelled, or failed
            return Decided(row.handle, row.position, None)
        state = self.rebuild(row.state.intro)
        for key, known in list(self.states.items()):
            if known is row.state:
                self.states[key] = state
        return Decided(row.handle, row.position, state, event=logged)

    def _send(self, step: StepCandidates, decided: list[Decided], entries: list[LogEntry]) -> list[int]:
        messages: list[tuple[DirectStream, StepEvents | StepDecisions]] = []
        events_by_gateway: dict[str, list[bytes]] = defaultdict(list)
        for row in decided:
            if row.state is not None and row.state.gateway_id is not None:
                if row.entry is not None:
                    events_by_gateway[row.state.gateway_id].append(row.entry.payload)
                elif row.event is not None:
                    events_by_gateway[row.state.gateway_id].append(log_entry(row.event).payload)
        for gateway_id, payloads in events_by_gateway.items():
            messages.append((events(gateway_id), StepEvents(tuple(payloads))))
        messages.append((decisions(step.compute_id), self.decisions(step, decided)))
        refused: list[int] = self.stage.transport.run(lambda pipe: write_step(pipe, entries, messages))[0]
        return refused

    def decisions(self, step: StepCandidates, decided: list[Decided]) -> StepDecisions:
        outcomes = [row.entry.event if row.entry is not None else row.event for row in decided]
        return StepDecisions(
            sampler_id=self.stage.replica_id,
            step=step.step,
            handles=np.array([row.handle for row in decided], np.int32),
            positions=np.array([row.position for row in decided], np.int32),
            token_ids=np.array([FAILED if event is None or event.token_id is None else event.token_id for event in outcomes], np.int32),
            is_finished=np.array([event is None or event.finish_reason is not None for event in outcomes], np.uint8),
        )

    def obey(self, message: Control) -> None:
        """Control: a gateway has resumed requests. (Cancelling is compute's, which then says what to forget.)"""
        if message.action == "attach":
            for state in self.states.values():
                if state.intro.request_id in message.request_ids:
                    state.gateway_id = message.gateway_id

    def forget_untouched(self) -> None:
        now = self.forgot_at = time.monotonic()
        for key in [key for key, state in self.states.items() if now - state.touched_at > FORGET_AFTER_S]:
            del self.states[key]
