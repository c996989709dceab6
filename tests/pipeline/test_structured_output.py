"""Structured output as clients ask for it: the `openai` package and plain HTTP against a real pipeline."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import psutil
import pytest
from pydantic import BaseModel, Field

from tests.deployment import MODEL, Deployment
from tests.waiting import wait_until

QUESTION = [{"role": "user", "content": "What is Penstock?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
HOT: dict[str, Any] = {"temperature": 1.2, "max_tokens": 900}  # more than any text that PERSON allows
ENDLESS = {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}


def ask(demo: Deployment, **fields: Any) -> Any:
    return demo.client().chat.completions.create(model=MODEL, messages=QUESTION, **fields).choices[0]


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_matches_its_schema(demo: Deployment, seed: int) -> None:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    choice = ask(demo, seed=seed, response_format={"type": "json_schema", "json_schema": schema}, **HOT)
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), PERSON)


def test_the_client_s_own_models_are_parsed(demo: Deployment) -> None:
    class Step(BaseModel):
        kind: Literal["think", "act"]
        number: int

    class Plan(BaseModel):
        steps: list[Step] = Field(max_length=2)
        is_done: bool

    reply = demo.client().chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Plan, seed=3, **HOT)
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(reply.choices[0].message.parsed, Plan)


def test_a_json_object_is_one(demo: Deployment) -> None:
    choice = ask(demo, seed=5, response_format={"type": "json_object"}, temperature=0, max_tokens=100)
    assert choice.finish_reason in ("stop", "length")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.startswith("{")


LARK = 'start: NAME ("," NAME)*\nNAME: /[a-z]{2,4}/\n'
GBNF = 'root ::= ("yes" | "no") " "? [0-9]+ "."\n'
TAGS = {
    "type": "structural_tag",
    "structures": [
        {
            "begin": "<call>",
            "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            "end": "</call>",
        }
    ],
    "triggers": ["<call>"],
}
ONE_TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{3}/x"}, "end": "</n>"},
}
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "guided_json": ({"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}}, r"[1-9][0-9]"),
    "guided_json as text": ({"guided_json": '{"enum": ["x", null]}'}, r'"x"|null'),
    "guided_regex": ({"guided_regex": r"\d{3}-[a-f]+"}, r"\d{3}-[a-f]+"),
    "guided_choice": ({"guided_choice": ["red", "green", "blue-green"]}, r"red|green|blue-green"),
    "guided_grammar": ({"guided_grammar": LARK}, r"[a-z]{2,4}(,[a-z]{2,4})*"),
    "json": (
        {"structured_outputs": {"json": {"type": "array", "items": {"type": "null"}, "maxItems": 2}}},
        r"\[\s*(null(\s*,\s*null)?)?\s*\]",
    ),
    "json that lists its properties": (
        {"guided_json": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}},
        r'\{\s*"a"\s*:\s*1\s*\}',
    ),
    "json without spaces": (
        {
            "structured_outputs": {
                "json": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2},
                "disable_any_whitespace": True,
            }
        },
        r"\[null,null\]",
    ),
    "regex": ({"structured_outputs": {"regex": "(ab)+"}}, r"(ab)+"),
    "choice": ({"structured_outputs": {"choice": ["a", "ab", "abc"]}}, r"a|ab|abc"),
    "grammar in EBNF": ({"structured_outputs": {"grammar": GBNF}}, r"(yes|no) ?[0-9]+\."),
    "structural tag": ({"response_format": ONE_TAG}, r"<n>[0-9]{3}/x</n>"),
    "structural tag as text": ({"structured_outputs": {"structural_tag": json.dumps(ONE_TAG)}}, r"<n>[0-9]{3}/x</n>"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_way_to_say_it(demo: Deployment, name: str) -> None:
    fields, pattern = FIELDS[name]
    choice = ask(demo, seed=1, extra_body=fields, temperature=1.3, max_tokens=300)
    assert choice.finish_reason == "stop" and re.fullmatch(pattern, choice.message.content), choice
    reply = demo.client().completions.create(
        model=MODEL, prompt="The", seed=2, extra_body=fields, temperature=1.3, max_tokens=300
    )
    assert reply.choices[0].finish_reason == "stop" and re.fullmatch(pattern, reply.choices[0].text), reply


def test_text_goes_on_freely_until_a_tag_begins(demo: Deployment) -> None:
    choice = ask(demo, extra_body={"response_format": TAGS}, temperature=0)
    assert choice.message.content == ask(demo, temperature=0).message.content


def test_the_likeliest_answer_that_is_valid_is_the_same_with_its_grammar(demo: Deployment) -> None:
    free = ask(demo, temperature=0).message.content
    held = ask(demo, temperature=0, extra_body={"guided_regex": r"[A-Z][^\x00]*\."})
    assert (held.message.content, held.finish_reason) == (free, "stop")


def test_what_max_tokens_cuts_off_says_so(demo: Deployment) -> None:
    choice = ask(demo, temperature=0, max_tokens=12, extra_body={"guided_json": ENDLESS})
    assert choice.finish_reason == "length" and choice.message.content.startswith("[")


def test_a_stream_and_choices_match_as_well(demo: Deployment) -> None:
    fields = {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}
    stream = demo.client().chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, seed=4, stream=True, extra_body=fields, **HOT
    )
    texts = ["", "", ""]
    reasons: dict[int, str | None] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_logprobs_are_of_what_the_grammar_allows(demo: Deployment) -> None:
    choice = ask(demo, temperature=0, logprobs=True, top_logprobs=5, extra_body={"guided_choice": ["a", "b"]})
    first = choice.logprobs.content[0]
    assert {each.token for each in first.top_logprobs} == {"a", "b"}
    assert sum(2.718281828**each.logprob for each in first.top_logprobs) == pytest.approx(1.0, abs=1e-4)


def test_ends_come_where_the_grammar_accepts(demo: Deployment) -> None:
    digits = {"guided_regex": "[0-9]+"}
    early = ask(demo, temperature=0, max_tokens=40, extra_body={**digits, "min_tokens": 20})
    assert early.finish_reason in ("stop", "length") and len(early.message.content) >= 20
    never = ask(demo, temperature=0, max_tokens=30, extra_body={**digits, "ignore_eos": True})
    assert never.finish_reason == "length" and never.message.content.isdigit()
    over = ask(
        demo, temperature=0, max_tokens=30, extra_body={"guided_choice": ["yes"], "ignore_eos": True, "min_tokens": 25}
    )
    assert (over.message.content, over.finish_reason) == ("yes", "stop")


def test_allowed_tokens_and_bad_words(demo: Deployment) -> None:
    some = demo.client().completions.create(
        model=MODEL,
        prompt="The",
        max_tokens=20,
        temperature=1.5,
        seed=1,
        extra_body={"allowed_token_ids": [70, 71, 72]},
    )
    assert some.usage is not None and some.usage.completion_tokens == 20 and set(some.choices[0].text) <= set("bcd")
    free = ask(demo, temperature=0).message.content
    assert " processes" in free and "server" in free
    without = ask(demo, temperature=0, max_tokens=60, extra_body={"bad_words": ["processes", "server"]}).message.content
    assert without.startswith("Penstock is a") and " processes" not in without and "server" not in without
    nothing = demo.post(
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": "The",
            "guided_choice": ["yes"],
            "allowed_token_ids": [70, 71],
            "max_tokens": 5,
            "temperature": 0,
        },
    )
    assert nothing.status_code == 400 and nothing.json()["error"]["code"] == "nothing_allowed"


ALIKE = {
    "type": "array",
    "items": {"const": 1},
    "minItems": 2,
    "maxItems": 2,
    "uniqueItems": True,
}  # [1, 1] is all that can be enforced
BROKEN = {"path": "$", "message": "uniqueItems does not hold"}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": ALIKE}}
UNIQUE: dict[str, tuple[str, dict[str, Any], str]] = {  # a path, a body, and the field that is named
    "chat": (
        "/v1/chat/completions",
        {"messages": QUESTION, "response_format": FORM},
        "response_format.json_schema.schema",
    ),
    "completion": ("/v1/completions", {"prompt": "Numbers:", "guided_json": ALIKE, "max_tokens": 30}, "guided_json"),
    "response": (
        "/v1/responses",
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": ALIKE}}},
        "text.format.schema",
    ),
    "message": (
        "/v1/messages",
        {"messages": QUESTION, "max_tokens": 30, "output_config": {"format": {"type": "json_schema", "schema": ALIKE}}},
        "output_config.format.schema",
    ),
    "ollama": ("/api/chat", {"messages": QUESTION, "format": ALIKE}, "format"),
}


@pytest.mark.parametrize("name", UNIQUE)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_enforced_is_named_and_an_answer_that_breaks_it_says_so(
    demo: Deployment, name: str, stream: bool
) -> None:
    path, fields, field = UNIQUE[name]
    reply = demo.post(path, {"model": MODEL, "stream": stream, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-penstock-ignored"] == f"{field}: uniqueItems"
    told = [json.loads(found) for found in re.findall(r'"penstock":(\{"schema_errors":\[.*?\]\})', reply.text)]
    assert told == [{"schema_errors": [{"index": 0, **BROKEN}]}]


def test_an_answer_that_keeps_to_what_was_not_enforced_says_nothing(demo: Deployment) -> None:
    schema = {
        "type": "array",
        "prefixItems": [{"const": 1}, {"const": 2}],
        "items": False,
        "minItems": 2,
        "uniqueItems": True,
    }
    reply = demo.post("/v1/chat/completions", {"model": MODEL, "messages": QUESTION, "guided_json": schema})
    assert reply.headers["x-penstock-ignored"] == "guided_json: uniqueItems" and "penstock" not in reply.json()
    assert json.loads(reply.json()["choices"][0]["message"]["content"]) == [1, 2]


WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", None),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
        "response_format.json_schema.schema",
        "invalid_json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format.json_schema.schema",
        "invalid_json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": "yes", "schema": {}}}},
        "response_format.json_schema.strict",
        None,
    ),
    ({"response_format": {"type": "json_object", "extra": 1}}, "response_format.extra", None),
    ({"guided_regex": "["}, "guided_regex", "invalid_grammar"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "invalid_grammar"),
    ({"guided_grammar": "start: <|no_such_token|>"}, "guided_grammar", "invalid_grammar"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "invalid_grammar"),
    ({"guided_choice": []}, "guided_choice", "invalid_grammar"),
    ({"guided_json": "{"}, "guided_json", "invalid_json_schema"),
    (
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        "guided_json",
        "invalid_json_schema",
    ),
    ({"guided_json": {"type": "string"}, "guided_regex": "a"}, "guided_regex", None),
    ({"structured_outputs": {"yaml": {}}}, "structured_outputs.yaml", None),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "invalid_grammar"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", None),
    ({"allowed_token_ids": []}, "allowed_token_ids", None),
    ({"allowed_token_ids": [5000]}, "allowed_token_ids", None),
    ({"bad_words": [""]}, "bad_words", None),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=[str(number) for number in range(len(WRONG))])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_held_to_is_refused_by_name(
    demo: Deployment, fields: dict[str, Any], param: str, code: str | None, stream: bool
) -> None:
    reply = demo.post(
        "/v1/chat/completions", {"model": MODEL, "messages": QUESTION, "max_tokens": 5, "stream": stream, **fields}
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and len(error["message"]) < 700
    assert code is None or error["code"] == code


@pytest.fixture
def helper(demo: Deployment) -> Iterator[psutil.Process]:
    """The gateway's process that checks grammars."""
    ask(demo, max_tokens=1, extra_body={"guided_regex": "a"})
    gateway = psutil.Process(
        next(process.pid for name, process in demo.processes.items() if name.startswith("gateway"))
    )
    [found] = [each for each in gateway.children() if "services.requests.workers.grammars.worker" in each.cmdline()]
    yield found


def is_dead(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_helper_that_is_killed_costs_nobody_a_request(demo: Deployment, helper: psutil.Process) -> None:
    helper.kill()
    wait_until(lambda: is_dead(helper), description="it is dead")
    assert (
        ask(demo, temperature=0, extra_body={"guided_choice": ["never seen before"]}).message.content
        == "never seen before"
    )
