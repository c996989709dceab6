"""The sampler's loop: read a step's candidates, decide, write log, events and decisions in one round trip, trim.

Deciding is idempotent. A row whose position is already in the log is answered from the log, whether this replica decided it, another
one did, or compute came back from a crash and asks again; the log refuses a second entry at a position, and what it holds wins. Compute runs
ahead: a row says which token it was computed upon, and is passed over if the log holds another there.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from redis.exceptions import RedisError
from tokenizers import Tokenizer

from services.sampler.detokenizer import TokenTable
from services.sampler.request_state import LOST_LOG, NO_TEXT, RequestState, catch_up
from services.sampler.rows import FAILED, UNKNOWN, Decided, moments_of, select
from services.sampler.spans import trace
from shared.model.decision import decide, pad, pick, uniform
from shared.process.errors import Lost, Recoverable
from shared.process.settings import SamplerSettings
from shared.process.telemetry import get_logger
from shared.wire.line import Line
from shared.wire.messages import Control, SequenceIntro, StepCandidates, StepDecisions, StepEvents, TokenLogprob, TopLogprob, encode
from shared.wire.redis_clock import follow_clock
from shared.wire.stage import Stage
from shared.wire.streams import CONTROL, MESSAGE, DirectStream, candidates, decisions, events
from shared.wire.token_log import LogEntry, decode_entry, log_entry, queue_entry, queue_read, write_end, write_step
from shared.wire.transport import DirectReader, Pipeline, write_dead_letter

log = get_logger("penstock.sampler")

BLOCK_MS = 500
FORGET_AFTER_S = 600.0  # a state nobody has asked about: its compute replica died, or another sampler has it
FORGET_EVERY_S = 10.0
FOLLOW_CLOCK_EVERY_S = 1.0
REBUILD_AT_ONCE = 32  # sequences whose logs are read in one round trip
ANSWER_EVERY_S = 0.5  # while many are taken over: compute goes on with those, and hears that this sampler lives well before it loses its patience


class SamplerService:
    def __init__(self, stage: Stage, settings: SamplerSettings, tokenizer: Tokenizer) -> None:
        assert stage.model is not None
        self.stage = stage
        self.settings = settings
        self.model = stage.model
        self.tokenizer = tokenizer
        self.tokens = TokenTable(tokenizer)
        self.states: dict[tuple[str, int], RequestState] = {}  # by compute replica and handle
        self.reader = DirectReader(stage.transport, candidates(stage.replica_id))
        self.control = DirectReader(stage.transport, CONTROL)
        self.news = Line(stage.transport.client)
        self.num_tokens = self.num_rebuilt = 0
        self.forgot_at = self.followed_at = time.monotonic()

    def run(self) -> None:
        self.stage.catch_signals()
        self.stage.transport.wait_until_up(self.settings.redis_timeout_s)
        self.control.start_at_end()
        self.stage.join()
        quiet_since = time.monotonic()
        while not (self.stage.stopping.is_set() and time.monotonic() - quiet_since > self.settings.drain_s):
            if self.stage.stopping.is_set():
                self.stage.leave()  # compute sends elsewhere from its next look at the registry; until then, go on
            for step in self.read():
                self.answer(step)
                quiet_since = time.monotonic()
            self.stage.turn()
            self.stage.load.update(sequences=len(self.states), tokens=self.num_tokens, rebuilt=self.num_rebuilt)
            if time.monotonic() - self.forgot_at > FORGET_EVERY_S:
                self.forget_untouched()
            if time.monotonic() - self.followed_at > FOLLOW_CLOCK_EVERY_S:
                self.followed_at = time.monotonic()
                follow_clock(self.stage.transport, [self.reader, self.control])
        self.stage.leave()
        self.news.close()
        self.stage.transport.run(lambda pipe: pipe.delete(self.reader.stream.key))

    def read(self) -> list[StepCandidates]:
        """The steps that have come; waits for the first."""
        try:
            if not self.news.num_awaited:
                self.news.send(self.ask)
            if not self.news.has_reply(BLOCK_MS / 1000):
                return []
            reply = self.news.receive()[-1]
        except (RedisError, OSError) as error:
            self.news.close()
            self.stage.transport.wait_out(error)
            return []
        self.stage.transport.backoff.succeeded()
        for message in self.control.take(reply):
            self.obey(message)
        return self.reader.take(reply)

    def ask(self, pipe: Pipeline) -> None:
        """Leave a read standing; now and then, trim what was read before."""
        self.reader.trim_now_and_then(pipe)
        pipe.xread({self.reader.stream.key: self.reader.last_id, CONTROL.key: self.control.last_id}, block=BLOCK_MS)

    def write_and_ask(self, fill: Callable[[Pipeline], None]) -> list[Any]:
        """The replies to what `fill` queues. The next read goes with it, in one packet, if none stands."""
        if not self.news.num_awaited:

            def fill_both(pipe: Pipeline) -> None:
                fill(pipe)
                self.ask(pipe)

            try:
                self.news.send(fill_both)
                return self.news.receive(leave=1)
            except (RedisError, OSError):
                self.news.close()  # nobody knows what was written: all of it again, with patience
        return self.stage.transport.run(fill)

    def answer(self, step: StepCandidates) -> None:
        """Decide the step's rows and write them: log, events, decisions. What nobody can answer becomes a dead letter."""
        try:
            for part in self.introduce(step):
                decided = self.write(part, self.decide(part))
                self.num_tokens += len(decided)
                for row in decided:
                    if row.is_over:
                        self.forget((step.compute_id, row.handle), "failed" if row.outcome is None else "finished")
        except (RedisError, OSError, Recoverable):
            raise
        except Exception as error:  # a mistake in this message, or of ours with it: compute asks again, and gives the request up in the end
            log.exception("a step can't be answered", compute_id=step.compute_id)
            for handle in step.handles.tolist():  # some may be ahead of their logs by now
                self.forget((step.compute_id, handle), "failed")
            letter = partial(write_dead_letter, self.reader.stream.key, {MESSAGE: encode(step)}, error, 1)
            self.stage.transport.run(letter)

    def introduce(self, step: StepCandidates) -> Iterator[StepCandidates]:
        """Make the step's sequences known, and give its rows out: at once, or in parts while sequences with long logs are taken over."""
        for handle in step.forget.tolist():
            self.forget((step.compute_id, handle), "ended elsewhere")
        new = [intro for intro in step.intros if not self.knows(step.compute_id, intro)]
        handles, given, left = step.handles.tolist(), set[int](), {intro.handle for intro in new}
        answered_at = time.monotonic() if len(new) <= REBUILD_AT_ONCE else 0.0  # with many, the others need not wait even for the first
        for start in range(0, len(new), REBUILD_AT_ONCE):
            for handle in self.rebuild(step.compute_id, new[start : start + REBUILD_AT_ONCE]):
                left.discard(handle)
                if time.monotonic() - answered_at > ANSWER_EVERY_S:
                    ready = [row for row, each in enumerate(handles) if each not in left and row not in given]
                    given.update(ready)
                    yield from select(step, ready)
                    self.stage.turn()
                    answered_at = time.monotonic()
        if given:
            yield from select(step, [row for row in range(len(handles)) if row not in given])
        else:
            yield step

    def knows(self, compute_id: str, intro: SequenceIntro) -> bool:
        state = self.states.get((compute_id, intro.handle))
        return state is not None and state.intro.request_id == intro.request_id

    def rebuild(self, compute_id: str, intros: list[SequenceIntro]) -> Iterator[int]:
        """The states of requests that are new here: replayed from their logs, which are empty for those that are new everywhere. One round trip for all.

        Gives each one's handle once it is ready.
        """
        for intro in intros:
            self.states[compute_id, intro.handle] = RequestState.begin(intro, self.tokenizer, time.monotonic())
        states = [self.states[compute_id, intro.handle] for intro in intros]
        for state, entries in zip(states, self.read_logs(states), strict=True):
            catch_up(state, entries)
            if state.position < state.intro.num_decided_tokens and not state.is_finished:
                state.lost = state.lost or f"{state.position} are left of {state.intro.num_decided_tokens}"
            state.num_replayed_tokens = state.position
            self.num_rebuilt += 1
            yield state.intro.handle

    def catch_up(self, states: list[RequestState]) -> None:
        """Replay what the logs hold beyond the states' positions."""
        for state, entries in zip(states, self.read_logs(states), strict=True):
            catch_up(state, entries)

    def read_logs(self, states: list[RequestState]) -> list[Any]:
        """The entries beyond the states' positions, in one round trip."""
        if not states:
            return []

        def ask(pipe: Pipeline) -> None:
            for state in states:
                queue_read(pipe, state.intro.request_id, state.position)

        return self.stage.transport.run(ask)

    def decide(self, step: StepCandidates) -> list[Decided]:
        """Each row's next token: the draw for all rows at once, then text and stop strings row by row, of a sequence in the order of its positions."""
        handles, positions = step.handles.tolist(), step.positions.tolist()
        known = [self.states.get((step.compute_id, handle)) for handle in handles]
        firsts = {id(state): (state, position) for state, position in zip(reversed(known), reversed(positions), strict=True) if state is not None}
        self.catch_up([state for state, position in firsts.values() if position > state.position + 1])
        token_ids, logits = self.draw(step, known)
        previous = step.previous_token_ids.tolist() or [None] * len(positions)
        decided: list[Decided] = []
        over, astray = set[int](), set[int]()  # handles whose sequences have ended, or whose logs hold other tokens than the next rows were computed upon
        token_before: dict[int, int | None] = {}  # that the log holds, by handle, of the row before
        for row, (handle, position, state) in enumerate(zip(handles, positions, known, strict=True)):
            if handle in over:
                continue
            if previous[row] is not None and token_before.get(handle, previous[row]) != previous[row]:
                astray.add(handle)
            if state is None:
                decided.append(Decided(handle, position, None, code=UNKNOWN))
            elif state.lost:
                decided.append(Decided(handle, position, state, end=state.failure(state.lost)))
            elif position <= state.position or state.is_finished:
                decided.append(self.logged(state, handle, position))
                token_before[handle] = decided[-1].event.token_id if decided[-1].event is not None else None
            elif handle not in astray and position == state.position + 1 and (previous[row] is None or previous[row] == state.last_token_id):
                decided.append(self.append(step, row, state, token_ids[row], logits[row]))
            else:
                log.info("passed over, computed upon other tokens than the log's", request_id=state.intro.request_id, position=position)
                astray.add(handle)
                continue
            if decided[-1].is_over:
                over.add(handle)
        return decided

    def draw(self, step: StepCandidates, known: list[RequestState | None]) -> tuple[list[int], list[float]]:
        """The token of each row and its logit; `known` are the rows' requests."""
        logits, columns = pad(step.logits, step.counts, -np.inf), np.zeros(len(known), np.int64)
        if step.kept_mass.any():
            temperatures = np.array([0.0 if state is None else state.intro.params.temperature for state in known])
            if len(step.temperatures):
                temperatures = np.where(step.temperatures >= 0, step.temperatures, temperatures)
            seeds = np.array([0 if state is None else state.intro.params.seed for state in known], np.uint64)
            columns = decide(logits, step.counts, temperatures, step.kept_mass, uniform(seeds, step.positions))
        token_ids = pick(columns, step.counts, pad(step.token_ids, step.counts, 0), step.tail_token_ids, step.tail_token_ids)
        return token_ids.tolist(), pick(columns, step.counts, logits, step.tail_token_ids, step.tail_logits).tolist()

    def append(self, step: StepCandidates, row: int, state: RequestState, token_id: int, logit: float) -> Decided:
        """The state one token on. What goes wrong in a request's text is that request's error alone."""
        handle, position = int(step.handles[row]), int(step.positions[row])
        state.touched_at = time.monotonic()
        try:
            prompt = self.tokens.spell(state.intro.prompt_logprobs) if position == 1 and state.intro.prompt_logprobs is not None else None
            if state.intro.params.max_tokens == 0:
                return Decided(handle, position, state, end=state.end_after_prompt(prompt))
            entry = log_entry(state.append(token_id, self.logprob(step, row, state, token_id, logit), prompt))
        except Exception as error:  # a tokenizer's own failure on these tokens
            log.exception("request failed", request_id=state.intro.request_id)
            return Decided(handle, position, state, end=state.failure(f"{NO_TEXT}: {error}"))
        if position == 1 and (prompt is not None or state.intro.prompt_token_ids is not None):
            state.intro = replace(state.intro, prompt_logprobs=None, prompt_token_ids=None)  # from now on the log holds them
        return Decided(handle, position, state, entry=entry)

    def logprob(self, step: StepCandidates, row: int, state: RequestState, token_id: int, logit: float) -> TokenLogprob | None:
        """The token's logprob and the likeliest alternatives', if the request asked for them."""
        wanted = state.intro.params.logprobs
        if wanted is None:
            return None
        start, logsumexp = int(step.counts[:row].sum()), float(step.logsumexp[row])
        listed = range(start, start + min(wanted, int(step.counts[row])))
        top = tuple(TopLogprob(*self.tokens.describe(each), float(step.logits[at]) - logsumexp, each) for at in listed for each in (int(step.token_ids[at]),))
        return TokenLogprob(*self.tokens.describe(token_id), logit - logsumexp, top, token_id=token_id)

    def logged(self, state: RequestState, handle: int, position: int) -> Decided:
        """What the log holds at a position that is decided, or the end that came before it."""
        last = state.last_event
        if last is None or last.position > position:
            found = self.stage.transport.run(lambda pipe: queue_entry(pipe, state.intro.request_id, position))[0]
            try:
                last = decode_entry(found[0][1][MESSAGE]) if found else None
            except Lost as error:
                return Decided(handle, position, state, end=state.failure(str(error)))
        return Decided(handle, position, state, event=last)

    def write(self, step: StepCandidates, decided: list[Decided]) -> list[Decided]:
        """One round trip, and one more for ends without a token. If a position was decided elsewhere meanwhile, take over what the log holds, send that, and
        decide anew what comes after it."""
        tokens, ends = [row for row in decided if row.end is None], [row for row in decided if row.end is not None]
        settled, refused = self.write_tokens(step, tokens) if tokens else ([], {})
        handles = {handle for handle, _ in refused}
        told = [row for row in ends if row.handle not in handles]
        if told:
            self._send(step, told, [])
        over = {row.handle for row in settled if row.is_over or row.outcome is None or row.outcome.token_id != refused.get(row.key, row.outcome.token_id)}
        again = {row.key: row for row in decided if row.handle in handles - over}
        for row in settled:
            again.pop(row.key, None)
        for state in {id(row.state): row.state for row in again.values() if row.state is not None}.values():
            self.renew(state)
        keys = zip(step.handles.tolist(), step.positions.tolist(), strict=True)
        for part in select(step, [index for index, key in enumerate(keys) if key in again]):
            settled += self.write(part, self.decide(part))
        return settled + told

    def write_tokens(self, step: StepCandidates, decided: list[Decided]) -> tuple[list[Decided], dict[tuple[int, int], int | None]]:
        """Rows without ends of their own. Returns those that the log holds now, and the tokens that it refused, of each sequence the first."""
        new = [row for row in decided if row.entry is not None]
        found = self._send(step, decided, [row.entry for row in new if row.entry is not None])
        if not found:
            return decided, {}
        held = {new[index - 1].key: payload for index, payload in found}
        refused = {row.key: row.entry.event.token_id for row in new if row.entry is not None and held.get(row.key, b"") != b""}
        settled = [self.settle(row, held[row.key]) if row.key in held else row for row in decided if held.get(row.key) != b""]
        self._send(step, settled, [])
        return settled, refused

    def settle(self, row: Decided, payload: bytes | None) -> Decided:
        """The log refused this entry, and holds `payload` instead; None: it has lost what came before."""
        assert row.entry is not None and row.state is not None
        event, request_id = row.entry.event, row.entry.event.request_id
        try:
            logged = decode_entry(payload) if payload is not None else None
        except Lost as error:
            return replace(row, entry=None, end=row.state.failure(str(error)))
        if logged is None:
            return replace(row, entry=None, end=row.state.failure(LOST_LOG))
        if (logged.position, logged.token_id, logged.text, logged.finish_reason) == (event.position, event.token_id, event.text, event.finish_reason):
            row.state.last_event = logged  # by a try that seemed to fail, or by a replica that decided the same
            return replace(row, entry=None, event=logged)
        log.info("decided elsewhere", request_id=request_id, position=row.position)
        if logged.token_id is None or logged.position != row.position:  # the request has ended: cancelled, or failed
            return replace(row, entry=None, state=None)
        return replace(row, entry=None, state=self.renew(row.state), event=logged)

    def renew(self, known: RequestState) -> RequestState:
        """The state as the log has it, in place of one that has gone another way."""
        state = RequestState.begin(known.intro, self.tokenizer, time.monotonic())
        state.gateway_id = known.gateway_id
        self.catch_up([state])
        for key, each in list(self.states.items()):
            if each is known:
                self.states[key] = state
        return state

    def _send(self, step: StepCandidates, decided: list[Decided], entries: list[LogEntry]) -> list[tuple[int, bytes | None]]:
        messages: list[tuple[DirectStream, StepEvents | StepDecisions]] = []
        events_by_gateway: dict[str, list[bytes]] = defaultdict(list)
        for row in decided:
            if row.state is not None and row.state.gateway_id is not None:
                if row.entry is not None:
                    events_by_gateway[row.state.gateway_id].append(row.entry.payload)
                elif row.event is not None:
                    events_by_gateway[row.state.gateway_id].append(log_entry(row.event).payload)
        told_at, own = time.time(), self.stage.replica_id
        for gateway_id, payloads in events_by_gateway.items():
            moments = moments_of([row for row in decided if row.is_notable(gateway_id)], step.compute_id, own, told_at)
            messages.append((events(gateway_id), StepEvents(tuple(payloads), moments)))
        messages.append((decisions(step.compute_id), self.decisions(step, decided)))

        ends = [(row.end, row.state.gateway_id, moments_of([row], step.compute_id, own, told_at)) for row in decided if row.end and row.state]

        def fill(pipe: Pipeline) -> None:
            for end, gateway_id, moments in ends:
                write_end(pipe, self.model, end, gateway_id, moments)
            write_step(pipe, self.model, entries, messages)

        refused: list[tuple[int, bytes | None]] = self.write_and_ask(fill)[len(ends)]
        return refused

    def decisions(self, step: StepCandidates, decided: list[Decided]) -> StepDecisions:
        outcomes = [row.outcome for row in decided]
        tokens = [event.token_id if event is not None and event.token_id is not None else row.code for row, event in zip(decided, outcomes, strict=True)]
        ends = [row.code == FAILED if event is None else event.finish_reason is not None for row, event in zip(decided, outcomes, strict=True)]
        return StepDecisions(
            sampler_id=self.stage.replica_id,
            step=step.step,
            handles=np.array([row.handle for row in decided], np.int32),
            positions=np.array([row.position for row in decided], np.int32),
            token_ids=np.array(tokens, np.int32),
            is_finished=np.array(ends, np.uint8),
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
            self.forget(key, "silence")

    def forget(self, key: tuple[str, int], outcome: str) -> None:
        """Of a replica and its handle, if it is known. outcome: for its trace."""
        state = self.states.pop(key, None)
        if state is not None and self.stage.tracer is not None:
            trace(self.stage.tracer, state, key[0], outcome)
