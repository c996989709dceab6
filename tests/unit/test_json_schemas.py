"""JSON schemas as clients send them: taken, enforced where that is possible, named where it is not,
and checked at the answer's end.
"""

import asyncio
import ipaddress
import json
import re
import uuid
from collections import OrderedDict, deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from pydantic import BaseModel, TypeAdapter

from services.requests.dialects.openai.schemas import ChatCompletionBody
from services.requests.text.schemas.prepare import Enforceable, prepare
from services.requests.workers.grammars import answers
from services.requests.workers.grammars.answer_worker import problems_of
from services.requests.workers.grammars.answers import AnswerChecker
from shared.model.constraint import Constraint
from shared.model.grammar import compile_grammar
from shared.process.errors import Invalid
from tests.grammars.generate import vocabulary
from tests.grammars.walk import walk

PARAM = "response_format.json_schema.schema"


def prepared(schema: Any, *, is_lenient: bool = False) -> Enforceable:
    return prepare(Constraint("json_schema", json.dumps(schema), PARAM, is_lenient))


def allows(found: Enforceable, value: Any) -> bool:
    matcher = compile_grammar(found.constraint, vocabulary())
    return bool(
        matcher.consume_tokens(vocabulary().tokenizer.tokenize_str(json.dumps(value))) and matcher.is_accepting()
    )


DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
AB: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "additionalProperties": False,
}
# A schema; values that keep to it; values that do not
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "not const": ({"type": "string", "not": {"const": "ab"}}, ["", "a", "abc", "b"], ["ab"]),
    "not enum": ({"type": "integer", "not": {"enum": [1, 3]}}, [0, 2, 4], [1, 3]),
    "not required": ({**AB, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, {"a": 1, "b": 1}]),
    "not type": ({"not": {"type": ["object", "array"]}}, [1, "x", None], [[], {}]),
    "not any": ({"type": "integer", "not": {"anyOf": [{"minimum": 5}, {"const": 0}]}}, [4, -1], [5, 0]),
    "not pattern": ({"type": "string", "not": {"pattern": "^[a-c]*$"}}, ["xa", "d"], ["", "abc"]),
    "if": (
        {**AB, "if": {"required": ["a"], "properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
        [{}, {"a": 2}, {"a": 1, "b": 3}, {"b": 2}],
        [{"a": 1}],
    ),
    "if else": (
        {"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}, "else": {"maximum": 3}},
        [20, 3],
        [15, 5],
    ),
    "dependencies": ({**AB, "dependencies": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    "dependentRequired": (
        {**AB, "dependentRequired": {"a": ["b"], "b": ["a"]}},
        [{}, {"a": 1, "b": 1}],
        [{"a": 1}, {"b": 1}],
    ),
    "dependentSchemas": (
        {**AB, "dependentSchemas": {"a": {"properties": {"b": {"maximum": 5}}}}},
        [{"b": 9}, {"a": 1, "b": 5}],
        [{"a": 1, "b": 9}],
    ),
    "minProperties": ({**AB, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]),
    "maxProperties": ({**AB, "maxProperties": 1}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{}, {"x1": 2}], [{"y": 1}]),
    "oneOf": (
        {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "oneOf of types": (
        {"oneOf": [{"type": "string"}, {"type": "string", "enum": ["x"]}, {"type": "null"}]},
        ["y", None],
        ["x"],
    ),
    "oneOf told apart by a property": (
        {
            "type": "object",
            "oneOf": [{"properties": {"kind": {"const": each}, each: {"type": "integer"}}} for each in ("p", "q")],
        },
        [{"kind": "p", "p": 1}, {"kind": "q"}],
        [{"p": 1}, {"kind": "r"}, {"kind": "q", "q": "x"}],
    ),
    "draft 4's bounds": (
        {**DRAFT_4, "type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False},
        [4, 9],
        [3],
    ),
    "siblings in draft 4": (
        {**DRAFT_4, "$ref": "#/definitions/a", "definitions": {"a": {"enum": [1]}}, "not": {}},
        [1],
        [2],
    ),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_keywords_that_the_engine_does_not_know_are_said_in_others(name: str) -> None:
    schema, right, wrong = ENFORCED[name]
    found = prepared(schema)
    assert found.ignored == () and found.checks == ()
    assert [allows(found, each) for each in right] == [True] * len(right)
    assert [allows(found, each) for each in wrong] == [False] * len(wrong)
    for seed in range(4):
        answer = walk(found.constraint, seed=seed)
        assert answer.finish_reason == "length" or problems_of(schema, answer.text) == []


DATES = {"date": "{}", "date-time": "{}T10:00:00Z"}


@pytest.mark.parametrize("name", DATES)
def test_a_date_is_one_of_the_calendar(name: str) -> None:
    found = prepared({"type": "string", "format": name})
    for right in ("2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "0004-02-29", "2023-02-28"):
        assert allows(found, DATES[name].format(right)), right
    for wrong in (
        "0000-07-07",
        "2023-02-29",
        "1900-02-29",
        "2024-04-31",
        "2024-13-01",
        "2024-00-10",
        "2024-01-00",
        "0000-02-29",
    ):
        assert not allows(found, DATES[name].format(wrong)), wrong


LEFT: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    "foreign $ref": ({"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}, "$ref"),
    "look-behind": ({"type": "string", "pattern": "(?<=a)b"}, "pattern"),
    "patterns that overlap": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "string"}}},
        "patternProperties",
    ),
    "counted contains": ({"type": "array", "contains": {"const": 1}, "minContains": 2}, "contains"),
    "negated multipleOf": ({"type": "integer", "not": {"multipleOf": 2}}, "not"),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
        "oneOf",
    ),
    "uniqueItems of an enum": ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}}, "contains"),
    "look-ahead": ({"type": "string", "pattern": "^(?!no|never$)(?=.*[0-9])[a-z0-9]+$"}, "pattern"),
    "flags": ({"type": "string", "pattern": "(?i)^a$"}, "pattern"),
    "negated pattern": ({"type": "string", "not": {"pattern": "^(ab|c)$"}}, "not"),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": True}}], "type": "object", "unevaluatedProperties": False},
        "unevaluatedProperties",
    ),
    "unevaluatedItems": ({"allOf": [{"prefixItems": [{}]}], "unevaluatedItems": False}, "unevaluatedItems"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_enforced_is_named_without_strict_and_refused_by_name_with_it(name: str) -> None:
    schema, keyword = LEFT[name]
    assert prepared(schema, is_lenient=True).ignored == (f"{PARAM}: {keyword}",)
    with pytest.raises(Invalid, match=re.escape(keyword)) as refused:
        prepared(schema)
    assert (
        refused.value.param == PARAM and refused.value.code == "invalid_json_schema" and len(str(refused.value)) < 500
    )


def test_a_format_that_nobody_knows_is_a_remark() -> None:
    for is_lenient in (False, True):
        found = prepared({"type": "string", "format": "x-color"}, is_lenient=is_lenient)
        assert found.ignored == (f"{PARAM}: format x-color",) and found.checks == () and allows(found, "red")


NOTHING: list[Any] = [
    False,
    {"not": {}},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "strin"},
    7,
    {"required": ["a"], "type": "object", "properties": {"a": False}},
]


@pytest.mark.parametrize("schema", NOTHING)
@pytest.mark.parametrize("is_lenient", [False, True])
def test_what_nothing_matches_and_what_is_no_schema_is_refused(schema: Any, is_lenient: bool) -> None:
    with pytest.raises(Invalid) as refused:
        prepared(schema, is_lenient=is_lenient)
    assert refused.value.param == PARAM and refused.value.code == "invalid_json_schema"


def test_a_schema_that_the_engine_cannot_put_together_is_held_to_at_its_top() -> None:
    again = {"allOf": [{"$ref": "#"}, {"properties": {"again": {"required": ["n"]}}, "type": "object"}]}
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "again": again},
        "required": ["n"],
        "additionalProperties": False,
    }
    found = prepared(schema, is_lenient=True)
    assert found.ignored == (f"{PARAM}: all below the first level",)
    assert (
        [name for name, _ in found.checks] == [""]
        and allows(found, {"n": 1})
        and not allows(found, {"n": "x"})
        and not allows(found, {})
    )


