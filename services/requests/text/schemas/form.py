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

Json = dict[str, Any]
Place = tuple[str, Any]  # path and value

NAMES = ("null", "boolean", "object", "array", "number", "string", "integer", "any")  # of types; any is of draft 3
A_SCHEMA = (
    "not", "if", "then", "else", "contains", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
TABLES = ("properties", "patternProperties", "dependentSchemas", "dependencies", "dependentRequired", "$defs", "definitions")
TEXTS = ("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef", "$schema", "$id", "$anchor", "$dynamicAnchor")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties")
MAX_SHOWN = 40  # characters of a value or a name, in an error
MAX_PATH = 200
NUMBER = re.compile(r"[0-9]{1,9}")
KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object", type(None): "null"}


class NoSchema(ValueError):
    """A value that is no schema stands where one should."""


def normalize(schema: Any, *, null_is_absent: bool) -> None:
    """Check the form of a schema, and say in place what the newest draft says otherwise: `required:
    true` in a property. Takes time linear in its size. Raises NoSchema, naming the place.

    null_is_absent: keywords whose value is null are taken out; else they are wrong.
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
        if null_is_absent:
            drop_nulls(node)
        check_keywords(path, node)
        ahead += below(path, node)
        require(node)
        if isinstance(reference := node.get("$ref"), str) and (target := pointed(schema, reference)) is not None:
            ahead.append((reference, target))
    for node in seen.values():
        if isinstance(node.get("required"), bool):
            del node["required"]


def drop_nulls(node: Json) -> None:
    for key in [key for key, value in node.items() if value is None and key in KEYWORDS]:
        del node[key]


def check_keywords(path: str, node: Json) -> None:
    """Raises NoSchema."""
    for key, value in node.items():
        if key in KEYWORDS and (problem := problem_of(key, value)) is not None:
            raise NoSchema(shown(joined(path, f".{key}")) + problem)


def require(node: Json) -> None:
    """Say draft 3's `required` of the node's properties in the node."""
    named = [name for name, each in node.get("properties", {}).items() if isinstance(each, dict) and each.get("required") is True]
    if named:
        own = node["required"] if isinstance(node.get("required"), list) else []
        node["required"] = [*own, *(name for name in named if name not in own)]


def problem_of(key: str, value: Any) -> str | None:
    """The fault of a keyword's value, not looking at the schemas in it; None:
    nothing."""
    if key == "type":
        return problem_of_type(value)
    is_right, expected = FORMS.get(key, (is_anything, ""))
    if not is_right(value):
        return f"expected {expected}, got {kind(value)}"
    return "it is empty: no answer can match it" if value == [] and key in ("enum", "anyOf", "oneOf") else None


def problem_of_type(value: Any) -> str | None:
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str):
            return f"expected the name of a type or a list of such names, got {kind(name)}"
        if name not in NAMES:
            return f"there is no type {json.dumps(name[:MAX_SHOWN])}"
    return "it is empty: no answer can match it" if value == [] else None


def below(path: str, node: Json) -> Iterator[Place]:
    """The places in a node where schemas stand. Raises NoSchema for lists of names that are
    none."""
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
    """The place in the schema that a reference `#/a/b` points to; None: there is none."""
    if not reference.startswith("#/"):
        return None
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if NUMBER.fullmatch(name) and int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def is_anything(_: Any) -> bool:
    return True


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def is_list(value: Any) -> bool:
    return isinstance(value, list)


def is_table(value: Any) -> bool:
    return isinstance(value, dict)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_bound(value: Any) -> bool:
    """Draft 4's exclusiveMinimum says whether minimum is exclusive."""
    return is_number(value) or isinstance(value, bool)


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def are_required(value: Any) -> bool:
    """Draft 3's required is of a property itself."""
    return isinstance(value, bool) or is_texts(value)


FORMS: dict[str, tuple[Callable[[Any], bool], str]] = (
    dict.fromkeys(TEXTS, (is_text, "a text"))
    | dict.fromkeys(COUNTS, (is_count, "an integer that is not negative"))
    | dict.fromkeys(("minimum", "maximum"), (is_number, "a number"))
    | dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (is_bound, "a number"))
    | dict.fromkeys(TABLES, (is_table, "an object"))
    | dict.fromkeys(SCHEMAS, (is_list, "a list of schemas"))
    | {
        "multipleOf": (is_positive, "a number above 0"), "enum": (is_list, "a list of values"), "uniqueItems": (is_boolean, "a boolean"),
        "required": (are_required, "a list of names of properties"),
    }
)  # fmt: skip
KEYWORDS = {*A_SCHEMA, *FORMS, "items", "type"}


def kind(value: Any) -> str:
    """A value's type, and a text itself."""
    if isinstance(value, str):
        return f"the text {json.dumps(value[:MAX_SHOWN], ensure_ascii=False)}"
    return KINDS[type(value)]


def joined(path: str, part: str) -> str:
    """The path, no longer than is shown: of a deep and wide schema all would be long."""
    return path if path.endswith("…") else path + part if len(path) + len(part) <= MAX_PATH else f"{path}…"


def shown(path: str) -> str:
    """The path, as the beginning of an error."""
    return f"{path.lstrip('.')}: " if path else ""
