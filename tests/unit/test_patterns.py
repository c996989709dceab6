"""Patterns, names and bounds that the grammars' library gets wrong, and that are therefore said to
it in other words.
"""

import json
from collections import Counter
from typing import Any

import pytest

from services.requests.text.schemas.expressions import written
from services.requests.text.schemas.prepare import prepare
from services.requests.workers.grammars.answer_worker import problems_of
from shared.model.constraint import Constraint
from shared.model.grammar import compile_grammar
from shared.process.errors import Invalid
from tests.grammars import gbnf, patterns

NUM_DRAWN = 120


def allowed(schema: Any, text: str, *, is_lenient: bool = False) -> bool:
    matcher = compile_grammar(
        prepare(Constraint("json_schema", json.dumps(schema), "s", is_lenient)).constraint, gbnf.of_bytes()
    )
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


# A pattern; answers, as JSON, that match; and some that do not
PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r'^[^"]{1,3}$', ['"a"', r'"\\\n"'], [r'"\"\"\""', r'"\u0022"']),
    (r'^[^"\\]*$', ['"a"', r'"\n"'], [r'"\""', r'"\\"']),
    (r'^"[^"]*"$', [r'"\"a\""'], [r'"\"\"\""']),
    (r"^[^\x22]$", ['"a"'], [r'"\""']),
    (r"^[^\p{P}]$", ['"a"'], [r'"\""', r'"\\"']),
    (r"^(?:[\x00-\x0f]|[\x10-!])$", [r'"\t"', '"!"'], [r'"\""']),
    (r"^[\s\S]{2}$", [r'"\"\\"', r'"\n\r"'], ['"a"']),
    (r"^.$", ['"a"', '"é"', r'"\\"'], [r'"\n"', r'"\r"', '"\u2028"']),
    (r"^\d\w\s$", ['"1a "', r'"0_\t"'], ['"٣a "', '"1é "', '"1a\ufeff"', r'"1a\u001c"']),
    (r"^\D\W\S$", ['"a-x"'], ['"٣-x"', '"aéx"', '"a-\ufeff"']),
    (r"^[^\d\s]$", ['"a"', r'"\""'], ['"1"', '"٣"', '"\ufeff"']),
    (r"^[[:alpha:]]$", ['":]"', '"a]"'], ['"b"', '"a"']),
    (r"^[a&&b]$", ['"a"', '"&"'], ['"c"']),
    (r"^[\w-.]$", ['"-"', '"."', '"x"'], ['"/"']),
    (r"^x{2$", ['"x{2"'], ['"xx"']),
    (r"^\u{1F600}\ud83d\ude00\x41\cA?$", ['"😀😀A"'], ['"😀A"']),
    (r"^(?<name>a)(?P<other>b)(?:c)$", ['"abc"'], ['"ab"']),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS)
def test_a_pattern_allows_what_each_engine_matches(pattern: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [allowed(schema, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    "pattern",
    [
        "a++",
        "a{,3}",
        "[]",
        "[^]",
        r"\bx",
        "(?=x)y",
        r"(a)\1",
        "[b-a]",
        "(a",
        "a)",
        "*",
        "^*",
        r"\A",
        "a\0",
        "(?m)^a",
        "(?i)^a",
        "(" * 99,
    ],
)
def test_what_engines_read_differently_is_not_enforced(pattern: str) -> None:
    assert written(pattern) is None


ABOUT = "look-around, including look-ahead and look-behind, is not supported"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a(", "can't be enforced: unclosed group"),
        ("[b-a]", "can't be enforced: invalid character class range, the start must be <= the end"),
        ("a\\", "can't be enforced: engines read it differently"),
        ("a(?<=b)", f"can't be enforced: {ABOUT}"),
        (r"(a)\1", "can't be enforced: backreferences are not supported"),
        ("a++", "can't be enforced: engines read it differently"),
        ("[^]", "can't be enforced: unclosed character class"),
    ],
)
def test_a_pattern_that_is_not_enforced_is_named_with_the_reason(pattern: str, words: str) -> None:
    schema: Any = {"$defs": {"x": {"type": "array", "items": {"type": "string", "pattern": pattern}}}}
    schema |= {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a$"}, "b": {"$ref": "#/$defs/x"}}}
    with pytest.raises(Invalid) as refused:
        prepare(Constraint("json_schema", json.dumps(schema), "s"))
    assert str(refused.value) == f"s: $defs.x.items.pattern {words}; without strict it is passed over"
    named = {"type": "object", "patternProperties": {pattern: {}}, "required": ["a"], "minProperties": 2}
    with pytest.raises(Invalid) as refused:
        prepare(Constraint("json_schema", json.dumps(named), "s"))
    told = f"s: patternProperties.{pattern} {words}; minProperties can't be enforced; without strict it is passed over"
    assert str(refused.value) == told


def test_answers_by_chance_match_their_patterns() -> None:
    counts: Counter[str] = Counter()
    assert patterns.of_patterns(NUM_DRAWN, 0, counts) == []
    assert counts["pattern: taken"] > NUM_DRAWN // 10 and counts["stop"] > NUM_DRAWN


INNER = {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            ["-7", "9223372036854775807"],
            ["9223372036854775808", "-9223372036854775809"],
        ),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["7"], ["-1", "18446744073709551616"]),
        ({"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308}, ["0.5"], ["-1"]),
        (
            {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
            ["6.02e23"],
            ['"a"'],
        ),
        ({"type": "number", "minimum": -1e19, "maximum": 1e19}, ["-3", "4.5"], ["10000000000000000001"]),
        ({"type": "number", "minimum": 4.9e-324}, ["0.1"], ["0", "-1"]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1e20}, ["[1]"], ['["a"]']),
        ({"type": "string", "maxLength": 2**63}, ['"a"'], ["1"]),
        ({"type": "number", "multipleOf": 0.1, "minimum": 0.25, "maximum": 0.35}, ["0.3"], ["0.25", "0.2", "0.4"]),
        (
            {"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 0.29, "maximum": 0.305},
            ["0.3"],
            ["0.29", "0.305", "0.31"],
        ),
        (
            {"type": "number", "multipleOf": 2, "exclusiveMinimum": -4, "exclusiveMaximum": 2.5},
            ["-2", "0", "2"],
            ["-4", "4", "1"],
        ),
    ],
)
def test_a_bound_that_the_library_cannot_say_takes_nothing_else_with_it(
    schema: Any, good: list[str], bad: list[str]
) -> None:
    whole = {
        "type": "object",
        "properties": {"a": schema, "b": INNER},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for text in good:
        assert allowed(whole, f'{{"a": {text}, "b": {{"c": 1}}}}') and not allowed(
            whole, f'{{"a": {text}, "b": {{"c": "x"}}}}'
        )
    assert not any(allowed(whole, f'{{"a": {text}, "b": {{"c": 1}}}}') for text in bad)


def test_a_keyword_that_cannot_be_said_is_named_alone() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "multipleOf": 10**10, "minimum": 3}, "b": INNER},
        "additionalProperties": False,
    }
    with pytest.raises(Invalid, match="multipleOf can't be enforced"):
        prepare(Constraint("json_schema", json.dumps(schema), "s"))
    found = prepare(Constraint("json_schema", json.dumps(schema), "s", is_lenient=True))
    assert found.ignored == ("s: multipleOf",) and found.checks
    assert not allowed(schema, '{"b": {"c": "x"}}', is_lenient=True) and not allowed(
        schema, '{"a": 1}', is_lenient=True
    )