class Colour(Enum):
    RED = "red"


class Number(IntEnum):
    ONE = 1


class Pair(NamedTuple):
    a: int
    b: str


class Node(BaseModel):
    next: "Node | None" = None


TYPES: list[Any] = [
    int,
    float,
    str,
    bool,
    None,
    bytes,
    list[int],
    set[int],
    frozenset[str],
    tuple[int, str],
    tuple[int, ...],
    dict[str, int],
    dict[int, str],
    deque[int],
    OrderedDict[str, int],
    date,
    datetime,
    time,
    timedelta,
    Decimal,
    Fraction,
    complex,
    Path,
    uuid.UUID,
    re.Pattern,
    Colour,
    Number,
    Pair,
    Node,
    Literal["a", 1],
    int | str | None,
    Any,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Interface,
    pydantic.IPvAnyAddress,
    pydantic.IPvAnyNetwork,
    pydantic.SecretStr,
    pydantic.SecretBytes,
    pydantic.AnyUrl,
    pydantic.HttpUrl,
    pydantic.FilePath,
    pydantic.DirectoryPath,
    pydantic.Json,
    pydantic.Base64Bytes,
    pydantic.UUID4,
    pydantic.ByteSize,
    pydantic.PastDate,
    pydantic.AwareDatetime,
    pydantic.PositiveInt,
    pydantic.conlist(int, min_length=2),
    Annotated[str, pydantic.StringConstraints(pattern="^a+$", max_length=4)],
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_pydantic_s_types_are_taken(kind: Any) -> None:
    try:
        schema = TypeAdapter(kind).json_schema()
    except pydantic.errors.PydanticInvalidForJsonSchema:
        pytest.skip("pydantic has no schema of it")
    found = prepared(schema, is_lenient=True)
    for seed in range(3):
        answer = walk(found.constraint, seed=seed)
        assert answer.finish_reason == "length" or found.checks or problems_of(schema, answer.text) == []


def body(**fields: Any) -> ChatCompletionBody:
    return ChatCompletionBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields})


