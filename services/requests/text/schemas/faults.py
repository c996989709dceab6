"""Which pattern of a schema can't be enforced, and why: it is no regular expression, or one that the grammars'
library, or some engine, does not know."""

import json
import re
from collections.abc import Iterator
from typing import Any

from services.requests.text.schemas.form import MAX_SHOWN, Json, below, joined, pointed
from services.requests.text.schemas.patterns import expressed, matched, refusal

MAX_REASON = 200  # characters of the library's words
EMPTY_CLASS = re.compile(r"\[\^?\]")  # which ECMA 262 knows, and no other engine
# What Python's `re` says of patterns that no engine takes
NONE_AT_ALL = (
    "missing )", "unbalanced parenthesis", "nothing to repeat", "multiple repeat", "unterminated character set",
    "bad character range", "min repeat greater than max repeat", "bad escape (end of pattern)",
)  # fmt: skip


def fault_of_pattern(schema: Any) -> str:
    """The place of a pattern that can't be enforced, and the reason; empty if there is none."""
    ahead, seen = [("", schema)], set()
    while ahead:
        path, node = ahead.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        for place, pattern, is_said in patterns_of(path, node):
            if not is_said:
                return f"{place.lstrip('.')} {reason_of(pattern)}"
        ahead += below(path, node)
        if isinstance(reference := node.get("$ref"), str):
            ahead.append((reference, pointed(schema, reference)))
    return ""


def patterns_of(path: str, node: Json) -> Iterator[tuple[str, str, bool]]:
    """The patterns of a node, by place, each with whether it is enforced."""
    if "pattern" in node:
        yield joined(path, ".pattern"), node["pattern"], matched(node["pattern"]) is not None
    for pattern in node.get("patternProperties", ()):
        yield joined(path, f".patternProperties.{pattern[:MAX_SHOWN]}"), pattern, expressed(pattern) is not None


def reason_of(pattern: str) -> str:
    """Why it can't be enforced, as a predicate."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        if str(error).startswith(NONE_AT_ALL) and not EMPTY_CLASS.search(pattern):
            return f"is no regular expression: {error}"
    told = refusal(json.dumps({"type": "string", "pattern": pattern}))
    reason = told.rpartition("error: ")[2].partition(";")[0].strip()[:MAX_REASON]
    return f"can't be enforced: {reason or 'engines read it differently'}"