A = {"a": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"properties": A, "patternProperties": {"^a$": {"minimum": 3}}, "additionalProperties": False},
            ['{"a": 4}', "{}"],
            ['{"a": 2}', '{"a": "x"}'],
        ),
        ({"properties": A, "propertyNames": {"enum": ["a"]}}, ['{"a": 4}'], ['{"b": 4}']),
        ({"patternProperties": {".*": {"type": "integer"}}}, ['{"x": 4}', "{}"], ['{"x": "4"}', r'{"\u0061": ""}']),
        ({"properties": A, "additionalProperties": True}, ['{"a": 4, "b": "x"}'], [r'{"\u0061": "x"}']),
        (
            {"properties": A, "additionalProperties": True, "x-guidance": {"json_allowed_escapes": "nu"}},
            [r'{"b": "\n"}'],
            [r'{"\u0061": "x"}'],
        ),
        (
            {"properties": {"a\n": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            [r'{"a\n": 1}'],
            [r'{"a\u000a": "x"}'],
        ),
    ],
)
def test_names_of_properties_are_known_however_they_are_spelt(schema: Any, good: list[str], bad: list[str]) -> None:
    schema = {"type": "object", **schema}
    assert [allowed(schema, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)
    assert not any(problems_of(schema, text) for text in good) and all(problems_of(schema, text) for text in bad)


def test_a_name_that_comes_twice_counts_once() -> None:
    schema = {"type": "object", "patternProperties": {"^[ab]$": {}}, "additionalProperties": False, "minProperties": 2}
    with pytest.raises(Invalid, match="minProperties can't be enforced"):
        prepare(Constraint("json_schema", json.dumps(schema), "s"))
    assert allowed({**schema, "minProperties": 1}, '{"b": 0}') and not allowed({**schema, "minProperties": 1}, "{}")


ONLY_A = {"patternProperties": {"^a$": {}}, "additionalProperties": False}


@pytest.mark.parametrize("names", [ONLY_A, {"propertyNames": {"pattern": "^a$"}}, {"allOf": [ONLY_A]}])
def test_no_comma_stands_behind_the_last_property_that_there_can_be(names: Any) -> None:
    schema = {"type": "object", "properties": A, "required": ["a"], **names}
    matcher = compile_grammar(prepare(Constraint("json_schema", json.dumps(schema))).constraint, gbnf.of_bytes())
    assert matcher.validate_tokens(list(b'{"a": 1,')) == len(b'{"a": 1')


@pytest.mark.parametrize(
    ("value", "divisor", "is_multiple"),
    [("9000427.27", 0.01, True), ("0.3", 0.1, True), ("0.35", 0.1, False), ("9", 3, True), ("1e999", 2, False)],
)
def test_multiples_are_those_of_decimal_numbers(value: str, divisor: float, is_multiple: bool) -> None:
    assert (problems_of({"multipleOf": divisor}, value) == []) == is_multiple
