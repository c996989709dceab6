"""An answer as another API's than OpenAI's: its deltas become that API's events, by a pure function
of the token log."""

from typing import Any, ClassVar, Protocol

import orjson

from services.requests.errors import RequestFailed, check
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.answer import Delta
from services.requests.text.answers.choice import Choice, Usage, usage_of
from services.requests.text.answers.formats import errors_field
from shared.model.json_text import check_depth
from shared.wire.messages import RequestError, TokenEvent

Json = dict[str, Any]


def arguments_of(text: str) -> Json:
    """A call's arguments; what is no object, or is nested too deep, is kept as the model wrote it."""
    try:
        value = orjson.loads(text or b"{}")
        check_depth(value)
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"": value}


def is_broken_off(arguments: str) -> bool:
    """Whether an answer that was cut off ended in the middle of a call's arguments."""
    try:
        return not isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return True


class Translation(Protocol):
    """An answer in another API's form, in the making. Events are JSON objects; `encode` makes bytes
    of them."""

    media_type: str
    ping: bytes  # keeps a waiting stream open
    names: ClassVar[dict[str, str]]  # of the chat's fields that a stage's error may be about, where they are others

    def opening(self, first: TokenEvent | None) -> list[Json]:
        """Make the events before any token. first: the first event, if it is there already."""
        ...

    def add(self, delta: Delta) -> list[Json]:
        """Make the events for a delta that clients are told of."""
        ...

    def closing(self, usage: Usage, told: Json) -> list[Json]:
        """Make the events after the last delta. told: the field that says where the answer breaks
        its schema, if it does."""
        ...

    def failed(self, error: RequestError, usage: Usage) -> list[Json]:
        """Make the events for a log that ended with an error, or as cancelled."""
        ...

    def interrupted(self, error: RequestError) -> list[Json]:
        """Make the events for a stream that ends though the response may go on."""
        ...

    def whole(self) -> Json:
        """The answer of a request that did not ask for a stream, after closing."""
        ...

    def encode(self, event: Json) -> bytes: ...


class Fold:
    """A response's token events, one by one, to the other API's events."""

    def __init__(self, record: ResponseRecord, translation: Translation) -> None:
        self.translation = translation
        self.choice = Choice.begin(0, record)

    @property
    def is_over(self) -> bool:
        return self.choice.finish_reason is not None

    def add(self, event: TokenEvent) -> list[Json]:
        """Make the API's events for one event of the log. No event follows the log's end."""
        delta = self.choice.add(event)
        self.choice.logprobs = None  # the translation gets them with the delta, and keeps what it needs
        try:
            check(event)
        except RequestFailed as failed:
            return self.translation.failed(failed.error, usage_of([self.choice], 1))
        events = self.translation.add(delta) if delta.is_told else []
        return events + (
            self.translation.closing(usage_of([self.choice], 1), errors_field([self.choice])) if self.is_over else []
        )

    def encode(self, events: list[Json]) -> bytes:
        return b"".join(map(self.translation.encode, events))
