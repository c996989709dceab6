"""Wrong JSON schemas are refused by their place; those valid in some draft are taken."""

import json
import time
from typing import Any

import jsonschema
import pytest

from services.requests.text.schemas.form import NoSchema, normalize
from services.requests.text.schemas.prepare import Enforceable, prepare
from shared.model.constraint import Constraint
from shared.model.grammar import compile_grammar
from shared.process.errors import Invalid
from tests.grammars.generate import vocabulary

PARAM = "response_format.json_schema.schema"
WRONG: list[tuple[Any, str]] = [
    ({"enum": 5}, "enum: expected a list of values, got an integer"),
    ({"enum": []}, "enum: it is empty: no answer can match it"),
    ({"properties": 5}, "properties: expected an object, got an integer"),
    ({"required": "a"}, 'required: expected a list of names of properties, got the text "a"'),
    ({"items": "x"}, 'items: a JSON schema is an object, true or false, got the text "x"'),
    (
        {"properties": {"a": {"properties": {"foo": "bar"}}}},
        "properties.a.properties.foo: a JSON schema is an object, true or false",
    ),
    ({"properties": {"a": None}}, "properties.a: a JSON schema is an object, true or false, got null"),
    ({"anyOf": [{}, {"minLength": -1}]}, "anyOf[1].minLength: expected an integer that is not negative"),
    ({"type": "strin"}, 'type: there is no type "strin"'),
    ({"$ref": "#/parts/a", "parts": {"a": {"pattern": 3}}}, "#/parts/a.pattern: expected a text, got an integer"),
    (None, "a JSON schema is an object, true or false, got null"),
]


def prepared(schema: Any, *, is_lenient: bool = True) -> Enforceable:
    return prepare(Constraint("json_schema", json.dumps(schema), PARAM, is_lenient))


def allows(found: Enforceable, text: str) -> bool:
    matcher = compile_grammar(found.constraint, vocabulary())
    return bool(matcher.consume_tokens(vocabulary().tokenizer.tokenize_str(text)) and matcher.is_accepting())


@pytest.mark.parametrize(("schema", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
@pytest.mark.parametrize("is_lenient", [False, True])
def test_what_is_no_schema_is_refused_by_its_place(schema: Any, message: str, is_lenient: bool) -> None:
    with pytest.raises(Invalid) as refused:
        prepared(schema, is_lenient=is_lenient)
    assert str(refused.value).startswith(f"{PARAM}: {message}")
    assert (refused.value.param, refused.value.code, refused.value.status) == (PARAM, "invalid_json_schema", 400)


VALUES: list[Any] = [
    True,
    0,
    -1,
    1,
    2.5,
    3.0,
    "a",
    "string",
    [],
    [1],
    ["a"],
    [{}],
    {},
    {"a": 1},
    {"a": {}},
    {"a": ["b"]},
]
OF_OLDER_DRAFTS: list[tuple[str, Any]] = [
    ("type", "any"),
    ("required", True),
    ("exclusiveMinimum", True),
    ("exclusiveMaximum", True),
    ("items", []),
    ("items", [{}]),
    ("allOf", []),
    ("prefixItems", []),
]
KEYWORDS = [
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "definitions",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "type",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "x-own",
    "$defs",
    "$ref",
]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_each_keyword_takes_what_the_metaschema_takes(keyword: str) -> None:
    metaschema = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)
    for value in VALUES:
        is_valid = metaschema.is_valid({keyword: value}) and not (
            keyword == "enum" and value == []
        )  # nothing matches it
        if keyword == "additionalItems":  # of the drafts before
            is_valid = isinstance(value, bool) or metaschema.is_valid(value)
        if keyword == "dependencies":  # of draft 3, too: a text
            is_valid = isinstance(value, dict) and value != {"a": 1}
        is_older = json.dumps([keyword, value]) in map(json.dumps, OF_OLDER_DRAFTS)  # as texts: 1 is True
        try:
            normalize({keyword: value}, null_is_absent=False)
        except NoSchema:
            assert not is_valid and not is_older, value
        else:
            assert is_valid or is_older, value


def test_a_draft_3_s_required_property_is_required() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "required": True}, "b": {"type": "integer", "required": False}},
    }
    for is_lenient in (False, True):
        found = prepared(schema, is_lenient=is_lenient)
        assert found.ignored == () and allows(found, '{"a": 1}') and not allows(found, '{"b": 1}')


