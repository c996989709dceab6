"""The pattern of a schema that can't be enforced, and the reason."""

import json
from collections.abc import Iterator
from typing import Any

from services.requests.text.schemas.form import MAX_SHOWN, below, joined, pointed
from services.requests.text.schemas.patterns import expressed, refusal
from services.requests.text.schemas.values import Json

MAX_REASON = 200  # characters of the library's words


def fault_of_pattern(schema: Any) -> str:
    """The place of a pattern that can't be enforced, and the reason; empty if there is none."""
    ahead, seen = [("", schema)], set()
    while ahead:
        path, node = ahead.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        for place, pattern in patterns_of(path, node):
            if expressed(pattern) is None:
                return f"{place.lstrip('.')} can't be enforced: {reason_of(pattern)}"
        # definitions are reached by the references to them: an unused one is not at fault
        ahead += below(path, {key: value for key, value in node.items() if key not in ("$defs", "definitions")})
        if isinstance(reference := node.get("$ref"), str):
            ahead.append((reference.removeprefix("#/").replace("/", "."), pointed(schema, reference)))
    return ""


def patterns_of(path: str, node: Json) -> Iterator[tuple[str, str]]:
    """The patterns of a node, by place. Beside enum and const they choose among the values, which needs
    no grammar."""
    if "pattern" in node and not {"enum", "const"} & node.keys():
        yield joined(path, ".pattern"), node["pattern"]
    for pattern in node.get("patternProperties", ()):
        yield joined(path, f".patternProperties.{pattern[:MAX_SHOWN]}"), pattern


def reason_of(pattern: str) -> str:
    """The engine's words, or those for a pattern that the rewriter does not express."""
    reason = refusal(json.dumps({"type": "string", "pattern": pattern}))
    return reason.rpartition("error: ")[2].partition(";")[0].strip()[:MAX_REASON] or "engines read it differently"
