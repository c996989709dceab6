"""Special tokens that are spelt in a message are text: `<|im_end|>` in a user's words ends no
turn.

What the template writes must still be control tokens, and both come in one rendered text. So while
a conversation with such a spelling is rendered, each spelling has a mark inside; what then still
reads as a special token is the template's. The text is encoded in one go, as any other, by a twin
of the tokenizer: there the special tokens have other names (aliases), which the template's get, and
spellings without their marks mean nothing. Merges, normalization and the stripping of spaces are
therefore those of the tokenizer itself. Conversations without such spellings never come here.

The mark stands inside the spelling, so a template that strips, splits or compares contents sees
what it looks for, unless it looks for special tokens.
"""

import json
import re
from functools import cached_property
from typing import Any, TypeVar

from msgspec import Struct, structs
from tokenizers import Tokenizer

from shared.model.json_text import read_json, write_json
from shared.process.errors import Invalid

MARK, ALIAS = "\ufdd0", "\ufdd1"  # noncharacters: Unicode keeps them for internal use
# fields that are opened: a spelling in them may be escaped
JSON_TEXTS = ("arguments", "tools", "documents", "template_kwargs")
TEMPLATES = ("chat_template",)  # fields that write control tokens

T = TypeVar("T")


class MarkedText(str):
    """A text in which spellings of special tokens have marks."""

    __slots__ = ()


class SpecialTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: list[dict[str, Any]] = json.loads(tokenizer.to_str())["added_tokens"]
        self._special = {each["content"] for each in self._added if each["special"] and len(each["content"]) > 1}
        self._spelled = _any_of(self._special)
        self._known = _any_of({each["content"] for each in self._added if each["content"]})

    def are_spelled_in(self, value: object) -> bool:
        """Whether a text, or any text within a message, holds one."""
        return self._spelled is not None and any(self._spelled.search(text) for text in texts_of(value))

    def mark(self, value: T) -> T:
        """Copy the value with a mark in each spelling. Raises Invalid for a text that has such
        characters itself."""
        if any(MARK in text or ALIAS in text for text in texts_of(value)):
            raise Invalid("a text that spells special tokens can't hold U+FDD0 or U+FDD1, which are no characters")
        marked: T = _changed(value, self._marked)
        return marked

    def unmark(self, value: T) -> T:
        """Copy a marked value without its marks."""
        unmarked: T = _changed(value, lambda text: text.replace(MARK, ""))
        return unmarked

    def encode(self, text: MarkedText, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a marked text. Raises Invalid where the tokenizer can't tell a spelling from
        the token."""
        assert self._known is not None
        aliased = self._known.sub(
            lambda match: ALIAS + match[0] if match[0] in self._special else match[0], text
        ).replace(MARK, "")
        twin, original_ids, reserved = self._twin
        encoding = twin.encode(aliased, add_special_tokens=False)
        if any(
            token_id in reserved and aliased[begin:end] in self._special
            for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
        ):
            raise Invalid("the text spells a special token, which this model's tokenizer can't encode as text")
        token_ids = [original_ids.get(token_id, token_id) for token_id in encoding.ids]
        if not add_special_tokens:
            return token_ids
        plain, whole = (self._tokenizer.encode("x", add_special_tokens=each).ids for each in (False, True))
        begin = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[:begin] + token_ids + whole[begin + len(plain) :]

    @cached_property
    def _twin(self) -> tuple[Tokenizer, dict[int, int], set[int]]:
        """The tokenizer with aliases; the id of each added token by its id there; and the ids that
        it must not make of spellings."""
        described = json.loads(self._tokenizer.to_str())
        names = [
            ALIAS + each["content"] if each["content"] in self._special else each["content"] for each in self._added
        ]
        for each, name in zip(described["added_tokens"], names, strict=True):
            each["content"] = name
        twin = Tokenizer.from_str(json.dumps(described))
        own = [twin.token_to_id(name) for name in names]
        original_ids = {
            id_there: each["id"] for id_there, each in zip(own, self._added, strict=True) if id_there is not None
        }
        reserved = {each["id"] for each in self._added if each["content"] in self._special} - set(original_ids)
        return twin, original_ids, reserved

    def _marked(self, text: str) -> str:
        assert self._spelled is not None
        parts, begin, match = [], 0, self._spelled.search(text)
        while match is not None:
            parts += [text[begin : match.start() + 1], MARK]
            begin = match.start() + 1
            match = self._spelled.search(text, begin)
        return "".join([*parts, text[begin:]])


def _any_of(contents: set[str]) -> "re.Pattern[str] | None":
    """The longest of those that begin at a place, as the tokenizer takes it."""
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True)))) if contents else None


def texts_of(value: object) -> list[str]:
    """All texts within a message, or several."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in texts_of(each)]
    if isinstance(value, list | tuple):
        return [text for each in value for text in texts_of(each)]
    if isinstance(value, Struct):
        named = [(name, getattr(value, name)) for name in value.__struct_fields__ if name not in TEMPLATES]
        return [
            text
            for name, each in named
            for text in texts_of(_opened(name, each) if isinstance(each, str) and "\\" in each else each)
        ]
    return []


def _opened(name: str, value: Any) -> Any:
    """A field of a message: of what is JSON and will be read as such, what it says."""
    if name not in JSON_TEXTS or not isinstance(value, str):
        return value
    try:
        opened = read_json(value)
    except ValueError:
        return value
    return opened if isinstance(opened, dict) or (isinstance(opened, list) and name != "arguments") else value


def _changed(value: Any, change: Any) -> Any:
    """Copy a message with its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_changed(key, change): _changed(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_changed(each, change) for each in value)
    if isinstance(value, Struct):
        names = [name for name in value.__struct_fields__ if name not in TEMPLATES]
        return structs.replace(value, **{name: _changed_field(name, getattr(value, name), change) for name in names})
    return value


def _changed_field(name: str, value: Any, change: Any) -> Any:
    opened = _opened(name, value)
    if opened is value:
        return _changed(value, change)
    return write_json(_changed(opened, change))
