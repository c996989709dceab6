"""The fields of a body that may be long: messages' contents, prompts, lists. Each is checked in
time linear in its length, and the first wrong item is named.

Pydantic is for the short ones: of a union it tries every arm for every item, and it makes an error
of each.
"""

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from services.requests.bodies.ignored import tell_others

MAX_NAME = 256  # characters of a model's, a speaker's or a function's name, or of an id
MAX_INPUTS = 2048  # of embeddings, in one request

MAX_SEQUENCES = 128  # prompts times n, in one request
MAX_PARTS = 4096  # of a message's content
TEXT_PARTS = {
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
}  # the kinds of parts that are text, and where it is
OTHER_MEDIA = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}

OF_PARTS = ("annotations", "cache_control", "prompt_cache_breakpoint")  # fields of a part that change no answer

WORD = 1 << 63  # JSON's whole numbers from here on came as floats that have lost their last digits

TokenIds = np.ndarray[Any, np.dtype[np.int32]]
Prompt = str | TokenIds

PROMPT_SCHEMA = {
    "description": "a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_SEQUENCES},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_SEQUENCES,
        },
    ],
}
CONTENT_SCHEMA = {
    "description": "a text, or parts of type text, which are joined",
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "maxItems": MAX_PARTS,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ],
}


def at(path: str, message: str) -> PydanticCustomError:
    """A wrong value at `path` below the field that is being checked."""
    return PydanticCustomError("at", "{reason}", {"at": path, "reason": message})


def whole(value: Any) -> Any:
    """An integer where a client wrote it as 5.0: JSON has one kind of numbers. Anything else is as
    it was."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < WORD else value


def whole_items(value: Any) -> Any:
    """The same of a number, or of each number in a list or a map."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if not isinstance(value, list):
        return whole(value)
    return [*map(whole, value)] if float in set(map(type, value)) else value


def read_prompt(value: Any, most: int = MAX_SEQUENCES) -> list[Prompt]:
    """The prompt's four forms as a list of texts or of token ids. most: prompts in one request."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise at("", f"expected a text, token ids, or a list of either, got {kind_of(value)}")
    value = whole_items(value)
    if not value:
        raise at("", "it is empty")
    if type(value[0]) is int:
        return [read_token_ids(value, "")]
    if len(value) > most:
        raise at("", f"at most {most} prompts in one request, got {len(value)}")
    if isinstance(value[0], str):
        return read_texts(value)
    if isinstance(value[0], list):
        return [read_token_ids(each, f"[{index}]") for index, each in enumerate(value)]
    raise at("[0]", f"expected a text or token ids, got {kind_of(value[0])}")


def read_texts(value: list[Any]) -> list[Prompt]:
    for index, each in enumerate(value):
        if not isinstance(each, str):
            raise at(f"[{index}]", f"expected a text like those before it, got {kind_of(each)}")
    return value


def read_token_ids(value: Any, path: str) -> TokenIds:
    if not isinstance(value, list) or not value:
        raise at(path, f"expected token ids, got {kind_of(value) if not isinstance(value, list) else 'an empty list'}")
    value = whole_items(value)
    if set(map(type, value)) != {int}:
        index = next(index for index, each in enumerate(value) if type(each) is not int)
        raise at(f"{path}[{index}]", f"expected a token id like those before it, got {kind_of(value[index])}")
    try:
        wide = np.array(value, np.int64)
        fits = (wide >= 0) & (wide < 1 << 31)
    except OverflowError:
        fits = np.array([0 <= each < 1 << 31 for each in value])
    if not fits.all():
        index = int(np.argmin(fits))
        raise at(f"{path}[{index}]", f"no vocabulary has a token {value[index]}")
    return wide.astype(np.int32)


def join_parts(value: Any) -> Any:
    """A message's content as one text. What is neither text nor a list is the next validator's to
    refuse."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_PARTS:
        raise at("", f"at most {MAX_PARTS} parts, got {len(value)}")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise at(f"[{index}]", f"expected a part of type text, got {kind_of(part)}")
        texts.append(text_of(part, f"[{index}]"))
    return "".join(texts)


def text_of(part: dict[str, Any], path: str) -> str:
    """The text of a part of a message's content."""
    kind = part.get("type")
    if kind in OTHER_MEDIA:
        raise at(f"{path}.type", f"{OTHER_MEDIA[kind]} can't be understood here")
    if kind not in TEXT_PARTS:
        raise at(f"{path}.type", f"only parts of type text are understood, got {shortened(kind)}")
    text = text_in(part, TEXT_PARTS[kind], path)
    tell_others(part, {"type", TEXT_PARTS[kind], *OF_PARTS}, f"content{path}")
    return text


def text_in(value: dict[str, Any], key: str, path: str) -> str:
    """The text of a field of an object at `path`."""
    text = value.get(key)
    if not isinstance(text, str):
        raise at(f"{path}.{key}", f"expected a text, got {kind_of(text)}")
    return text


def at_most(count: int) -> Callable[[Any], Any]:
    """A list or a map with no more items than this; they are looked at only then."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise at("", f"takes at most {count} items, got {len(value)}")
        return value

    return check


def read_stop(most: int) -> Callable[[Any], Any]:
    """Read one text or no more than so many."""

    def read(value: Any) -> Any:
        for index, each in enumerate(at_most(most)(value) if isinstance(value, list) else ()):
            if not isinstance(each, str):
                raise at(f"[{index}]", f"expected a text, got {kind_of(each)}")
        if not isinstance(value, str | list | None):
            raise at("", f"expected a text or a list of texts, got {kind_of(value)}")
        return value

    return read


def kind_of(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, float) and abs(value) >= WORD:  # orjson reads integers beyond 64 bits as these
        return "a number beyond 64 bits"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number with a fraction",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def shortened(value: Any) -> str:
    """A client's own word, for an error message."""
    text = value if isinstance(value, str) else kind_of(value)
    return text if len(text) <= 64 else text[:64] + "…"


def refuse_unknown(fields: Any, value: dict[str, Any]) -> None:
    """Raises for the first key that is no field, before anything else is looked at: a body of a
    million such keys is one error."""
    for key in value:
        if key not in fields:
            raise PydanticCustomError("extra_forbidden", "unknown field", {"at": f".{shortened(key)}"})


TEXTS_SCHEMA = {
    "description": "a text, a list of texts, or a list of objects with a text",
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, {"type": "object"}]},
            "minItems": 1,
            "maxItems": MAX_INPUTS,
        },
    ],
}


def read_text(value: Any, path: str = "") -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise at(path, f"expected a text, got {kind_of(value)}")
    return text


def read_inputs(value: Any) -> list[str]:
    """A text or several, each as it is or as an object's `text`."""
    items = value if isinstance(value, list) else [value]
    if not 0 < len(items) <= MAX_INPUTS:
        raise at("", f"takes 1 to {MAX_INPUTS} texts, got {len(items)}")
    return [read_text(each, f"[{index}]" if isinstance(value, list) else "") for index, each in enumerate(items)]


Texts = Annotated[list[str], PlainValidator(read_inputs), WithJsonSchema(TEXTS_SCHEMA)]
