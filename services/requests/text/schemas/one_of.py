"""oneOf as anyOf: of options of which no two can hold at once, or each without the others."""

import json
from itertools import combinations
from math import prod
from typing import Any

from services.requests.text.schemas.negate import Json, Walker, either, negated
from services.requests.text.schemas.objects import table, texts
from services.requests.text.schemas.patterns import are_apart, expressed, formatted

MAX_COMPARED = 256  # options, each with each other
MAX_OPTIONS = 12  # to be made exclusive
MAX_EACH = 6  # alternatives in which another option does not hold
MAX_PRODUCT = 128


def exclusive(walker: Walker, options: list[Any], walked: list[Any], resolver: Any, beside: Json) -> list[Any] | None:
    """Options, rewritten, of which exactly one holds where any does; None: it can't be said.
    beside: the schema that the oneOf is a part of."""
    views = [view_of(walker, {"allOf": [beside, each]}, resolver) for each in options]
    if are_different_values(views):
        return walked
    if len(options) > MAX_COMPARED:
        return None
    overlapping = {pair for pair in combinations(range(len(options)), 2) if not are_disjoint(walker, views[pair[0]], views[pair[1]], resolver)}
    if not overlapping:
        return walked
    if (name := discriminator(walker, views, overlapping, resolver)) is not None:
        return [{"allOf": [each, {"type": "object", "required": [name]}]} for each in walked]
    if len(options) > MAX_OPTIONS or walker.one_of != "exclusive":
        return None
    made = []
    for number, each in enumerate(walked):
        others = [negated(walker, options[other], resolver) for other in range(len(options)) if (min(number, other), max(number, other)) in overlapping]
        if None in others:
            return None
        fitting = [[one for one in alternatives or () if fits(one, views[number])][:MAX_EACH] for alternatives in others]
        if prod(map(len, fitting)) > MAX_PRODUCT:
            return None
        if all(fitting):
            made.append({"allOf": [each, *map(either, fitting)]} if fitting else each)
    return made or None


def are_different_values(views: list[Json]) -> bool:
    """Whether each option lists values, and no value is listed twice. As JSON they may differ and
    be equal (1 and 1.0): then they are compared one by one."""
    if any(not view or view["values"] is None or any(isinstance(each, float | dict | list) for each in view["values"]) for view in views):
        return False
    texts = [json.dumps(each) for view in views for each in view["values"]]
    return len(set(texts)) == len(texts)


def discriminator(walker: Walker, views: list[Json], overlapping: set[tuple[int, int]], resolver: Any) -> str | None:
    """A property that tells the options from one another once it is there. Without it several would
    hold."""
    if any(not view or "object" not in view["types"] for view in views):
        return None
    for name in sorted(set.intersection(*(set(view["properties"]) for view in views))):
        of_name = [view_of(walker, *view["properties"][name]) for view in views]
        if all(are_disjoint(walker, of_name[one], of_name[other], resolver) for one, other in overlapping):
            return str(name)
    return None


def view_of(walker: Walker, node: Any, resolver: Any, depth: int = 0) -> Json:
    """Collect what a schema says at its top: type, enum, required, properties; behind references,
    too."""
    if not isinstance(node, dict) or depth > 8:
        return {}
    view: dict[str, Any] = {"types": types_of(node), "values": values_of(node), "required": set(texts(node.get("required"))), "properties": {}}
    view["properties"] = {name: (each, resolver) for name, each in table(node.get("properties")).items()}
    view["texts"] = text_of(node)
    view["is_closed"] = node.get("additionalProperties") is False and not node.get("patternProperties")
    others = [(each, resolver) for each in node.get("allOf", ()) if isinstance(node.get("allOf"), list)]
    if "$ref" in node and (target := walker.found(node["$ref"], resolver)) is not None:
        others.append(target)
    for each in others:
        other = view_of(walker, *each, depth + 1)
        if other:
            view["types"] &= other["types"]
            view["values"] = other["values"] if view["values"] is None else view["values"]
            view["required"] |= other["required"]
            view["texts"] |= other["texts"]
            view["is_closed"] |= other["is_closed"]
            view["properties"] = other["properties"] | view["properties"]
    return view


def text_of(node: Json) -> Json:
    """Write what is said of a text so that the library takes it."""
    made: Json = {}
    if isinstance(node.get("pattern"), str) and (pattern := expressed(node["pattern"])) is not None:
        made["pattern"] = pattern
    elif isinstance(node.get("format"), str) and (of_format := formatted(node["format"])) is not None:
        made |= of_format
    return made


def types_of(node: Json) -> set[str]:
    names = node.get("type")
    if names is None and (values := values_of(node)) is not None:
        return {type_of(each) for each in values}
    listed = names if isinstance(names, list) else [names] if isinstance(names, str) else ["null", "boolean", "object", "array", "number", "string"]
    return {"integer" if each == "integer" else each for each in listed} | ({"integer"} if "number" in listed else set())


def type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "boolean" if value is not None else "null"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def values_of(node: Json) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    return node["enum"] if isinstance(node.get("enum"), list) else None


def are_disjoint(walker: Walker, one: Json, other: Json, resolver: Any, depth: int = 0) -> bool:
    """Whether no value can be of both, as far as their tops say."""
    if not one or not other or depth > 3:
        return False
    if not one["types"] & other["types"]:
        return True
    if one["values"] is not None and other["values"] is not None and not any(each in other["values"] for each in one["values"]):
        return True
    if one["types"] & other["types"] == {"string"} and one["texts"] and other["texts"]:
        return are_apart(one["texts"], other["texts"])
    if one["types"] & other["types"] != {"object"}:
        return False
    for a, b in ((one, other), (other, one)):
        if any(name in a["required"] and name not in b["properties"] for name in a["required"]) and b["is_closed"]:
            return True
    for name in one["required"] & other["required"] & one["properties"].keys() & other["properties"].keys():
        first, second = view_of(walker, *one["properties"][name]), view_of(walker, *other["properties"][name])
        if are_disjoint(walker, first, second, resolver, depth + 1):
            return True
    return False


def fits(alternative: Json, view: Json) -> bool:
    """Whether an alternative in which another option does not hold can be of this one, too."""
    names = alternative.get("type")
    listed = set(names if isinstance(names, list) else [names]) if names is not None else None
    if listed is not None and view and not listed & (view["types"] | ({"number"} if "integer" in view["types"] else set())):
        return False
    return not any(each is False and name in view.get("required", ()) for name, each in table(alternative.get("properties")).items())
