"""JSON schemas of every kind that can be enforced, and whether an answer keeps to one."""

import json
from typing import Any

import jsonschema
from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "name", "x y", 'q"uote', "é", "\\", "0", "", "$ref "])
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=6)
ATOMS: st.SearchStrategy[Any] = st.one_of(st.none(), st.booleans(), st.integers(-(10**6), 10**6), TEXTS)
PATTERNS = st.sampled_from(["^[a-z]{1,3}$", "^a+b?$", "[0-9]", "^(x|yy)*$", r"^\d{2}-\d{2}$"])
FORMATS = st.sampled_from(["date-time", "date", "time", "email", "uuid", "ipv4", "hostname"])


def strings() -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(
        lambda pair: {"minLength": pair[0], "maxLength": sum(pair)}
    )
    return st.one_of(
        lengths, PATTERNS.map(lambda each: {"pattern": each}), FORMATS.map(lambda each: {"format": each})
    ).map(lambda each: {"type": "string", **each})


def numbers() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-200, 200), st.integers(1, 300), st.booleans(), st.booleans())
    return st.tuples(st.sampled_from(["integer", "number"]), bounds).map(
        lambda drawn: number_schema(drawn[0], *drawn[1])
    )


def number_schema(kind: str, low: int, width: int, is_above: bool, is_below: bool) -> dict[str, Any]:
    """At least one integer wide, open or closed."""
    high = low + width + 1
    return {
        "type": kind,
        "exclusiveMinimum" if is_above else "minimum": low,
        "exclusiveMaximum" if is_below else "maximum": high,
    }


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    lists = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[1] + drawn[2]}
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda each: {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
    )
    return lists | tuples


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def of(properties: dict[str, Any], flags: list[bool], other: Any) -> dict[str, Any]:
        required = [name for name, flag in zip(properties, flags, strict=False) if flag]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": other}

    return st.builds(
        of, st.dictionaries(NAMES, inner, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3), st.just(False)
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Such that some text of at most a few hundred tokens keeps to each."""
    leaves = st.one_of(
        strings(),
        numbers(),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        ATOMS.map(lambda each: {"const": each}),
        st.lists(ATOMS, min_size=1, max_size=4).map(lambda each: {"enum": each}),
    )
    nested = st.recursive(
        leaves,
        lambda inner: st.one_of(
            arrays(inner), objects(inner), st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
        ),
        max_leaves=6,
    )
    return nested | nested.map(
        lambda each: {"$defs": {"it": each}, "type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 2}
    )


def keeps_to(text: str, schema: Any) -> bool:
    """Whether the text is JSON, and valid."""
    validator = jsonschema.Draft202012Validator
    jsonschema.validate(json.loads(text), schema, cls=validator, format_checker=validator.FORMAT_CHECKER)
    return True
