"""Values and the bounds of numbers, lengths and lists, as far as the grammars' library can count."""

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor, inf, isfinite
from typing import Any

import jsonschema

from services.requests.text.schemas.patterns import unsupported_keyword

Json = dict[str, Any]

# the JSON type of a value
TYPE_OF = {
    bool: "boolean", type(None): "null", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
UPPER_COUNTS = ("maxLength", "maxItems")
COUNTS = ("minLength", "minItems", *UPPER_COUNTS)
MAX_COUNT = (1 << 32) - 1  # characters or items; no answer has more
FARTHEST = (1 << 63) - 1024  # the largest float below 2 ** 63; the library can't count further
NEAREST = 1e-60  # the bound nearest to 0 that the library can compare with
BEYOND = 1e300  # a bound beyond it is none: it is where doubles end
UPPER = ("maximum", "exclusiveMaximum")
BOUNDS = {*UPPER, "minimum", "exclusiveMinimum"}


def bounds_of(node: Json, of_type: Mapping[str, Any]) -> tuple[Json, dict[str, bool]]:
    """A schema's bounds in a form that the library takes, and the keywords that have none, with whether
    an answer can be checked for them."""
    kept: Json = {}
    passed_over: dict[str, bool] = {}
    for key, value in {
        **{key: node[key] for key in (*NUMBERS, *COUNTS) if key in node},
        **exclusive_bounds(node),
    }.items():
        is_count = key in COUNTS
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (is_count and (value < 0 or value != int(value)))
        ):
            passed_over |= {key: False} if value is not False and value is not None else {}
        elif is_count:
            kept |= {} if key in UPPER_COUNTS and value > MAX_COUNT else {key: int(value)}
        elif key == "multipleOf":
            kept[key] = value
        else:
            keep_bound(kept, *reachable(key, value, is_whole=node.get("type") == "integer"))
    kept = on_multiples(kept)
    while kept and (name := unsupported_keyword(of_type, kept)) is not None:
        del kept[name]
        passed_over[name] = True
    return kept, passed_over


def on_multiples(bounds: Json) -> Json:
    """Move bounds beside a multipleOf to the outermost multiples that they allow: the library finds no
    multiple between bounds that have more decimals than it."""
    if not isfinite(bounds.get("multipleOf", inf)) or (step := decimal(bounds["multipleOf"])) <= 0:
        return bounds
    moved = {key: value for key, value in bounds.items() if key not in BOUNDS}
    for key in BOUNDS & bounds.keys():
        sign = 1 if key in UPPER else -1
        ratio = decimal(bounds[key]) * sign / step
        count = ceil(ratio) - 1 if key.startswith("exclusive") else floor(ratio)
        bound = count * step * sign
        keep_bound(moved, "maximum" if sign > 0 else "minimum", int(bound) if bound.denominator == 1 else float(bound))
    if "minimum" in moved and moved["minimum"] == moved.get("maximum"):
        del moved["multipleOf"]  # one multiple is left
    return moved


def exclusive_bounds(node: Json) -> Json:
    """Read draft 4's bounds, where exclusiveMinimum says whether minimum is exclusive."""
    made: Json = {}
    for bound, exclusive_bound in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if node.get(exclusive_bound) is True and bound in node:
            made |= {exclusive_bound: node[bound], bound: None}
        elif isinstance(node.get(exclusive_bound), bool):
            made[exclusive_bound] = None
    return made


def reachable(key: str, value: float, *, is_whole: bool) -> tuple[str, float | None]:
    """The name and value of the nearest bound that the library can count to and that allows no more
    than this one; the value is None if the bound excludes nothing.

    is_whole: whether the type is integer, which the library ends below 2 ** 63.
    """
    sign, inclusive = (1, "maximum") if key in UPPER else (-1, "minimum")
    up = value * sign
    if up >= BEYOND:
        return key, None
    if up > FARTHEST:
        return (key, value) if is_whole and sign > 0 else (inclusive, FARTHEST * sign)
    if 0 < up < NEAREST:
        return inclusive, 0
    return (inclusive, -NEAREST * sign) if -NEAREST < up < 0 else (key, value)


def keep_bound(bounds: Json, key: str, value: float | None) -> None:
    """Add a bound; of two with one name the narrower is kept."""
    if value is not None:
        narrower = min if key in UPPER else max
        bounds[key] = narrower(value, bounds.get(key, value))


def is_contradictory(node: Json) -> bool:
    """Whether the bounds of a node of one type leave no value."""
    names = node.get("type")
    if names in ("number", "integer") and "minimum" in node and "maximum" in node:
        return bool(node["minimum"] > node["maximum"])
    for name, unit in (("string", "Length"), ("array", "Items")):
        if names == name and f"min{unit}" in node and f"max{unit}" in node:
            return bool(node[f"min{unit}"] > node[f"max{unit}"])
    return names == "object" and any(node.get("properties", {}).get(name) is False for name in node.get("required", ()))


def is_valid(value: Any, schema: Json) -> bool:
    """Whether a value that a schema lists keeps to the other keywords; also if Python can't tell."""
    try:
        given = {key: each for key, each in schema.items() if each is not None}
        return bool(jsonschema.Draft202012Validator(given).is_valid(value))
    except Exception:  # a pattern that Python does not read, a bound that is no number
        return True


def decimal(value: float) -> Fraction:
    """A number as it is written: 0.1 is a tenth."""
    return Fraction(value if isinstance(value, int) else repr(value))


def texts(value: Any) -> list[str]:
    """The strings of a list; empty for what is no list."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def table(value: Any) -> Json:
    """The object; empty for what is none."""
    return value if isinstance(value, dict) else {}
