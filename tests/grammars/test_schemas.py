"""Whatever the schema, an answer that has ended keeps to it."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from services.requests.text.schemas.prepare import prepare
from shared.model.constraint import Constraint
from shared.model.grammar import compile_grammar
from tests.examples import examples
from tests.grammars.generate import generate, vocabulary
from tests.grammars.schemas import keeps_to, schemas

AT_ONCE = 24


@examples(16, phases=[Phase.explicit, Phase.reuse, Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    some=st.lists(schemas(), min_size=AT_ONCE, max_size=AT_ONCE),
    temperature=st.sampled_from([0.9, 2.0]),
    seed=st.integers(0, 1 << 32),
)
def test_every_answer_that_has_ended_keeps_to_its_schema(some: list[Any], temperature: float, seed: int) -> None:
    asked = [prepare(Constraint("json_schema", json.dumps(each))).constraint for each in some]
    answers = generate(asked, temperature=temperature, seed=seed, max_tokens=300)
    assert [answer.error for answer in answers] == [None] * len(some)
    ended = [
        (answer.text, schema) for answer, schema in zip(answers, some, strict=True) if answer.finish_reason == "stop"
    ]
    assert ended  # the others are cut off: a text without a bound is as long as chance will have it
    for text, schema in ended:
        assert keeps_to(text, schema), (text, schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": {"a": [1, None, "é"]}}, '{"a": [1, null, "é"]}'),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]},
            '{"a": -3, "b": [1.5e3, {"x": "\\u00e9\\n\\ud83d\\ude00"}]}',
        ),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "17"),
        (
            {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"},
            "[[], [[]]]",
        ),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]}, '{"a": 1}'),
    ],
)
def test_what_is_valid_is_allowed(schema: Any, text: str) -> None:
    assert keeps_to(text, schema)
    matcher = compile_grammar(prepare(Constraint("json_schema", json.dumps(schema))).constraint, vocabulary())
    token_ids = vocabulary().tokenizer.tokenize_str(text)
    assert matcher.validate_tokens(token_ids) == len(token_ids)
    assert matcher.consume_tokens(token_ids) and matcher.is_accepting()


VALUE = {"a": [1, {"b": []}], "c": {}}
LAYOUTS = {
    "compact": {"separators": (",", ":")},
    "plain": {},
    "spaced": {"separators": (" , ", " : ")},
    "lines": {"indent": 4},
    "tabs": {"indent": "\t"},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_json_may_be_laid_out_as_it_usually_is(layout: Any) -> None:
    text = json.dumps(VALUE, **layout)
    assert num_allowed(text) == num_allowed(text.replace("\n", "\r\n")) - text.count("\n") == len(text)


@pytest.mark.parametrize("text", ['{  "a"', '{\n\n"a"', '{"a" \n:', '{"a":\t1', '{"a":\n' + 41 * " "])
def test_white_space_has_an_end(text: str) -> None:
    """Small models that have nothing to say would go on with it until their answer is cut off."""
    assert num_allowed(text) < len(text)


def num_allowed(text: str) -> int:
    """How many of the first characters any object's JSON may begin with."""
    matcher = compile_grammar(Constraint("json_schema", '{"type": "object"}'), vocabulary())
    return next(
        (
            number
            for number, each in enumerate(text)
            if not matcher.consume_tokens(vocabulary().tokenizer.tokenize_str(each))
        ),
        len(text),
    )
