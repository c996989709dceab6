"""Bounds of numbers, lengths and lists, as far as the grammars' library can count."""

from collections.abc import Mapping
from math import ceil, floor, inf, isfinite
from typing import Any

from services.requests.text.schemas.negate import Json
from services.requests.text.schemas.patterns import unsayable
from services.requests.text.schemas.values import decimal

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MOST = ("maxLength", "maxItems")
COUNTS = ("minLength", "minItems", *MOST)
MAX_COUNT = (1 << 32) - 1  # of characters or items; no answer has more
FARTHEST = (1 << 63) - 1024  # the largest number below 2 ** 63 that a float has: further the library can't count
NEAREST = 1e-60  # nor nearer to 0
BEYOND = 1e300  # no bound at all: what doubles end with
UPPER = ("maximum", "exclusiveMaximum")
BOUNDS = {*UPPER, "minimum", "exclusiveMinimum"}


def bounds_of(node: Json, of_type: Mapping[str, Any]) -> tuple[Json, dict[str, bool]]:
    """A schema's bounds, such that the library can say them; and what it can't say, with whether an
    answer can be checked for it."""
    said: Json = {}
    unsaid: dict[str, bool] = {}
    for key, value in {**{key: node[key] for key in (*NUMBERS, *COUNTS) if key in node}, **exclusive_bounds(node)}.items():
        is_count = key in COUNTS
        if isinstance(value, bool) or not isinstance(value, int | float) or (is_count and (value < 0 or value != int(value))):
            unsaid |= {key: False} if value is not False and value is not None else {}
        elif is_count:
            said |= {} if key in MOST and value > MAX_COUNT else {key: int(value)}
        elif key == "multipleOf":
            said[key] = value
        else:
            keep_bound(said, *reachable(key, value, is_whole=node.get("type") == "integer"))
    said = on_multiples(said)
    while said and (name := unsayable(of_type, said)) is not None:
        del said[name]
        unsaid[name] = True
    return said, unsaid


def on_multiples(said: Json) -> Json:
    """Bounds beside multipleOf, moved to the outermost multiples that they allow: the library finds no
    multiple between bounds that have more decimals than it."""
    if not isfinite(said.get("multipleOf", inf)) or (step := decimal(said["multipleOf"])) <= 0:
        return said
    moved = {key: value for key, value in said.items() if key not in BOUNDS}
    for key in BOUNDS & said.keys():
        sign = 1 if key in UPPER else -1
        ratio = decimal(said[key]) * sign / step
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
    """A bound that the library can say, and the name of it: the nearest that allows no more. None:
    it asks for nothing.

    is_whole: of integers, of which the library knows that they end below 2 ** 63.
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


def keep_bound(said: Json, key: str, value: float | None) -> None:
    """Say a bound beside others: of two with one name the narrower."""
    if value is not None:
        narrower = min if key in UPPER else max
        said[key] = narrower(value, said.get(key, value))
