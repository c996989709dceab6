"""The negation of a schema, as far as schemas without `not` can say it: each alternative here is of
values for which the schema does not hold.

There may be further values for which it does not: what is made of these alternatives allows less
than it might, and never what is forbidden.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from services.requests.text.schemas.patterns import complement, excluding_texts

Json = dict[str, Any]

TYPES = ("null", "boolean", "object", "array", "number", "string")
MAX_DEPTH = 8  # of what is negated
MAX_NEGATED = 64  # alternatives


class Walker(Protocol):
    @property
    def one_of(self) -> str: ...
    def walk(self, node: Any, resolver: Any) -> Any: ...
    def found(self, reference: Any, resolver: Any) -> tuple[Any, Any] | None: ...


def negated(walker: Walker, node: Any, resolver: Any, depth: int = 0) -> list[Json] | None:
    """Alternatives in which the schema does not hold, rewritten; none: it always holds; None:
    nobody knows."""
    if isinstance(node, bool):
        return [] if node else [{}]
    if not isinstance(node, dict) or depth > MAX_DEPTH:
        return None
    made: list[Json] = []
    is_known = True
    for key, value in node.items():
        if key not in NEGATIONS:
            is_known = is_known and key not in ASSERTIONS
            continue
        found = NEGATIONS[key](walker, value, resolver, depth)
        if found is None:
            is_known = False
        else:
            made += found
    if not made and not is_known:
        return None
    return made[:MAX_NEGATED]


def _type(_: Walker, value: Any, __: Any, ___: int) -> list[Json] | None:
    names = {"number" if each == "integer" else each for each in (value if isinstance(value, list) else [value])}
    rest = [name for name in TYPES if name not in names]
    return [{"type": rest}] if rest else [] if "integer" not in value else None


def _enum(_: Walker, values: Any, __: Any, ___: int) -> list[Json] | None:
    if not isinstance(values, list):
        return None
    texts = [each for each in values if isinstance(each, str)]
    truths = [each for each in values if isinstance(each, bool)]
    numbers = sorted({each for each in values if isinstance(each, int | float) and not isinstance(each, bool)})
    whole = ["string"] if not texts else []
    whole += [] if numbers else ["number"]
    whole += [] if any(each is None for each in values) else ["null"]
    whole += [] if any(isinstance(each, list) for each in values) else ["array"]
    whole += [] if any(isinstance(each, dict) for each in values) else ["object"]
    made: list[Json] = [{"type": whole}] if whole else []
    if left := [each for each in (True, False) if each not in truths]:
        made.append({"enum": left})
    if texts and (pattern := excluding_texts(texts)) is not None:
        made.append({"type": "string", "pattern": pattern})
    if numbers:
        made += [{"type": "number", "exclusiveMaximum": numbers[0]}, {"type": "number", "exclusiveMinimum": numbers[-1]}]
        made += [{"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in zip(numbers, numbers[1:], strict=False)]
    return made


def _const(walker: Walker, value: Any, resolver: Any, depth: int) -> list[Json] | None:
    return _enum(walker, [value], resolver, depth)


def _required(_: Walker, names: Any, __: Any, ___: int) -> list[Json] | None:
    return [{"type": "object", "properties": {name: False}} for name in names] if isinstance(names, list) else None


def _properties(walker: Walker, value: Any, resolver: Any, depth: int) -> list[Json] | None:
    if not isinstance(value, dict):
        return None
    made, is_known = [], True
    for name, schema in value.items():
        alternatives = negated(walker, schema, resolver, depth + 1)
        is_known = is_known and alternatives is not None
        if alternatives:
            made.append({"type": "object", "required": [name], "properties": {name: either(alternatives)}})
    return made if made or is_known else None


def _bound(name: str, kind: str, step: int, least: int) -> Any:
    def negation(_: Walker, value: Any, __: Any, ___: int) -> list[Json] | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return [{"type": kind, name: value + step}] if step == 0 or value + step >= least else []

    return negation


def _pattern(_: Walker, value: Any, __: Any, ___: int) -> list[Json] | None:
    made = complement(value) if isinstance(value, str) else None
    return [{"type": "string", "pattern": made}] if made is not None else None


def _all_of(walker: Walker, value: Any, resolver: Any, depth: int) -> list[Json] | None:
    found = [negated(walker, each, resolver, depth + 1) for each in value] if isinstance(value, list) else [None]
    made = [alternative for each in found for alternative in each or ()]
    return made if made or None not in found else None


def _any_of(walker: Walker, value: Any, resolver: Any, depth: int) -> list[Json] | None:
    """Negate an anyOf: none of its schemas holds."""
    found = [negated(walker, each, resolver, depth + 1) for each in (value if isinstance(value, list) else [None])]
    parts = list(_known(found))
    if len(parts) < len(found):
        return None
    return [{"allOf": [either(each) for each in parts]}] if all(parts) else []


def _known(found: list[list[Json] | None]) -> Iterator[list[Json]]:
    return (each for each in found if each is not None)


def _not(walker: Walker, value: Any, resolver: Any, _: int) -> list[Json]:
    made = walker.walk(value, resolver)
    return [] if made is False else [made]


def _reference(walker: Walker, value: Any, resolver: Any, depth: int) -> list[Json] | None:
    found = walker.found(value, resolver)
    return negated(walker, *found, depth + 1) if found is not None else None


def either(alternatives: list[Json]) -> Json:
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


NEGATIONS: dict[str, Any] = {
    "type": _type, "enum": _enum, "const": _const, "required": _required, "properties": _properties, "allOf": _all_of, "anyOf": _any_of, "not": _not,
    "$ref": _reference, "pattern": _pattern,
    "minimum": _bound("exclusiveMaximum", "number", 0, 0), "maximum": _bound("exclusiveMinimum", "number", 0, 0),
    "minLength": _bound("maxLength", "string", -1, 0), "maxLength": _bound("minLength", "string", 1, 0),
    "minItems": _bound("maxItems", "array", -1, 0), "maxItems": _bound("minItems", "array", 1, 0),
}  # fmt: skip
# Keywords that say something, of which the negation is not known here
ASSERTIONS = {
    "format", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", "items", "prefixItems", "additionalItems", "uniqueItems", "contains", "unevaluatedItems",
    "additionalProperties", "patternProperties", "propertyNames", "dependencies", "dependentRequired", "dependentSchemas", "minProperties", "maxProperties",
    "unevaluatedProperties", "oneOf", "if", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
