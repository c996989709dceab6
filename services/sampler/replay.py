"""LogReplay: states of requests as their token logs have them."""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from services.sampler.request_state import RequestState, catch_up
from shared.process.clock import Clock
from shared.process.errors import Lost
from shared.wire.line import Pipeline
from shared.wire.messages import SequenceIntro, TokenEvent
from shared.wire.streams import MESSAGE
from shared.wire.token_log import decode_entry, queue_entry, queue_read
from shared.wire.transport import Transport


class LogReplay:
    """Reads token logs, in one round trip a call."""

    def __init__(self, transport: Transport, tokenizer: Tokenizer, clock: Clock) -> None:
        self.transport = transport
        self.tokenizer = tokenizer
        self.clock = clock

    def begin(self, intro: SequenceIntro) -> RequestState:
        """The state before the first token."""
        return RequestState.begin(intro, self.tokenizer, self.clock)

    def read(self, states: Sequence[RequestState]) -> list[Any]:
        """The logs' entries beyond the states' positions, as `request_state.catch_up` takes
        them."""
        if not states:
            return []

        def ask(pipe: Pipeline) -> None:
            for state in states:
                queue_read(pipe, state.intro.request_id, state.position)

        return self.transport.run(ask)

    def catch_up(self, states: Sequence[RequestState]) -> None:
        """Replay what the logs hold beyond the states' positions."""
        for state, entries in zip(states, self.read(states), strict=True):
            catch_up(state, entries)

    def again(self, known: RequestState) -> RequestState:
        """Replay the log from its beginning, for a state that has diverged from it."""
        state = self.begin(known.intro)
        state.gateway_id = known.gateway_id
        self.catch_up([state])
        return state

    def events_at(self, places: Iterable[tuple[RequestState, int]]) -> list[TokenEvent | str | None]:
        """Read the logs at some positions. Returns for each the event, None if there is none, or the
        reason why it can't be read."""
        asked = list(places)
        if not asked:
            return []

        def ask(pipe: Pipeline) -> None:
            for state, position in asked:
                queue_entry(pipe, state.intro.request_id, position)

        return [event_of(entries) for entries in self.transport.run(ask)]


def is_last(state: RequestState, position: int) -> bool:
    """Whether the state still has the event of that position: no later one has come."""
    return state.last_event is not None and state.last_event.position <= position


def event_of(entries: Any) -> TokenEvent | str | None:
    """The event of the only entry; None if there is none; a text says why it can't be read."""
    try:
        return decode_entry(entries[0][0], entries[0][1][MESSAGE]) if entries else None
    except Lost as error:
        return str(error)
