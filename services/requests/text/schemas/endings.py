"""Whether some answer that matches a schema has an end: a schema can hold itself again, in each of its answers."""

from collections.abc import Mapping
from typing import Any

from services.requests.text.schemas.negate import TYPES
from services.requests.text.schemas.rewrite import HELD

KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
ALL = frozenset(TYPES)
NOTHING: frozenset[str] = frozenset()


def never_ends(schema: dict[str, Any]) -> bool:
    """Whether each answer to a rewritten schema would hold another one, without an end.

    A schema that has no answer for another reason is none such: because a $ref leads back in place, as through
    allOf, or whatever its definitions are.
    """
    if types_of_answers(schema, has_parts=True) or not types_of_answers(schema, has_parts=False):
        return False
    return bool(types_that_end(schema, dict.fromkeys(schema.get("$defs", ()), ALL), has_parts=True))


def types_of_answers(schema: dict[str, Any], *, has_parts: bool) -> frozenset[str]:
    """The types of which there may be answers that end, as far as it takes to find some: the least fixed point over
    the definitions, which at first have none, and then those that need nothing but what has ended before.

    has_parts: whether the items and properties that an answer needs must end, too.
    """
    definitions = schema.get("$defs", {})
    ended, before = dict.fromkeys(definitions, NOTHING), None
    while not (found := types_that_end(schema, ended, has_parts=has_parts)) and ended != before:
        before = dict(ended)
        for name in reversed(definitions):
            ended[name] = types_that_end(definitions[name], ended, has_parts=has_parts)
    return found


def types_that_end(node: Any, ended: Mapping[str, frozenset[str]], *, has_parts: bool) -> frozenset[str]:
    """The types of a node's answers that end. ended: those of the definitions, by name."""
    if isinstance(node, bool):
        return ALL if node else NOTHING
    names = node.get("type", ALL)
    found = frozenset("number" if each == "integer" else each for each in ([names] if isinstance(names, str) else names))
    if "enum" in node:
        found &= {KINDS[type(each)] for each in node["enum"]}
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


def needed_items(node: dict[str, Any]) -> list[Any]:
    """The schemas of the items that each list has."""
    least, first = node.get("minItems", 0), node.get("prefixItems", [])
    return [*first[: int(least)], *([node["items"]] if least > len(first) and "items" in node else [])]


def needed_properties(node: dict[str, Any]) -> list[Any]:
    """The schemas of the properties that each object has."""
    others = node.get("additionalProperties", True) if "patternProperties" not in node else True
    properties = node.get("properties", {})
    return [properties.get(name, others) for name in node.get("required", ())]
