"""Whether a JSON schema is one: whether each keyword's value is of the kind that a metaschema asks
for.

The drafts are read together, for clients seldom say which one they mean: what one of them gives a
meaning has it, whatever `$schema` names (`items` as a list, `exclusiveMinimum: true`, `required:
true` in a property). What asks for nothing is taken, too: an empty list of schemas that must all
hold, and keywords that change no answer (`title: 5`).
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from services.requests.text.schemas.values import Json, table

Place = tuple[str, Any]  # path and value

NAMES = ("null", "boolean", "object", "array", "number", "string", "integer", "any")  # types; any is draft 3's
A_SCHEMA = (
    "not", "if", "then", "else", "contains", "additionalProperties", "additionalItems", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
TABLES = (
    "properties", "patternProperties", "dependentSchemas", "dependencies", "dependentRequired", "$defs", "definitions",
)  # fmt: skip
TEXTS = ("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef", "$schema", "$id", "$anchor", "$dynamicAnchor")
COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties",
)  # fmt: skip
MAX_SHOWN = 40  # characters of a value or a name, in an error
MAX_PATH = 200
NUMBER = re.compile(r"[0-9]{1,9}")
KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class NoSchema(ValueError):
    """A value that is no schema stands where one should, or nothing can match the schema: an error
    whether the schema is strict or not."""


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# The form of each keyword's value, and the words for it in an error; schemas inside are looked at one by one.
# Draft 3's required is a boolean in the property, and draft 4's exclusiveMinimum says whether minimum is exclusive
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(TEXTS, (lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(
        COUNTS, (lambda value: is_number(value) and value >= 0 and value % 1 == 0, "an integer that is not negative")
    ),
    **dict.fromkeys(("minimum", "maximum"), (is_number, "a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), (lambda value: isinstance(value, int | float), "a number")
    ),
    **dict.fromkeys(TABLES, (lambda value: isinstance(value, dict), "an object")),
    **dict.fromkeys(SCHEMAS, (lambda value: isinstance(value, list), "a list of schemas")),
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
    "uniqueItems": (lambda value: isinstance(value, bool), "a boolean"),
    "required": (lambda value: isinstance(value, bool) or is_texts(value), "a list of names of properties"),
}
KEYWORDS = {*A_SCHEMA, *FORMS, "items", "type"}


def normalize(schema: Any, *, null_is_absent: bool) -> None:
    """Check the form of a schema, and write `required: true` in a property as the newest draft does,
    in place. Takes time linear in the schema's size. Raises NoSchema, naming the place.

    null_is_absent: whether keywords whose value is null are removed; otherwise they are wrong.
    """
    ahead: list[Place] = [("", schema)]
    seen: dict[int, Json] = {}
    while ahead:
        path, node = ahead.pop()
        if not isinstance(node, bool | dict):
            raise NoSchema(shown(path) + f"a JSON schema is an object, true or false, got {kind(node)}")
        if isinstance(node, bool) or id(node) in seen:
            continue
        seen[id(node)] = node
        for key, value in list(node.items()):
            if null_is_absent and value is None and key in KEYWORDS:
                del node[key]
            elif (problem := problem_of(key, value)) is not None:
                raise NoSchema(shown(joined(path, f".{key}")) + problem)
        ahead += below(path, node)
        require(node)
        if isinstance(reference := node.get("$ref"), str) and (target := pointed(schema, reference)) is not None:
            ahead.append((reference, target))
    for node in seen.values():
        if isinstance(node.get("required"), bool):
            del node["required"]


def require(node: Json) -> None:
    """Move draft 3's `required` from the node's properties to the node."""
    named = [
        name
        for name, each in table(node.get("properties")).items()
        if isinstance(each, dict) and each.get("required") is True
    ]
    if named:
        own = node["required"] if isinstance(node.get("required"), list) else []
        node["required"] = [*own, *(name for name in named if name not in own)]


def problem_of(key: str, value: Any) -> str | None:
    """The fault of a keyword's value, apart from the schemas in it; None if it has none."""
    if key == "type":
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str):
                return f"expected the name of a type or a list of such names, got {kind(name)}"
            if name not in NAMES:
                return f"there is no type {json.dumps(name[:MAX_SHOWN])}"
    elif key in FORMS:
        is_right, expected = FORMS[key]
        if not is_right(value):
            return f"expected {expected}, got {kind(value)}"
    return "it is empty: no answer can match it" if value == [] and key in ("type", "enum", "anyOf", "oneOf") else None


def below(path: str, node: Json) -> Iterator[Place]:
    """The places in a node where schemas stand. Raises NoSchema for a dependency that is no list of
    names."""
    for key in A_SCHEMA:
        if key in node:
            yield joined(path, f".{key}"), node[key]
    for key in (*SCHEMAS, "items"):
        value = node.get(key)
        if isinstance(value, list):
            yield from ((joined(path, f".{key}[{index}]"), each) for index, each in enumerate(value))
        elif key in node:
            yield joined(path, f".{key}"), value
    for key in TABLES:
        for name, each in node.get(key, {}).items():
            place = joined(path, f".{key}.{name[:MAX_SHOWN]}")
            if key == "dependentRequired" or (key == "dependencies" and isinstance(each, list | str)):
                if not is_texts(each) and not (key == "dependencies" and isinstance(each, str)):
                    raise NoSchema(shown(place) + f"expected a list of names of properties, got {kind(each)}")
            else:
                yield place, each


def pointed(schema: Any, reference: str) -> Any:
    """The value to which a reference `#/a/b` points; None if there is none."""
    if not reference.startswith("#/"):
        return None
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if NUMBER.fullmatch(name) and int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def kind(value: Any) -> str:
    """A value's type, and a text itself."""
    if isinstance(value, str):
        return f"the text {json.dumps(value[:MAX_SHOWN], ensure_ascii=False)}"
    return KINDS[type(value)]


def joined(path: str, part: str) -> str:
    """The path, cut to the length that is shown: those of a deep and wide schema would take long."""
    return path if path.endswith("…") else path + part if len(path) + len(part) <= MAX_PATH else f"{path}…"


def shown(path: str) -> str:
    """The path, as the beginning of an error."""
    return f"{path.lstrip('.')}: " if path else ""
