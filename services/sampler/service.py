"""The sampler's loop: read a step's candidates, decide, write log, events and decisions in one
round trip, trim.

The log refuses a second entry at a position, and what it holds wins.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from redis.exceptions import RedisError
from tokenizers import Tokenizer

from services.sampler.decider import Logged, StepDecider
from services.sampler.replay import LogReplay, is_last
from services.sampler.request_state import RequestState, catch_up
from services.sampler.rows import LOST, Decided, select, to_decide_again
from services.sampler.writer import AFTER_REFUSED, Held, StepWriter
from shared.model.token_table import TokenTable
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.errors import Lost, Recoverable
from shared.process.settings import SamplerSettings
from shared.process.telemetry import get_logger
from shared.process.tracing import Attributes, Tracer
from shared.wire.entries import DirectReader, write_dead_letter
from shared.wire.line import Pipeline, RedisConnection
from shared.wire.load import Load
from shared.wire.messages import Control, SequenceIntro, StepCandidates, encode
from shared.wire.redis_clock import follow_clock
from shared.wire.stage import Stage
from shared.wire.streams import CONTROL, MESSAGE, candidates
from shared.wire.token_log import decode_entry

log = get_logger("penstock.sampler")

BLOCK_MS = 500
# a state that no row asks about: another sampler has it, or its compute replica is gone. A replica
# that comes back introduces its sequences again
FORGET_AFTER_S, FORGET_GONE_AFTER_S = 600.0, 30.0
FORGET_EVERY_S = 10.0
FOLLOW_CLOCK_EVERY_S = 1.0
REBUILD_AT_ONCE = 32  # sequences whose logs are read in one round trip
# while many sequences are taken over: compute continues those that are ready, and knows well before
# its patience ends that this sampler lives
ANSWER_EVERY_S = 0.5


class SamplerService:
    def __init__(
        self, stage: Stage, settings: SamplerSettings, tokenizer: Tokenizer, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """clock: of all times that it measures and writes; Redis' own waits are not among them."""
        assert stage.model is not None
        self.stage = stage
        self.settings = settings
        self.clock = clock
        self.decider = StepDecider(TokenTable(tokenizer), clock)
        self.writer = StepWriter(stage.model, stage.replica_id, self.write_and_ask, clock)
        self.replay = LogReplay(stage.transport, tokenizer, clock)
        self.states: dict[tuple[str, int], RequestState] = {}  # by compute replica and handle
        self.reader = DirectReader(stage.transport, candidates(stage.replica_id))
        self.control = DirectReader(stage.transport, CONTROL)
        self.news = RedisConnection(stage.transport.client)
        self.num_tokens = self.num_rebuilt = 0
        self.forgot_at = self.followed_at = self.clock.monotonic()

    def run(self) -> None:
        self.stage.catch_signals()
        self.stage.transport.wait_until_up(self.settings.redis_timeout_s)
        self.control.start_at_end()
        self.stage.join()
        quiet_since = self.clock.monotonic()
        while not (self.stage.stopping.is_set() and self.clock.monotonic() - quiet_since > self.settings.drain_s):
            if self.stage.stopping.is_set():
                # compute sends elsewhere from its next look at the registry; until then, go on
                self.stage.leave()
            for step in self.read():
                self.answer(step)
                quiet_since = self.clock.monotonic()
            self.stage.mark_alive()
            self.stage.load = Load(sequences=len(self.states), tokens=self.num_tokens, rebuilt=self.num_rebuilt)
            if self.clock.monotonic() - self.forgot_at > FORGET_EVERY_S:
                self.forget_untouched()
            if self.clock.monotonic() - self.followed_at > FOLLOW_CLOCK_EVERY_S:
                self.followed_at = self.clock.monotonic()
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
            self.handle_control(message)
        return self.reader.take(reply)

    def ask(self, pipe: Pipeline) -> None:
        """Leave a read standing; now and then, trim what was read before."""
        self.reader.trim_now_and_then(pipe)
        pipe.xread({self.reader.stream.key: self.reader.last_id, CONTROL.key: self.control.last_id}, block=BLOCK_MS)

    def write_and_ask(self, fill: Callable[[Pipeline], None]) -> list[Any]:
        """The replies to what `fill` queues. The next read goes with it, in one packet, if none
        stands."""
        if not self.news.num_awaited:

            def fill_both(pipe: Pipeline) -> None:
                fill(pipe)
                self.ask(pipe)

            try:
                self.news.send(fill_both)
                return self.news.receive(leave=1)
            except (RedisError, OSError):
                self.news.close()  # it is unknown what was written: write all again, with retries
        return self.stage.transport.run(fill)

    def answer(self, step: StepCandidates) -> None:
        """Decide the step's rows and write them: log, events, decisions. A step that can't be
        answered becomes a dead letter."""
        try:
            for part in self.introduce(step):
                decided = self.decide_and_write(part)
                self.num_tokens += len(decided)
                for row in decided:
                    if row.is_over:
                        self.forget((step.compute_id, row.handle), "failed" if row.event is None else "finished")
        except (RedisError, OSError, Recoverable):
            raise
        except Exception as error:
            # the message is wrong, or the sampler has a bug: compute asks again, and at last gives the
            # request up
            log.exception("a step can't be answered", compute_id=step.compute_id)
            for handle in step.handles.tolist():  # some may be ahead of their logs by now
                self.forget((step.compute_id, handle), "failed")
            letter = partial(write_dead_letter, self.reader.stream.key, {MESSAGE: encode(step)}, error, 1)
            self.stage.transport.run(letter)

    def introduce(self, step: StepCandidates) -> Iterator[StepCandidates]:
        """Make the step's sequences known, and give its rows out: at once, or in parts while
        sequences with long logs are taken over."""
        for handle in step.forget.tolist():
            self.forget((step.compute_id, handle), "ended elsewhere")
        new = [intro for intro in step.intros if not self.knows(step.compute_id, intro)]
        handles, given, left = step.handles.tolist(), set[int](), {intro.handle for intro in new}
        # with many, the others need not wait even for the first
        answered_at = self.clock.monotonic() if len(new) <= REBUILD_AT_ONCE else 0.0
        for start in range(0, len(new), REBUILD_AT_ONCE):
            for handle in self.rebuild(step.compute_id, new[start : start + REBUILD_AT_ONCE]):
                left.discard(handle)
                if self.clock.monotonic() - answered_at > ANSWER_EVERY_S:
                    ready = [row for row, each in enumerate(handles) if each not in left and row not in given]
                    given.update(ready)
                    if ready:
                        yield select(step, ready)
                    self.stage.mark_alive()
                    answered_at = self.clock.monotonic()
        rest = [row for row in range(len(handles)) if row not in given]
        if not given:
            yield step
        elif rest:
            yield select(step, rest)

    def knows(self, compute_id: str, intro: SequenceIntro) -> bool:
        state = self.states.get((compute_id, intro.handle))
        return (
            state is not None
            and state.intro.request_id == intro.request_id
            and state.position >= intro.num_decided_tokens
        )

    def rebuild(self, compute_id: str, intros: list[SequenceIntro]) -> Iterator[int]:
        """The states of requests that are new here, or behind what compute knows: replayed from their
        logs, which are empty for those that are new everywhere. One round trip for all.

        Gives each one's handle once it is ready.
        """
        states = [self.replay.begin(intro) for intro in intros]
        for state in states:
            known = self.states.get((compute_id, state.intro.handle))
            if known is not None and known.intro.request_id == state.intro.request_id:
                state.gateway_id = known.gateway_id  # of a reader that came since
        self.states.update({(compute_id, state.intro.handle): state for state in states})
        for state, entries in zip(states, self.replay.read(states), strict=True):
            catch_up(state, entries)
            if state.position < state.intro.num_decided_tokens and not state.is_finished and not state.lost:
                state.is_shortened = True
            state.num_replayed_tokens = state.position
            self.num_rebuilt += 1
            yield state.intro.handle

    def decide_and_write(self, step: StepCandidates) -> list[Decided]:
        """Decide a step's rows and write them. Where a log refuses one, what it holds wins, and the
        rows after it are decided again."""
        part: StepCandidates | None = step
        answered: list[Decided] = []
        while part is not None:
            decided = self.decider.decide(part, *self.look_up(part))
            tokens, ends = [row for row in decided if row.end is None], [row for row in decided if row.end is not None]
            refused = self.writer.write(part, tokens) if tokens else {}
            if refused:
                tokens = [
                    self.settle(row, refused[row.key]) if row.key in refused else row
                    for row in tokens
                    if refused.get(row.key) != AFTER_REFUSED
                ]
                self.writer.tell(part, tokens)
                ends = [row for row in ends if row.handle not in {handle for handle, _ in refused}]
            if ends:
                self.writer.tell(part, ends)
            answered += tokens + ends
            part = self.remainder(part, to_decide_again(decided, tokens, refused)) if refused else None
        return answered

    def remainder(self, step: StepCandidates, again: list[Decided]) -> StepCandidates | None:
        """The rows to decide again, on what their logs hold now; None: there are none."""
        for state in {id(row.state): row.state for row in again if row.state is not None}.values():
            self.renew(state)
        keys = {row.key for row in again}
        rows = [
            index
            for index, key in enumerate(zip(step.handles.tolist(), step.positions.tolist(), strict=True))
            if key in keys
        ]
        return select(step, rows) if rows else None

    def look_up(self, step: StepCandidates) -> tuple[list[RequestState | None], Logged]:
        """Each row's state, as far on as its log where it is behind the rows; and the logs' events
        that are no longer in the states."""
        states = [self.states.get((step.compute_id, handle)) for handle in step.handles.tolist()]
        places = [
            (state, position)
            for state, position in zip(states, step.positions.tolist(), strict=True)
            if state is not None
        ]
        firsts = {id(state): (state, position) for state, position in reversed(places)}
        self.replay.catch_up([state for state, position in firsts.values() if position > state.position + 1])
        past = [
            (state, position)
            for state, position in places
            if position <= state.position and not is_last(state, position)
        ]
        keys = [(state.intro.handle, position) for state, position in past]
        return states, dict(zip(keys, self.replay.events_at(past), strict=True))

    def settle(self, row: Decided, held: Held) -> Decided:
        """The log refused this entry, and holds another instead, or has lost what came before."""
        assert row.event is not None and row.state is not None
        event, request_id = row.event, row.event.request_id
        try:
            logged = decode_entry(*held) if held else None
        except Lost as error:
            return replace(row, event=None, payload=b"", end=row.state.failure(str(error)))
        if logged is None:  # compute begins again where the log ends, and comes to the same tokens
            return replace(row, event=None, payload=b"", state=None, code=LOST)
        if (logged.position, logged.token_id, logged.text, logged.finish_reason) == (
            event.position,
            event.token_id,
            event.text,
            event.finish_reason,
        ):
            # by a try that seemed to fail, or by a replica that decided the same
            if logged.fingerprint != event.fingerprint:  # on candidates of another compute
                return replace(row, event=logged, payload=b"", state=self.renew(row.state))
            row.state.last_event = logged
            return replace(row, event=logged, payload=b"")
        log.info("another replica decided this position", request_id=request_id, position=row.position)
        # the request has ended: cancelled, or failed
        if logged.token_id is None or logged.position != row.position:
            return replace(row, event=None, payload=b"", state=None)
        return replace(row, event=logged, payload=b"", state=self.renew(row.state))

    def renew(self, known: RequestState) -> RequestState:
        """Put the state that the log gives in the place of one that has diverged from it."""
        state = self.replay.again(known)
        for key, each in list(self.states.items()):
            if each is known:
                self.states[key] = state
        return state

    def handle_control(self, message: Control) -> None:
        """Control: a gateway has resumed requests. (Cancelling is compute's, which then says what
        to forget.)"""
        if message.action == "attach":
            for state in self.states.values():
                if state.intro.request_id in message.request_ids:
                    state.gateway_id = message.gateway_id

    def forget_untouched(self) -> None:
        now = self.forgot_at = self.clock.monotonic()
        live = self.stage.registry.ids("compute", self.stage.model)
        for key, idle_s in [(key, now - state.touched_at) for key, state in self.states.items()]:
            if idle_s > (FORGET_AFTER_S if key[0] in live else FORGET_GONE_AFTER_S):
                self.forget(key, "silence")

    def forget(self, key: tuple[str, int], outcome: str) -> None:
        """Forget the state of a replica's handle, if it is known. outcome: for its trace."""
        state = self.states.pop(key, None)
        if state is not None and self.stage.tracer is not None:
            trace(self.stage.tracer, state, key[0], outcome, self.clock)


def trace(tracer: Tracer, state: RequestState, compute_id: str, outcome: str, clock: Clock) -> None:
    """`sample`: from its introduction by this compute replica to the last token that was decided
    for it, or until now if that ended it."""
    if not state.intro.traceparent:
        return
    now = clock.wall()
    ended_at = now if outcome != "silence" else now - (clock.monotonic() - state.touched_at)
    attributes: Attributes = {
        "penstock.request_id": state.intro.request_id,
        "penstock.compute_id": compute_id,
        "penstock.num_tokens": state.position - state.num_replayed_tokens,
        "penstock.num_replayed_tokens": state.num_replayed_tokens,
        "penstock.outcome": outcome,
    }
    tracer.record("sample", state.intro.traceparent, state.begun_at, ended_at, attributes)
