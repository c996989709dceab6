"""Turns other APIs' bodies into chats, and reports the chats' errors in the other API's terms."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from services.requests.bodies import parse
from services.requests.bodies.ignored import renamed
from services.requests.dialects.openai.schemas import ChatCompletionBody
from shared.model.sampling_params import PARAMETERS
from shared.process.errors import Invalid
from shared.wire.messages import RequestError

Json = dict[str, Any]


# What llama.cpp and Ollama, which refuse no number, take another one as the nearest of
RANGES = {each.name: each.clamped for each in PARAMETERS if each.clamped is not None}
PLACED = re.compile(r"(messages|tools)\[(\d+)\]")


NUMBER = re.compile(r"\[\d+\]")


def as_llama_reads(name: str, value: Any) -> Any:
    """A sampling parameter, by the chat's name, within its range. What is no number stays as it is."""
    if name not in RANGES or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    low, high = RANGES[name]
    return min(max(value, low), high)


def make_chat(
    given: Json, names: dict[str, str], place_of: Callable[[int], str], place_of_tool: Callable[[int], str]
) -> ChatCompletionBody:
    """The body of a chat, checked; fields that are None are not given. Raises Invalid in the other
    API's terms.

    names: of the chat's fields, where they are others; place_of and place_of_tool: where a message
    or a tool, by its number in the chat, came from.
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
    """A field of the chat, by its name in the other API: of the beginnings that have one, the
    longest counts. [] in names is any number."""
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
    """Report a chat's errors and passed-over fields in the other API's terms."""
    try:
        with renamed(lambda name: name_of(name, names)):
            yield
    except Invalid as error:
        here = name_of(error.param or "", names)
        raise Invalid(
            told_of(str(error), error.param, here), param=here or None, code=error.code, status=error.status
        ) from None


def told_of(message: str, name: str | None, here: str) -> str:
    """The message, with the field by its name here."""
    return re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", lambda _: here, message) if name else message


def in_own_terms(error: RequestError, names: dict[str, str]) -> RequestError:
    """A stage's error about a chat, told in the other API's terms."""
    here = name_of(error.param or "", names)
    return replace(error, message=told_of(error.message, error.param, here), param=here or None)


def thinking_kwargs(is_wanted: bool) -> Json:
    """The template's arguments for thinking: models have two names for it."""
    return {"enable_thinking": is_wanted, "thinking": is_wanted}
