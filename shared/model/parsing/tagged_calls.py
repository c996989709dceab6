"""Calls whose name, arguments and values stand between marks, as in
`<tool_call><function=f><parameter=x>…</parameter></function></tool_call>`."""

import re
from functools import lru_cache
from typing import Annotated, Any

from msgspec import Meta, Struct

from shared.model.json_text import read_json
from shared.model.parsing.blocks import BlockCalls, Call
from shared.model.parsing.pieces import Mark

NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})\s*")
MAX_KEY = 128  # characters
SPACE = re.compile(r"\s*")
OptionalMark = Annotated[str, Meta(max_length=128)]


class TaggedForm(Struct, frozen=True, tag="tagged"):
    """The marks of calls, in their order. White space around marks means nothing, but for a line's end on
    either side of a value."""

    start: Mark
    name_begin: OptionalMark
    name_end: OptionalMark
    key_begin: Mark
    key_ends: Annotated[tuple[Mark, ...], Meta(min_length=1)]  # any of them, before the value
    value_end: Mark
    call_end: OptionalMark
    end: Mark
    has_lines: bool = False  # a value stands on lines of its own

    def parser(self, names: frozenset[str], texts: frozenset[str]) -> BlockCalls:
        """texts: the parameters whose values are texts as they stand, as function.parameter; other values are
        JSON, if they parse as such."""
        return BlockCalls(names, (self.start,), (self.end,), self._find_end, lambda block: self._read(block, texts))

    def _find_end(self, text: str) -> tuple[int, str] | None:
        """Find where the end marker is. Within a value it is none: a call ends after its last mark."""
        at = text.find(self.end)
        if at >= 0 and (self.name_begin or self.key_begin) in text[:at]:
            last = block_end(self).search(text)
            at = last.start(1) if last is not None else -1
        return (at, self.end) if at >= 0 else None

    def _read(self, text: str, texts: frozenset[str]) -> list[Call] | None:
        calls: list[Call] = []
        at = 0
        while text[at:].strip():
            at = self._skip(text, at, self.name_begin)
            name = NAME.match(text, at) if at >= 0 else None
            at = self._skip(text, name.end(), self.name_end) if name is not None else -1
            if name is None or at < 0:
                return None
            arguments: dict[str, Any] = {}
            while (begin := self._skip(text, at, self.key_begin)) >= 0:
                key_end = key_end_of(self).search(text, begin, begin + MAX_KEY + max(map(len, self.key_ends)))
                value_end = value_end_of(self).search(text, key_end.end()) if key_end is not None else None
                if key_end is None or value_end is None:
                    return None
                key, value = text[begin : key_end.start()].strip(), text[key_end.end() : value_end.start()]
                if self.has_lines:
                    value = value.removeprefix("\n").removesuffix("\n")
                arguments[key] = value if f"{name[1]}.{key}" in texts else json_or_text(value)
                at = value_end.end()
            calls.append((name[1], arguments))
            behind = self._skip(text, at, self.call_end)
            if behind < 0 and text[at:].strip():
                return None
            at = max(behind, at)
        return calls or None

    def _skip(self, text: str, at: int, mark: str) -> int:
        """Behind the white space there and the mark; -1: it is not there."""
        space = SPACE.match(text, at)
        assert space is not None
        return space.end() + len(mark) if text.startswith(mark, space.end()) else -1


@lru_cache(maxsize=64)
def block_end(form: TaggedForm) -> re.Pattern[str]:
    lasts = "|".join(re.escape(mark) for mark in (form.call_end, form.value_end) if mark)
    return re.compile(rf"(?:{lasts})\s*({re.escape(form.end)})")


@lru_cache(maxsize=64)
def key_end_of(form: TaggedForm) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, form.key_ends)))


@lru_cache(maxsize=64)
def value_end_of(form: TaggedForm) -> re.Pattern[str]:
    """Such a mark within a value is a part of it: another argument follows the right one, or the call's end."""
    calls_end = rf"{re.escape(form.call_end)}\s*(?:{re.escape(form.name_begin)}|\Z)" if form.call_end else r"\Z"
    return re.compile(rf"{re.escape(form.value_end)}(?=\s*(?:{re.escape(form.key_begin)}|{calls_end}|\Z))")


def json_or_text(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return text