def test_null_is_no_keyword_without_strict() -> None:
    schema = {"type": "string", "enum": None, "maxLength": None, "pattern": None, "description": None}
    found = prepared(schema)
    assert found.ignored == () and allows(found, '"abc"') and not allows(found, "1")
    with pytest.raises(Invalid, match="enum: expected a list of values, got null"):
        prepared(schema, is_lenient=False)
    assert allows(prepared({"const": None}, is_lenient=False), "null")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "string", "pattern": "^a$", "minLength": 5},
        {"allOf": [{"const": 1}, {"const": 2}]},
        {
            "type": "array",
            "items": {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
            "minItems": 1,
            "uniqueItems": True,
        },
    ],
)
@pytest.mark.parametrize("is_lenient", [False, True])
def test_what_nothing_satisfies_is_refused_also_where_only_the_engine_sees_it(schema: Any, is_lenient: bool) -> None:
    with pytest.raises(Invalid, match="no answer can match it|uniqueItems can't be enforced") as refused:
        prepared(schema, is_lenient=is_lenient)
    assert not is_lenient or "no answer can match it" in str(refused.value)


LISTS = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
TREE = {"type": "object", "properties": {"sons": {"type": "array", "items": {"$ref": "#"}}}, "required": ["sons"]}
CHAIN = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
EITHER = {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2}]}
OTHER = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        (LISTS, False),
        (LISTS | {"minItems": 0}, True),
        (LISTS | {"type": ["array", "null"]}, True),
        (CHAIN, False),
        (CHAIN | {"required": []}, True),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, False),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2}, False),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1}, True),
        ({"allOf": [CHAIN, {"type": "object", "maxProperties": 1}]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": EITHER, "b": OTHER}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": EITHER, "b": OTHER | {"required": []}}}, True),
        ({"$ref": "#/$defs/b", "$defs": {"a": {"enum": [[], 1]}, "b": OTHER}}, True),
        (TREE, True),
    ],
)
@pytest.mark.parametrize("is_lenient", [False, True])
def test_a_schema_whose_answers_never_end_is_refused(schema: Any, ends: bool, is_lenient: bool) -> None:
    try:
        found = prepared(schema, is_lenient=is_lenient)
    except Invalid as error:
        assert not ends and str(error).endswith(
            "no answer can match it: by a $ref, each would hold another one, without an end"
        )
    else:
        assert ends and "$ref" in found.constraint.text


def many(count: int, **more: Any) -> Any:
    kinds = ({"type": "string"}, {"type": "integer"})
    return {
        "type": "object",
        "properties": {f"p{number}": {**kinds[number % 2], **more} for number in range(count)},
        "required": ["p1", "p7"],
    }


def test_an_object_of_thousands_of_properties_is_held_to_its_type() -> None:
    with pytest.raises(Invalid, match="more than 900 optional properties"):
        prepared(many(903), is_lenient=False)
    found = prepared(many(5000))
    assert found.ignored == (f"{PARAM}: all but its type",) and [name for name, _ in found.checks] == [""]
    assert allows(found, '{"p1": "x"}') and not allows(found, "[]")
    found = prepared(many(902), is_lenient=False)
    assert found.ignored == () and found.checks == ()
    assert (
        allows(found, '{"p1": 5, "p7": 5, "p900": "x"}')
        and not allows(found, '{"p1": 5, "p7": 5, "p900": 1}')
        and not allows(found, '{"p1": 5}')
    )


def test_a_schema_that_is_too_large_is_held_to_its_first_level_however_fast_the_machine_is() -> None:
    schema = many(800, allOf=[{} for _ in range(30)])
    began = time.process_time()
    found = prepared(schema)
    assert time.process_time() - began < 4.0
    assert found.ignored == (f"{PARAM}: all below the first level",) and [name for name, _ in found.checks] == [""]
    assert (
        allows(found, '{"p1": 5, "p7": 5, "p798": "x"}')
        and not allows(found, '{"p1": 5, "p7": 5, "p798": 1}')
        and not allows(found, "{}")
    )
    with pytest.raises(Invalid, match="it is too large"):
        prepared(schema, is_lenient=False)


@pytest.mark.parametrize(("schema", "name"), [({"type": "array"}, "all but its type"), ({}, "all")])
def test_what_has_no_first_level_keeps_its_type(schema: Any, name: str) -> None:
    loop = {"allOf": [{"$ref": "#"}, {"items": {"type": "integer"}, "minItems": 2}], **schema}
    found = prepared(loop)
    assert found.ignored == (f"{PARAM}: {name}",) and allows(found, "[1]") and allows(found, "1") == (name == "all")


def test_no_schema_takes_long() -> None:
    for schema in (
        {"type": "object", "patternProperties": {f"^p{number}$": {"type": "string"} for number in range(1500)}},
        {"oneOf": [{"const": f"v{number}"} for number in range(4000)]},
        {
            "oneOf": [
                {"type": "object", "required": [f"a{number}"], "properties": {f"a{number}": {}}}
                for number in range(1500)
            ]
        },
    ):
        began = time.process_time()
        prepared(schema)
        assert time.process_time() - began < 4.0
