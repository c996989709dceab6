"""Values that a schema lists, and the bounds of the others."""

import json
from fractions import Fraction
from typing import Any

import jsonschema

from services.requests.text.schemas.negate import Json


def orders(values: list[Any]) -> list[list[Any]]:
    """Each list of different ones of the values."""
    kept: dict[str, Any] = {json.dumps(each, sort_keys=True): each for each in values}

    def after(used: list[Any]) -> list[list[Any]]:
        return [used, *(made for each in kept.values() if each not in used for made in after([*used, each]))]

    return after([])


def sequence(values: list[Any]) -> Json:
    return {"type": "array", "prefixItems": [{"const": each} for each in values], "items": False, "minItems": len(values)}


def is_contradictory(node: Json) -> bool:
    """Whether the bounds of a node of one type leave nothing."""
    names = node.get("type")
    if names in ("number", "integer") and "minimum" in node and "maximum" in node:
        return bool(node["minimum"] > node["maximum"])
    for name, unit in (("string", "Length"), ("array", "Items")):
        if names == name and f"min{unit}" in node and f"max{unit}" in node:
            return bool(node[f"min{unit}"] > node[f"max{unit}"])
    return names == "object" and any(node.get("properties", {}).get(name) is False for name in node.get("required", ()))


def keeps_to(value: Any, schema: Any) -> bool:
    try:
        return bool(jsonschema.Draft202012Validator({key: each for key, each in schema.items() if each is not None}).is_valid(value))
    except Exception:  # a pattern that Python does not read, a bound that is no number
        return True


def said_of_strings(schemas: list[Json]) -> list[Json]:
    """Without the type: other types may stand beside."""
    return [{key: each for key, each in schema.items() if key != "type"} for schema in schemas]


def decimal(value: float) -> Fraction:
    """A number as it is written."""
    return Fraction(value if isinstance(value, int) else repr(value))
