"""oneOf as anyOf: of options no two of which can hold at once, or each without the others."""

import json
from itertools import combinations
from math import prod
from typing import Any

from services.requests.text.schemas.negate import Walker, either, negated
from services.requests.text.schemas.patterns import are_apart, expressed, formatted
from services.requests.text.schemas.values import TYPE_OF, Json, table, texts

MAX_COMPARED = 256  # options, each with each other
PAIRS_OF_WORK = 8  # that are compared in the time in which a node is rewritten
MAX_TEXTS = 32  # options that are patterns, each with each other, by the library
MAX_OPTIONS = 12  # to be made exclusive
MAX_EACH = 6  # alternatives in which another option does not hold
MAX_PRODUCT = 128


def exclusive(walker: Walker, options: list[Any], walked: list[Any], resolver: Any, beside: Json) -> list[Any] | None:
    """Options, rewritten, exactly one of which holds where any does; None if there are none.

    beside: the other keywords of the schema that has the oneOf.
    """
    views = [view_of(walker, {"allOf": [beside, each]}, resolver) for each in options]
    if are_different_values(views):
        return walked
    if len(options) > MAX_COMPARED or sum(bool(view.get("text")) for view in views) > MAX_TEXTS:
        return None
    pairs = list(combinations(range(len(options)), 2))
    walker.count_work(len(pairs) // PAIRS_OF_WORK)
    overlapping = {(one, other) for one, other in pairs if not are_disjoint(walker, views[one], views[other], resolver)}
    if not overlapping:
        return walked
    if (name := discriminator(walker, views, overlapping, resolver)) is not None:
        return [{"allOf": [each, {"type": "object", "required": [name]}]} for each in walked]
    if len(options) > MAX_OPTIONS or not walker.is_exclusive:
        return None
    return without_others(walker, options, walked, views, overlapping, resolver)


def without_others(
    walker: Walker,
    options: list[Any],
    walked: list[Any],
    views: list[Json],
    overlapping: set[tuple[int, int]],
    resolver: Any,
) -> list[Any] | None:
    """Each option without those that it overlaps; None if their negations are not known, or too many."""
    made = []
    for number, each in enumerate(walked):
        others = [
            negated(walker, options[other], resolver)
            for other in range(len(options))
            if (min(number, other), max(number, other)) in overlapping
        ]
        if None in others:
            return None
        fitting = [
            [one for one in alternatives or () if fits(one, views[number])][:MAX_EACH] for alternatives in others
        ]
        if prod(map(len, fitting)) > MAX_PRODUCT:
            return None
        if all(fitting):
            made.append({"allOf": [each, *map(either, fitting)]} if fitting else each)
    return made or None


def are_different_values(views: list[Json]) -> bool:
    """Whether each option lists values, and no value is listed twice. As JSON they may differ and be
    equal (1 and 1.0): such values are compared one by one."""
    if any(
        not view or view["values"] is None or any(isinstance(each, float | dict | list) for each in view["values"])
        for view in views
    ):
        return False
    listed = [json.dumps(each) for view in views for each in view["values"]]
    return len(set(listed)) == len(listed)


def discriminator(walker: Walker, views: list[Json], overlapping: set[tuple[int, int]], resolver: Any) -> str | None:
    """A property that distinguishes the options once it is there; without it several would hold."""
    if any(not view or "object" not in view["types"] for view in views):
        return None
    for name in sorted(set.intersection(*(set(view["properties"]) for view in views))):
        of_name = [view_of(walker, *view["properties"][name]) for view in views]
        if all(are_disjoint(walker, of_name[one], of_name[other], resolver) for one, other in overlapping):
            return str(name)
    return None


def view_of(walker: Walker, node: Any, resolver: Any, depth: int = 0) -> Json:
    """The top of a schema, also behind references: its types, values, required names, properties, and how
    a text looks; empty if that is not known."""
    if not isinstance(node, dict) or depth > 8:
        return {}
    view: Json = {
        "types": types_of(node),
        "values": values_of(node),
        "required": set(texts(node.get("required"))),
        "properties": {name: (each, resolver) for name, each in table(node.get("properties")).items()},
        "text": text_of(node),
        "is_closed": node.get("additionalProperties") is False and not node.get("patternProperties"),
    }
    others = [(each, resolver) for each in node.get("allOf", ())]
    if "$ref" in node and (target := walker.resolve(node["$ref"], resolver)) is not None:
        others.append(target)
    for each in others:
        if other := view_of(walker, *each, depth + 1):
            view["types"] &= other["types"]
            view["values"] = other["values"] if view["values"] is None else view["values"]
            for key in ("required", "text", "is_closed"):
                view[key] |= other[key]
            view["properties"] = other["properties"] | view["properties"]
    return view


def text_of(node: Json) -> Json:
    """The pattern or the format of a text in a form that the library takes; empty if there is none."""
    if isinstance(node.get("pattern"), str) and (pattern := expressed(node["pattern"])) is not None:
        return {"pattern": pattern}
    return (formatted(node["format"]) or {}) if isinstance(node.get("format"), str) else {}


def types_of(node: Json) -> set[str]:
    names = node.get("type")
    if names is None and (values := values_of(node)) is not None:
        return {TYPE_OF[type(each)] for each in values}
    listed = set(names if isinstance(names, list) else [names] if isinstance(names, str) else TYPE_OF.values())
    return listed | ({"integer"} if "number" in listed else set())


def values_of(node: Json) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    return node["enum"] if isinstance(node.get("enum"), list) else None


def are_disjoint(walker: Walker, one: Json, other: Json, resolver: Any, depth: int = 0) -> bool:
    """Whether no value can be of both, as far as their tops say."""
    if not one or not other or depth > 3:
        return False
    shared_types = one["types"] & other["types"]
    if not shared_types:
        return True
    if (
        one["values"] is not None
        and other["values"] is not None
        and not any(each in other["values"] for each in one["values"])
    ):
        return True
    if shared_types == {"string"} and one["text"] and other["text"]:
        return are_apart(one["text"], other["text"])
    if shared_types != {"object"}:
        return False
    for a, b in ((one, other), (other, one)):
        if b["is_closed"] and any(name not in b["properties"] for name in a["required"]):
            return True
    for name in one["required"] & other["required"] & one["properties"].keys() & other["properties"].keys():
        first, second = view_of(walker, *one["properties"][name]), view_of(walker, *other["properties"][name])
        if are_disjoint(walker, first, second, resolver, depth + 1):
            return True
    return False


def fits(alternative: Json, view: Json) -> bool:
    """Whether a value of this option may match an alternative of another option's negation."""
    names = alternative.get("type")
    listed = set(names if isinstance(names, list) else [names]) if names is not None else None
    if (
        listed is not None
        and view
        and not listed & (view["types"] | ({"number"} if "integer" in view["types"] else set()))
    ):
        return False
    return not any(
        each is False and name in view.get("required", ())
        for name, each in table(alternative.get("properties")).items()
    )