def test_one_grammar_under_two_names_is_one() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    both = body(response_format=form, guided_json=schema).constraint()
    assert both is not None and both.text == json.dumps(schema, separators=(",", ":"))
    lark = "start: /a+/"
    assert body(structured_outputs={"grammar": lark}, guided_grammar=lark).constraint() is not None
    with pytest.raises(Invalid, match="different things"):
        body(response_format=form, guided_json={"type": "integer"}).constraint()


@pytest.mark.parametrize("strict", [None, False, True])
def test_only_strict_is_strict(strict: bool | None) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": strict}}
    constraint = body(response_format=form).constraint()
    assert constraint is not None and constraint.is_lenient == (strict is not True)
    others = (
        body(guided_json={}),
        body(structured_outputs={"json": {}}),
        body(response_format={"type": "json_object", "schema": {}}),
    )
    assert all(each.constraint().is_lenient for each in others)  # type: ignore[union-attr]


UNIQUE = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
}


def function(name: str, parameters: Any, *, strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "second"}}])
def test_a_strict_function_that_cannot_be_enforced_is_named(choice: Any) -> None:
    tools = [
        function("first", {"type": "object", "properties": {}}, strict=True),
        function("second", UNIQUE, strict=True),
    ]
    calling = body(tools=tools, tool_choice=choice).calling()
    constraint = calling.forced() or calling.offered("hermes")
    assert constraint is not None
    with pytest.raises(Invalid, match="the function second: .*uniqueItems") as refused:
        prepare(constraint)
    assert refused.value.param == "tools[1].function.parameters" and len(str(refused.value)) < 300


def test_a_function_that_is_not_strict_is_checked_at_the_end() -> None:
    found = prepare(body(tools=[function("second", UNIQUE, strict=False)], tool_choice="required").calling().forced())  # type: ignore[arg-type]
    assert found.ignored == ("tools[0].function.parameters: uniqueItems",)
    assert [name for name, _ in found.checks] == ["second"]


def test_forced_calls_come_to_an_end() -> None:
    forced = body(tools=[function("look", None, strict=False)], tool_choice="required").calling().forced()
    assert forced is not None
    matcher, call = compile_grammar(prepare(forced).constraint, vocabulary()), '{"name": "look", "parameters": {}}'

    def takes(text: str) -> bool:
        tokens = vocabulary().tokenizer.tokenize_str(text)
        return bool(matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens))

    assert takes("[" + ", ".join([call] * 16)) and not takes(", ") and takes("]")


CONTENT = json.dumps({"type": "array", "items": {"type": "string", "pattern": "^(a+)+$"}, "uniqueItems": True})


def test_an_answer_is_checked_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(answers, "CHECK_TIMEOUT_S", 60.0)
        checker, checks = AnswerChecker(), [("", CONTENT), ("f", json.dumps(UNIQUE))]
        assert await checker.check("", checks, '["a", "aa"]', []) == []
        assert await checker.check("", checks, '["a", "a"]', []) == [
            {"path": "$", "message": "uniqueItems does not hold"}
        ]
        [problem] = await checker.check("", checks, "", [("f", '{"names": ["x", "x"]}'), ("g", "{")])
        assert problem == {"function": "f", "path": "$.names", "message": "uniqueItems does not hold"}
        with monkeypatch.context() as patch:
            patch.setattr(answers, "CHECK_TIMEOUT_S", 0.3)
            [slow] = await checker.check("", checks, json.dumps(["a" * 60 + "b"]), [])
        assert slow["message"].startswith("not checked: it takes more than")
        assert await checker.check("", checks, '["b"]', []) == [
            {"path": "$[0]", "message": "pattern does not hold"}
        ]  # the next one has another process
        [long] = await checker.check("", checks, "x" * (1 << 21), [])
        assert long["message"] == "not checked: it is too long"
        await checker.helpers.stop()

    asyncio.run(run())


def test_what_a_schema_refers_to_elsewhere_is_not_fetched() -> None:
    assert problems_of({"properties": {"a": {"$ref": "http://127.0.0.1:1/a.json"}}}, '{"a": 1}') == []


@pytest.mark.parametrize("is_lenient", [False, True])
def test_a_schema_that_is_nested_too_deeply_is_an_error(is_lenient: bool) -> None:
    with pytest.raises(Invalid) as refused:
        prepare(Constraint("json_schema", '{"not":' * 20_000 + "{}" + "}" * 20_000, PARAM, is_lenient))
    assert refused.value.param == PARAM
