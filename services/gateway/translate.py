"""Other APIs than OpenAI's chat completions, as translations of it: a body becomes a chat's, and a chat's chunks become the other API's events.

What a chat can do, these can do, and there is one way through the pipeline. A translation is a pure function of the chunks, which are one of the token
log: whoever reads the same log makes the same events.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import orjson
from fastapi import Request, Response

from services.gateway.errors import RequestFailed
from services.gateway.generation import Generation
from services.gateway.ignored import renamed
from services.gateway.measured import Measured
from services.gateway.openai import parse
from services.gateway.openai.formats import Choice, format_for, usage
from services.gateway.openai.respond import EventStream, Responder, check
from services.gateway.openai.schemas import ChatCompletionBody
from services.gateway.record import ResponseRecord
from shared.process.errors import Invalid
from shared.wire.messages import RequestError, TokenEvent

Json = dict[str, Any]

PLACED = re.compile(r"(messages|tools)\[(\d+)\]")
NUMBER = re.compile(r"\[\d+\]")


def make_chat(given: Json, names: dict[str, str], place_of: Callable[[int], str], place_of_tool: Callable[[int], str]) -> ChatCompletionBody:
    """The body of a chat, checked; fields that are None are not given. Raises Invalid in the other API's terms.

    names: of the chat's fields, where they are others; place_of and place_of_tool: where a message or a tool, by its number in the chat, came from.
    """

    def rename(path: str) -> str:
        if (found := PLACED.match(path)) is None:
            return name_of(path, names)
        name, number, rest = found[1], int(found[2]), path[found.end() :]
        if name == "messages":
            return place_of(number) + rest
        return place_of_tool(number) + name_of(path, names).removeprefix(found[0])

    chat = parse.take(ChatCompletionBody, {name: value for name, value in given.items() if value is not None}, rename)
    with own_terms(names):
        chat.params()
    return chat


def name_of(path: str, names: dict[str, str]) -> str:
    """A field of the chat, by its name in the other API: of the beginnings that have one, the longest counts. [] in names is any number."""
    bare = NUMBER.sub("[]", path)
    for end in range(len(bare), 0, -1):
        if bare[:end] in names and bare[end : end + 1] in ("", ".", "[", ":"):
            made = names[bare[:end]] + bare[end:]
            for number in NUMBER.findall(path):
                made = made.replace("[]", number, 1)
            return made
    return path


@contextmanager
def own_terms(names: dict[str, str]) -> Iterator[None]:
    """What is wrong with a chat, and what of it is passed over, is told in the other API's terms."""
    try:
        with renamed(lambda name: name_of(name, names)):
            yield
    except Invalid as error:
        here = name_of(error.param or "", names)
        raise Invalid(told_of(str(error), error.param, here), param=here or None, code=error.code, status=error.status) from None


def told_of(message: str, name: str | None, here: str) -> str:
    """The message, with the field by its name here."""
    return re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", lambda _: here, message) if name else message


def in_own_terms(error: RequestError, names: dict[str, str]) -> RequestError:
    """A stage's error about a chat, told in the other API's terms."""
    here = name_of(error.param or "", names)
    return replace(error, message=told_of(error.message, error.param, here), param=here or None)


def thinking_kwargs(is_wanted: bool) -> Json:
    """For the template: the two names that models have for it."""
    return {"enable_thinking": is_wanted, "thinking": is_wanted}


def arguments_of(text: str) -> Json:
    """A call's arguments; what is no object is kept as the model wrote it."""
    try:
        value = orjson.loads(text or b"{}")
    except orjson.JSONDecodeError:
        value = text
    return value if isinstance(value, dict) else {"": value}


def errors_in(chunk: Json) -> Json:
    """The field of a chat's last chunk that says where the answer breaks its schema, if it is there."""
    return {"penstock": chunk["penstock"]} if "penstock" in chunk else {}


def is_broken_off(arguments: str) -> bool:
    """Whether an answer that was cut off ended in the middle of a call's arguments."""
    try:
        return not isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return True


class Translation(Protocol):
    """Another API's answer in the making. Events are JSON objects; `encode` makes bytes of them."""

    media_type: str
    ping: bytes  # keeps a waiting stream open
    names: ClassVar[dict[str, str]]  # of the chat's fields that a stage's error may be about, where they are others

    def opening(self, first: TokenEvent | None) -> list[Json]:
        """Before any token; first: the first event, if it is there already."""
        ...

    def chunk(self, chunk: Json) -> list[Json]:
        """A chunk of the chat: `choices[0]` has the delta, and at the end the finish_reason."""
        ...

    def closing(self, usage: Json) -> list[Json]:
        """After the last chunk; usage is the chat's."""
        ...

    def failed(self, error: RequestError, usage: Json) -> list[Json]:
        """The log has ended with an error, or as cancelled."""
        ...

    def interrupted(self, error: RequestError) -> list[Json]:
        """This stream ends, though the response may go on."""
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
        self._format = format_for(record)

    @property
    def is_over(self) -> bool:
        return self.choice.finish_reason is not None

    def add(self, event: TokenEvent) -> list[Json]:
        """What the event makes. Events after the log's end do not come."""
        self.choice.add(event)
        try:
            check(event)
        except RequestFailed as failed:
            return self.translation.failed(failed.error, usage([self.choice], 1))
        events = [each for chunk in self._format.chunks(self.choice, event) for each in self.translation.chunk(chunk)]
        return events + (self.translation.closing(usage([self.choice], 1)) if self.is_over else [])

    def encode(self, events: list[Json]) -> bytes:
        return b"".join(map(self.translation.encode, events))


class TranslatedResponder(Responder):
    """A generation's events as another API's."""

    def __init__(self, generation: Generation, measured: Measured, ping_interval_s: float, translation: Translation) -> None:
        super().__init__(generation, measured, ping_interval_s)
        self.translation = translation
        self.media_type = translation.media_type
        self.fold = Fold(generation.record, translation)
        self.choices = [self.fold.choice]

    async def stream(self) -> Response:
        try:
            return await super().stream()
        except RequestFailed as failed:
            raise RequestFailed(in_own_terms(failed.error, self.translation.names)) from None

    async def whole(self, request: Request) -> Response:
        try:
            return await super().whole(request)
        except RequestFailed as failed:
            raise RequestFailed(in_own_terms(failed.error, self.translation.names)) from None

    async def stream_resumed(self) -> Response:
        """The stream from its beginning, also of what has failed."""
        return EventStream(self._chunks([]), self.close, self.media_type)

    def _body(self) -> Json:
        return self.translation.whole()

    async def _collect(self) -> None:
        while not self._is_over:
            batch = await self._next()
            await self._check_ends(batch)
            for _, event in batch:
                check(event)
                self.fold.add(event)

    async def _chunks(self, batch: list[tuple[int, TokenEvent]]) -> AsyncIterator[bytes]:
        yield self.fold.encode(self.translation.opening(batch[0][1] if batch else None))
        while True:
            await self._check_ends(batch)
            encoded = b"".join(self.fold.encode(self.fold.add(event)) for _, event in batch)
            yield encoded if batch else self.translation.ping
            if self._is_over:
                return
            try:
                batch = await self._next()
            except RequestFailed as failed:
                yield self.fold.encode(self.translation.interrupted(failed.error))
                return
