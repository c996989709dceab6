"""The negation of a schema as alternatives that have no `not`: for a value of any of them the schema
does not hold.

Values for which no alternative holds may be left: the alternatives allow less than the negation, and
never a value that it forbids.
"""

from collections.abc import Callable
from typing import Any, Protocol

from services.requests.text.schemas.patterns import complement, excluding_texts
from services.requests.text.schemas.values import Json

TYPES = ("null", "boolean", "object", "array", "number", "string")
MAX_DEPTH = 8  # of what is negated
MAX_NEGATED = 64  # alternatives


class Walker(Protocol):
    """The parts of a Rewriter that a negation needs."""

    @property
    def is_exclusive(self) -> bool: ...
    def walk(self, node: Any, resolver: Any) -> Any: ...
    def resolve(self, reference: Any, resolver: Any) -> tuple[Any, Any] | None: ...
    def count_work(self, amount: int) -> None: ...


def negated(walker: Walker, node: Any, resolver: Any, depth: int = 0) -> list[Json] | None:
    """Alternatives in which the schema does not hold, rewritten; empty if it always holds; None if
    they are not known."""
    if isinstance(node, bool):
        return [] if node else [{}]
    if not isinstance(node, dict) or depth > MAX_DEPTH:
        return None
    walker.count_work(1)
    made: list[Json] = []
    is_known = True
    for key, value in node.items():
        if key in NEGATIONS:
            alternatives = NEGATIONS[key](walker, value, resolver, depth)
            is_known = is_known and alternatives is not None
            made += alternatives or []
        else:
            is_known = is_known and key not in ASSERTIONS
    return made[:MAX_NEGATED] if made or is_known else None


def _type(_: Walker, value: Any, __: Any, ___: int) -> list[Json] | None:
    names = {"number" if each == "integer" else each for each in (value if isinstance(value, list) else [value])}
    rest = [name for name in TYPES if name not in names]
    return [{"type": rest}] if rest else [] if "integer" not in value else None


def _enum(_: Walker, values: Any, __: Any, ___: int) -> list[Json] | None:
    if not isinstance(values, list):
        return None
    strings = [each for each in values if isinstance(each, str)]
    numbers = sorted({each for each in values if isinstance(each, int | float) and not isinstance(each, bool)})
    kinds = (("string", str), ("number", int | float), ("null", type(None)), ("array", list), ("object", dict))
    other_types = [
        name
        for name, kind in kinds
        if not any(isinstance(each, kind) and not isinstance(each, bool) for each in values)
    ]
    made: list[Json] = [{"type": other_types}] if other_types else []
    if booleans := [each for each in (True, False) if not any(value is each for value in values)]:
        made.append({"enum": booleans})
    if strings and (pattern := excluding_texts(strings)) is not None:
        made.append({"type": "string", "pattern": pattern})
    for low, high in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        made.append({"type": "number", **{key: value for key, value in bounds.items() if value is not None}})
    return made


def _required(_: Walker, names: Any, __: Any, ___: int) -> list[Json] | None:
    return [{"type": "object", "properties": {name: False}} for name in names] if isinstance(names, list) else None


def _properties(walker: Walker, value: Any, resolver: Any, depth: int) -> list[Json] | None:
    if not isinstance(value, dict):
        return None
    by_name = {name: negated(walker, schema, resolver, depth + 1) for name, schema in value.items()}
    made = [
        {"type": "object", "required": [name], "properties": {name: either(each)}}
        for name, each in by_name.items()
        if each
    ]
    return made if made or None not in by_name.values() else None


def _bound(name: str, kind: str, step: int) -> Callable[[Walker, Any, Any, int], list[Json] | None]:
    """step: from a count to its nearest neighbour on the other side; 0 for bounds of numbers."""

    def negation(_: Walker, value: Any, __: Any, ___: int) -> list[Json] | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return [{"type": kind, name: value + step}] if step == 0 or value + step >= 0 else []

    return negation


def _pattern(_: Walker, value: Any, __: Any, ___: int) -> list[Json] | None:
    made = complement(value) if isinstance(value, str) else None
    return [{"type": "string", "pattern": made}] if made is not None else None


def _all_of(walker: Walker, value: Any, resolver: Any, depth: int) -> list[Json] | None:
    parts = [negated(walker, each, resolver, depth + 1) for each in value] if isinstance(value, list) else [None]
    made = [alternative for each in parts for alternative in each or ()]
    return made if made or None not in parts else None


def _any_of(walker: Walker, value: Any, resolver: Any, depth: int) -> list[Json] | None:
    parts = []
    for each in value if isinstance(value, list) else [None]:
        if (alternatives := negated(walker, each, resolver, depth + 1)) is None:
            return None
        parts.append(alternatives)
    return [{"allOf": [either(each) for each in parts]}] if all(parts) else []


def _not(walker: Walker, value: Any, resolver: Any, _: int) -> list[Json]:
    made = walker.walk(value, resolver)
    return [] if made is False else [made]


def _reference(walker: Walker, value: Any, resolver: Any, depth: int) -> list[Json] | None:
    target = walker.resolve(value, resolver)
    return negated(walker, *target, depth + 1) if target is not None else None


def either(alternatives: list[Json]) -> Json:
    """A schema that holds where one of the alternatives does."""
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


NEGATIONS: dict[str, Callable[[Walker, Any, Any, int], list[Json] | None]] = {
    "type": _type,
    "enum": _enum,
    "const": lambda walker, value, resolver, depth: _enum(walker, [value], resolver, depth),
    "required": _required,
    "properties": _properties,
    "allOf": _all_of,
    "anyOf": _any_of,
    "not": _not,
    "$ref": _reference,
    "pattern": _pattern,
    "minimum": _bound("exclusiveMaximum", "number", 0),
    "maximum": _bound("exclusiveMinimum", "number", 0),
    "minLength": _bound("maxLength", "string", -1),
    "maxLength": _bound("minLength", "string", 1),
    "minItems": _bound("maxItems", "array", -1),
    "maxItems": _bound("minItems", "array", 1),
}
# Assertions whose negation is not known here
ASSERTIONS = {
    "format", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", "items", "prefixItems", "additionalItems",
    "uniqueItems", "contains", "unevaluatedItems", "additionalProperties", "patternProperties", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "minProperties", "maxProperties", "unevaluatedProperties",
    "oneOf", "if", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
