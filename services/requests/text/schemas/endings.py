"""Whether some answer that matches a schema has an end: a schema can hold itself again, in each of its answers."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.requests.text.schemas.negate import TYPES
from services.requests.text.schemas.rewrite import HELD
from services.requests.text.schemas.values import TYPE_OF

ALL = frozenset(TYPES)
NOTHING: frozenset[str] = frozenset()
MAX_PASSES = 16  # over all definitions


def never_ends(schema: dict[str, Any]) -> bool:
    """Whether each answer to a rewritten schema would hold another one, without an end: it has endless
    answers, and no others. A $ref that leads back to its own place, as through allOf, is none such."""
    if answers(schema, ALL, has_parts=True) in (None, NOTHING):
        return False
    return answers(schema, NOTHING, has_parts=True) == NOTHING and answers(schema, NOTHING, has_parts=False) != NOTHING


def answers(schema: dict[str, Any], assumed: frozenset[str], *, has_parts: bool) -> frozenset[str] | None:
    """The types of the answers to a schema: a fixed point over its definitions, the least one from
    nothing, of the answers that end, and the greatest one from all types. None if it does not settle
    in MAX_PASSES.

    assumed: of each definition, at the beginning. has_parts: whether the items and properties that an
    answer needs must have answers, too.
    """
    definitions = schema.get("$defs", {})
    types = dict.fromkeys(definitions, assumed)
    for _ in range(MAX_PASSES):
        before = dict(types)
        for name in reversed(definitions):
            types[name] = types_that_end(definitions[name], types, has_parts=has_parts)
        if types == before:
            return types_that_end(schema, types, has_parts=has_parts)
    return None


def types_that_end(node: Any, ended: Mapping[str, frozenset[str]], *, has_parts: bool) -> frozenset[str]:
    """The types of a node's answers that end. ended: those of the definitions, by name."""
    if isinstance(node, bool):
        return ALL if node else NOTHING
    names = node.get("type", ALL)
    found = without_integer([names] if isinstance(names, str) else names)
    if "enum" in node:
        found &= without_integer(TYPE_OF[type(each)] for each in node["enum"])
    if "$ref" in node:
        found &= ended.get(node["$ref"].removeprefix(HELD), ALL)
    for each in node.get("allOf", ()):
        found &= types_that_end(each, ended, has_parts=has_parts)
    for key in ("anyOf", "oneOf"):
        if key in node:
            found &= NOTHING.union(*(types_that_end(each, ended, has_parts=has_parts) for each in node[key]))
    for name, parts in (("array", needed_items(node)), ("object", needed_properties(node))) if has_parts else ():
        if not all(types_that_end(each, ended, has_parts=True) for each in parts):
            found -= {name}
    return found


def without_integer(names: Iterable[str]) -> frozenset[str]:
    return frozenset("number" if each == "integer" else each for each in names)


def needed_items(node: dict[str, Any]) -> list[Any]:
    """The schemas of the items that each list has."""
    least, first = node.get("minItems", 0), node.get("prefixItems", [])
    return [*first[: int(least)], *([node["items"]] if least > len(first) and "items" in node else [])]


def needed_properties(node: dict[str, Any]) -> list[Any]:
    """The schemas of the properties that each object has."""
    others = node.get("additionalProperties", True) if "patternProperties" not in node else True
    properties = node.get("properties", {})
    return [properties.get(name, others) for name in node.get("required", ())]
