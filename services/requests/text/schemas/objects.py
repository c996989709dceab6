"""An object's properties as a whole, in the words of `properties`, `required`
and `anyOf`."""

import json
import re
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from services.requests.text.schemas.negate import MAX_DEPTH, Json, Walker, either
from services.requests.text.schemas.patterns import expressed, goes_on, takes

MAX_CHOICES = 64  # alternatives that one keyword may become
CONDITIONAL = {"anyOf", "oneOf", "if", "patternProperties", "dependentSchemas", "$dynamicRef"}
SIMPLE_NAMES = {"type", "pattern", "enum", "const", "minLength", "maxLength", "title", "description", "$comment"}


def texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def absent(names: Iterable[str]) -> Json:
    return {"properties": dict.fromkeys(names, False)}


def dependent(name: str, schema: Json, required: list[str]) -> list[Json]:
    """Require the schema wherever the object has the property."""
    if name in required:
        return [schema]
    return [{"anyOf": [absent([name]), {"allOf": [{"type": "object", "required": [name]}, schema]}]}]


def dependents_required(names: list[str], others: list[str], required: list[str]) -> list[Json]:
    """Do the same for several properties that ask for the same others."""
    if not names:
        return []
    if set(names) & set(required):
        return [{"required": others}]
    return [{"anyOf": [absent(names), {"type": "object", "required": others}]}]


def bundled(node: Json, most: int, most_patterns: int) -> Json | None:
    """The node with no more optional properties than `most`: of more, those with the same schema
    become one pattern that lists their names. They may then come in any order. None: there would be
    more than `most_patterns` patterns."""
    properties, required = table(node.get("properties")), set(node.get("required", ()))
    optional = {name: each for name, each in properties.items() if name not in required and each is not False}
    if len(optional) <= most:
        return node
    names_by_schema: dict[str, list[str]] = {}
    for name, each in optional.items():
        names_by_schema.setdefault(json.dumps(each), []).append(name)
    patterns = {f"^(?:{'|'.join(map(re.escape, names))})$": json.loads(each) for each, names in names_by_schema.items()}
    made = {**node, "properties": {name: each for name, each in properties.items() if name not in optional}}
    made["patternProperties"] = table(node.get("patternProperties")) | patterns
    return made if len(patterns) <= most_patterns else None


def groups_of_dependents(required_by: dict[str, list[str]]) -> list[tuple[list[str], list[str]]]:
    """Properties that need one another are there together or not at all: one choice, and not one
    for each."""
    groups: dict[frozenset[str], list[str]] = {}
    for name, others in required_by.items():
        groups.setdefault(frozenset({name, *others}), []).append(name)
    return [(names, sorted(group)) for group, names in groups.items()]


def counted(node: Json, least: int, most: int | None) -> list[Json] | None:
    """Schemas of which all hold for an object of so many properties; None: it can't be said. Where
    other properties than the listed are allowed, the least is of the listed ones."""
    names, required = [name for name, each in table(node.get("properties")).items() if each is not False], texts(node.get("required"))
    optional = [name for name in names if name not in required]
    is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if not names and not is_closed:
        if least > 1 or not takes({**node, "minProperties": least}):  # names that are not listed may come twice, and count once
            return None
        return [{"minProperties": least, **({"maxProperties": most} if most is not None else {})}]
    if most is not None and not is_closed:
        return None
    num_left = (most if most is not None else len(names)) - len(required)
    num_asked = max(least - len(required), 0)
    if num_left < num_asked or num_asked > len(optional):
        return [{"not": {}}]
    made: list[Json] = []
    if num_left < len(optional):
        left_out = list(combinations(optional, len(optional) - num_left)) if is_few(len(optional), num_left) else None
        if left_out is None:
            return None
        made.append(either([absent(each) for each in left_out]))
    if num_asked:
        if not is_few(len(optional), num_asked):
            return None
        made.append(either([{"type": "object", "required": list(each)} for each in combinations(optional, num_asked)]))
    return made


def is_few(total: int, chosen: int) -> bool:
    count = 1
    for number in range(min(chosen, total - chosen)):
        count = count * (total - number) // (number + 1)
        if count > MAX_CHOICES:
            return False
    return True


def named(names: Json) -> str | None:
    """A pattern of the texts that are valid as names, in the library's words; None: it has none."""
    if not set(names) <= SIMPLE_NAMES or names.get("type", "string") != "string":
        return None
    said = [key for key in ("pattern", "enum", "const") if key in names]
    has_length = "minLength" in names or "maxLength" in names
    if len(said) + has_length != 1:
        return None
    if has_length:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        return f"^[\\s\\S]{{{least},{most}}}$"
    if "pattern" in names:
        return expressed(str(names["pattern"]))
    return f"^(?:{'|'.join(re.escape(each) for each in names.get('enum', [names.get('const')]) if isinstance(each, str))})$"


def can_go_on(listed: Iterable[str], pattern: str) -> bool:
    """Whether there is a name that is not listed and that the pattern matches. If there is none,
    the library takes a comma for one nevertheless, and then finds none."""
    node = {"type": "object", "properties": dict.fromkeys(listed, False), "patternProperties": {pattern: {}}, "additionalProperties": False}
    return goes_on({**node, "minProperties": 1}, "{")


def with_names_that_end(parts: list[Json]) -> list[Json]:
    """Schemas that must all hold. A pattern in one of them of which all names are listed in others
    becomes these names."""
    listed = {name for part in parts for name in table(part.get("properties"))}
    made = []
    for part in parts:
        own, patterns = table(part.get("properties")), table(part.get("patternProperties"))
        ended = [pattern for pattern in patterns if listed and r"\p" not in pattern.lower() and not can_go_on(listed, pattern)]
        for pattern in ended:
            said = {name: patterns[pattern] for name in sorted(listed) if re.search(pattern, name)}
            own = own | {name: {"allOf": [own[name], each]} if name in own else each for name, each in said.items()}
        left = {pattern: each for pattern, each in patterns.items() if pattern not in ended}
        made.append({**part, "properties": own, "patternProperties": left} if ended else part)
    return made


def evaluated(walker: Walker, node: Any, resolver: Any, depth: int = 0) -> list[str] | None:
    """The names of the properties that a schema speaks of in any case; None: that depends."""
    if not isinstance(node, dict) or depth > MAX_DEPTH:
        return []
    if CONDITIONAL & node.keys() or node.get("additionalProperties") not in (None, False):
        return None
    parts = [evaluated(walker, each, resolver, depth + 1) for each in node.get("allOf", ())]
    if "$ref" in node:
        target = walker.found(node["$ref"], resolver)
        parts.append(evaluated(walker, *target, depth + 1) if target is not None else None)
    known = [part for part in parts if part is not None]
    return [*table(node.get("properties")), *(name for part in known for name in part)] if len(known) == len(parts) else None
