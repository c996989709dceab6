"""Calls as FunctionGemma and Gemma 4 write them: `call:f{a:1,b:<escape>x<escape>}` between markers."""

import re
from typing import Any

from shared.model.json_text import MAX_DEPTH, read_json
from shared.model.parsing.blocks import BlockCalls, Call, end_outside_strings

GEMMA_STARTS = ("<start_function_call>", "<|tool_call>")
GEMMA_ENDS = ("<end_function_call>", "<tool_call|>")
GEMMA_QUOTES = ("<escape>", '<|"|>')
GEMMA_HEAD = re.compile(r"\s*call:([A-Za-z0-9_.-]+)\s*(?=\{)")
GEMMA_BARE = re.compile(r"[^,{}\[\]<]+")
SPACE = re.compile(r"\s*")
gemma_end = end_outside_strings(
    GEMMA_ENDS, "|".join(f"{quote}.*?{quote}" for quote in map(re.escape, GEMMA_QUOTES)), GEMMA_QUOTES
)


def gemma_calls(names: frozenset[str]) -> BlockCalls:
    """Parser of the calls of FunctionGemma and Gemma 4."""
    return BlockCalls(names, GEMMA_STARTS, GEMMA_ENDS, gemma_end, gemma_call)


def gemma_call(text: str) -> list[Call] | None:
    head = GEMMA_HEAD.match(text)
    if head is None:
        return None
    try:
        arguments, end = gemma_value(text, head.end(), 0)
    except ValueError:
        return None
    return [(head[1], arguments)] if not text[end:].strip() else None


def gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins there, and where it ends. Raises ValueError."""
    at = skip_space(text, at)
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    for quote in GEMMA_QUOTES:
        if text.startswith(quote, at):
            end = text.index(quote, at + len(quote))
            return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return gemma_items(text, at + 1, "}", depth + 1)
    if text.startswith("[", at):
        return gemma_items(text, at + 1, "]", depth + 1)
    bare = GEMMA_BARE.match(text, at)
    if bare is None:
        raise ValueError("no value")
    try:
        return read_json(bare[0]), bare.end()
    except ValueError:
        return bare[0].strip(), bare.end()


def gemma_items(text: str, at: int, closing: str, depth: int) -> tuple[Any, int]:
    """An object's fields, or a list's elements. Raises ValueError."""
    fields: dict[str, Any] = {}
    elements: list[Any] = []
    while True:
        at = skip_space(text, at)
        if text.startswith(closing, at):
            return fields if closing == "}" else elements, at + 1
        if closing == "}":
            colon = text.index(":", at)
            key = text[at:colon].strip()
            for quote in GEMMA_QUOTES:
                key = key.removeprefix(quote).removesuffix(quote)
            fields[key], at = gemma_value(text, colon + 1, depth)
        else:
            element, at = gemma_value(text, at, depth)
            elements.append(element)
        at = skip_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(closing, at):
            raise ValueError("neither a comma nor the end")


def skip_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    assert found is not None
    return found.end()
