"""An object's properties as a whole, in terms of `properties`, `required` and `anyOf`."""

import re
from collections.abc import Iterable
from itertools import combinations
from math import comb

from services.requests.text.schemas.negate import either
from services.requests.text.schemas.patterns import expressed, goes_on, is_supported
from services.requests.text.schemas.values import Json, table, texts

MAX_CHOICES = 64  # alternatives that one keyword may become
NAME_KEYWORDS = {"type", "pattern", "enum", "const", "title", "description", "$comment"}


def absent(names: Iterable[str]) -> Json:
    """A schema of the objects without these properties."""
    return {"properties": dict.fromkeys(names, False)}


def counted(node: Json, least: int, most: int | None) -> list[Json] | None:
    """Schemas that all hold for an object with `least` to `most` properties; None if there are no such
    schemas. Where properties may come that are not listed, the listed ones alone are counted."""
    names = [name for name, each in table(node.get("properties")).items() if each is not False]
    required = texts(node.get("required"))
    optional = [name for name in names if name not in required]
    is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if not names and not is_closed:
        if least > 1 or not is_supported({**node, "minProperties": least}):  # a name may come twice, and counts once
            return None
        return [{"minProperties": least, **({"maxProperties": most} if most is not None else {})}]
    if most is not None and not is_closed:
        return None
    num_left = (most if most is not None else len(names)) - len(required)
    num_asked = max(least - len(required), 0)
    if num_left < num_asked or num_asked > len(optional):
        return [{"not": {}}]
    num_absent = max(len(optional) - num_left, 0)
    if max(comb(len(optional), num_absent), comb(len(optional), num_asked)) > MAX_CHOICES:
        return None
    made = [either([absent(each) for each in combinations(optional, num_absent)])] if num_absent else []
    if num_asked:
        made.append(either([{"type": "object", "required": list(each)} for each in combinations(optional, num_asked)]))
    return made


def name_pattern(names: Json) -> str | None:
    """A pattern of the texts that are valid as names, in the library's syntax; None if it can't say
    them."""
    if (
        not names.keys() <= NAME_KEYWORDS
        or names.get("type", "string") != "string"
        or len({"pattern", "enum", "const"} & names.keys()) != 1
    ):
        return None
    if "pattern" in names:
        return expressed(str(names["pattern"]))
    return f"^(?:{'|'.join(map(re.escape, texts(names.get('enum', [names.get('const')]))))})$"


def can_go_on(listed: Iterable[str], pattern: str) -> bool:
    """Whether the pattern matches a name that is not listed. If it matches none, the library
    nevertheless takes a comma for its beginning, and then nothing may follow."""
    node = {
        "type": "object",
        "properties": dict.fromkeys(listed, False),
        "patternProperties": {pattern: {}},
        "additionalProperties": False,
    }
    return goes_on({**node, "minProperties": 1}, "{")


def with_names_that_end(parts: list[Json]) -> list[Json]:
    """Schemas that must all hold. A pattern in one of them whose names are all listed in others becomes
    these names."""
    listed = {name for part in parts for name in table(part.get("properties"))}
    made = []
    for part in parts:
        own, patterns = table(part.get("properties")), table(part.get("patternProperties"))
        ended = [
            pattern
            for pattern in patterns
            if listed and r"\p" not in pattern.lower() and not can_go_on(listed, pattern)
        ]
        for pattern in ended:
            matching = [name for name in sorted(listed) if re.search(pattern, name)]
            own = own | {
                name: {"allOf": [own[name], patterns[pattern]]} if name in own else patterns[pattern]
                for name in matching
            }
        left = {pattern: each for pattern, each in patterns.items() if pattern not in ended}
        made.append({**part, "properties": own, "patternProperties": left} if ended else part)
    return made
