"""Calls as Qwen3-Coder writes them:
`<tool_call><function=f><parameter=x>…</parameter></function></tool_call>`, each part on lines of
its own.

A value is text without quotes. It is taken as it stands where the function's schema says that the
parameter is a text, and else as JSON, if it is some.
"""

import re
from typing import Any

from services.requests.text.parsing.text_calls import BlockCalls, Call
from shared.model.json_text import read_json

STARTS = ("<tool_call>",)
END = "</tool_call>"
# An end within a value is no end: a call is over behind its </function>
FUNCTION_END = re.compile(r"</function>\s*(?=</tool_call>)")
FUNCTION = re.compile(r"\s*<function=([A-Za-z0-9_.-]{1,128})>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,128})>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|$))", re.DOTALL)


def xml_calls(names: frozenset[str], texts: frozenset[str]) -> BlockCalls:
    """Parser of calls of these functions. texts: the parameters whose values are texts, as
    function.parameter."""

    def read(block: str) -> Call | None:
        call = FUNCTION.fullmatch(block)
        if call is None:
            return None
        arguments: dict[str, Any] = {}
        rest = call[2]
        while (found := PARAMETER.match(rest)) is not None:
            arguments[found[1]] = found[2] if f"{call[1]}.{found[1]}" in texts else value_of(found[2])
            rest = rest[found.end() :]
        return (call[1], arguments) if not rest.strip() else None

    return BlockCalls(names, STARTS, find_end, read)


def find_end(text: str) -> tuple[int, str] | None:
    """Find where the end marker is."""
    at = text.find(END)
    if at >= 0 and "<function=" in text[:at]:
        found = FUNCTION_END.search(text)
        at = found.end() if found is not None else -1
    return (at, END) if at >= 0 else None


def value_of(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return text
