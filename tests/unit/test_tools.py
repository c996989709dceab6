"""tools and tool_choice: what is told, what is demanded, and what is refused by name."""

import json
from typing import Any, get_args

import orjson
import pytest
from msgspec.structs import replace

from services.requests.bodies.parse import parse
from services.requests.dialects.openai.schemas import ChatCompletionBody
from services.requests.prepare import after_thought
from services.requests.text.schemas.prepare import closed
from shared.model.constraint import Constraint
from shared.model.files import DEMO_MODEL
from shared.model.grammar import Vocabulary, compile_grammar, load_vocabulary
from shared.model.parsing.answer import FORCED, AnswerParser
from shared.model.parsing.forms import REASONING, TOOL_CALLS
from shared.process.errors import Invalid
from shared.process.stage_settings import ReasoningParser, ToolCallParser
from shared.wire.messages import ChatMessage, ToolCall


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
GUIDANCE = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
}
ADD, LOOK = tool("add", parameters=SCHEMA), tool("look", description="Looks.")


def read(**body: Any) -> ChatCompletionBody:
    return parse(
        ChatCompletionBody, orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body})
    )


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "mode", "told", "callable_"),
    [
        (None, "auto", 2, ["add", "look"]),
        ("auto", "auto", 2, ["add", "look"]),
        ("none", "none", 0, []),
        ("required", "required", 2, ["add", "look"]),
        (named("look"), "named", 2, ["look"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("add")]}},
            "required",
            2,
            ["add"],
        ),
    ],
)
def test_the_choice_says_who_may_be_called(choice: Any, mode: str, told: int, callable_: list[str]) -> None:
    calling = read(tools=[ADD, LOOK], tool_choice=choice).calling()
    assert (
        calling.mode == mode
        and len(calling.tools) == told
        and [each.function.name for each in calling.callable] == callable_
    )
    assert json.loads(calling.tools_json or "[]") == [ADD, LOOK][:told]


def test_xml_calls_are_read_with_the_parameters_that_are_texts() -> None:
    """A value of any other type is read as JSON."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": True}}
    calling = read(tools=[tool("forecast", parameters=schema), tool("look")]).calling()
    assert list(calling.parsing("qwen3_coder", "").texts) == ["forecast.city"]
    assert list(calling.parsing("hermes", "").texts) == []


def test_what_has_to_be_called_is_a_constraint() -> None:
    assert read(tools=[ADD]).calling().forced() is None
    one = read(tools=[ADD, LOOK], tool_choice=named("add")).calling()
    constraint = one.forced()
    assert (
        constraint is not None
        and constraint.kind == "structural_tag"
        and json.loads(constraint.text)["format"]["content"]
        == {
            "type": "json_schema",
            "json_schema": SCHEMA | GUIDANCE,
            "function": "add",
            "param": "tools[0].function.parameters",
        }
    )
    assert (
        one.parsing("hermes", "qwen3").tool_calls == "arguments" and one.parsing("hermes", "qwen3").reasoning == "qwen3"
    )
    assert one.parsing("hermes", "qwen3", may_think=False).reasoning == ""
    nothing = read(tools=[LOOK], tool_choice=named("look")).calling().forced()
    assert nothing is not None
    assert (
        json.loads(nothing.text)["format"]["content"]["json_schema"]
        == {"type": "object", "properties": {}, "additionalProperties": False} | GUIDANCE
    )
    many = read(tools=[ADD, LOOK], tool_choice="required", parallel_tool_calls=False).calling()
    assert many.parsing("hermes", "").max_calls == 1 and many.parsing("hermes", "").tool_calls == "calls"
    grammar = many.forced()
    assert grammar is not None and grammar.kind == "structural_tag"
    form = json.loads(grammar.text)["format"]
    assert (form["begin"], form["end"], form["content"]["max_tags"]) == ("[", "]", 1)
    assert [each["begin"] for each in form["content"]["tags"]] == [
        '{"name": "add", "parameters": ',
        '{"name": "look", "parameters": ',
    ]


STRICT = tool("add", parameters=SCHEMA, strict=True)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(DEMO_MODEL, 2048, (1,))


def matches(constraint: Constraint | None, text: str, vocabulary: Vocabulary) -> bool:
    assert constraint is not None
    matcher = compile_grammar(constraint, vocabulary)
    tokens = vocabulary.tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": ', "}\n</tool_call>"),
        ("granite", '<|tool_call|>[{"name": "add", "arguments": ', "}]"),
        ("granite", '<|tool_call|>[{"name": "look", "arguments": {}}, {"name": "add", "arguments": ', "}]"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": ', "}]"),
        ("mistral", "[TOOL_CALLS]add[ARGS]", ""),
    ],
)
def test_calls_of_strict_functions_match_from_their_marker_on(
    form: str, before: str, after: str, vocabulary: Vocabulary
) -> None:
    offered = read(tools=[STRICT, LOOK]).calling().offered(form)
    right, wrong, unknown = '{"a": 1}', '{"a": "x"}', before.replace("add", "other")
    assert matches(offered, "No call.", vocabulary) and matches(offered, f"I add. {before}{right}{after}", vocabulary)
    assert matches(offered, f"{before}{right}{after}\n{before}{right}{after}", vocabulary)
    assert not matches(offered, f"{before}{wrong}{after}", vocabulary) and not matches(
        offered, f"{unknown}{right}{after}", vocabulary
    )
    parser = AnswerParser(read(tools=[STRICT, LOOK]).calling().parsing(form, ""))
    assert [piece.text for piece in [*parser.feed(f"{before}{right}{after}"), *parser.finish()]][-2:] == ["add", right]


def test_only_strict_functions_are_held_to_and_only_where_a_marker_says_so() -> None:
    calling = read(tools=[STRICT, LOOK]).calling()
    assert [calling.offered(form) for form in ("llama3_json", "pythonic", "gemma", "qwen3_coder", "")] == [None] * 5
    assert read(tools=[ADD, LOOK]).calling().offered("hermes") is None
    assert read(tools=[STRICT], tool_choice="none").calling().offered("hermes") is None


@pytest.mark.parametrize("choice", ["required", named("add")])
def test_a_thought_may_stand_before_what_must_match(choice: Any, vocabulary: Vocabulary) -> None:
    forced = read(tools=[STRICT], tool_choice=choice).calling().forced()
    assert forced is not None
    right = '{"a": 1}' if choice != "required" else '[{"name": "add", "parameters": {"a": 1}}]'
    closed_yet = replace(forced, thought_begin="<think>", thought_end="</think>")
    open_already = replace(closed_yet, thought_begin="")
    for text in (right, f"<think>\nHm: {{}} <tool_call>\n</think>\n\n{right}", f"<think></think>{right}"):
        assert matches(closed_yet, text, vocabulary)
        assert matches(open_already, text.removeprefix("<think>"), vocabulary) == (text != right)
    for text in (
        "<think>Hm.",
        f"Hm.</think>{right}",
        f"<think>Hm.{right}",
        "<think></think>7",
        f"<think></think>{right}<think>",
    ):
        assert not matches(closed_yet, text, vocabulary)


def test_in_harmony_a_header_stands_before_what_must_match(vocabulary: Vocabulary) -> None:
    calling = read(tools=[STRICT], tool_choice=named("add")).calling()
    forced = calling.forced()
    assert forced is not None
    thought, answer, right = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
        '{"a": 1}',
    )
    thinking, plain = (after_thought(forced, "harmony", may_think=may_think) for may_think in (True, False))
    thinking = replace(
        thinking, thought_end=thinking.thought_end.replace("<|end|>", "<|fin|>")
    )  # the demo model's <|end|> ends answers
    as_text = thought.replace("<|end|>", "<|fin|>")
    assert matches(thinking, as_text + answer + right, vocabulary) and matches(plain, answer + right, vocabulary)
    assert not matches(thinking, as_text + right, vocabulary)
    for text in (f"Some text{answer}{right}", f"{answer}Some text{right}", f"{answer}{answer}{right}", "Some text"):
        assert not matches(plain, text, vocabulary)
    for may_think, text in ((True, thought + answer + right), (False, answer + right)):
        parser = AnswerParser(calling.parsing("harmony", "harmony", may_think=may_think))
        assert [piece.text for piece in [*parser.feed(text), *parser.finish()] if piece.kind != "reasoning"] == [
            "add",
            right,
        ]


def test_arguments_that_a_schema_does_not_name_are_not_made_up() -> None:
    inner = {"type": "object", "properties": {"x": True}}
    schema = {
        "properties": {
            "a": inner,
            "b": {"items": inner},
            "c": {"allOf": [inner], "properties": {}},
            "d": {**inner, "additionalProperties": True},
        }
    }
    shut = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "properties": {**schema["properties"], "a": shut, "b": {"items": shut}},
        "additionalProperties": False,
    }
    for more in (
        {"required": ["y"]},
        {"required": [["x"]]},
        {"required": True},
        {"minProperties": 2},
        {"properties": [1]},
    ):  # which ask for others, or are no schemas
        assert closed(inner | more) == inner | more
    deep = inner
    for _ in range(2000):
        deep = {"items": deep}
    assert closed(deep)["items"] is not None


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
        ({"tools": [ADD], "tool_choice": named("other")}, "tool_choice", "not among the tools"),
        ({"tools": [ADD, ADD]}, "tools", "two functions named add"),
        ({"tools": [ADD], "tool_choice": "maybe"}, "tool_choice", "none.*auto.*required"),
        ({"tools": [ADD], "tool_choice": 7}, "tool_choice", "expected none, auto, required"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "there are none"),
        ({"tools": [{"type": 3}]}, "tools[0].type", "function"),
        ({"tools": [tool("no spaces")]}, "tools[0].function.name", "pattern"),
        ({"tools": [ADD] * 129}, "tools", "at most 128"),
        ({"functions": [ADD["function"]], "tools": [ADD]}, "functions", "older name"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "can't set"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not allowed here"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ],
)
def test_what_can_not_be_is_refused_by_name(body: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(Invalid, match=word) as error:
        parsed = read(**body)
        parsed.chat_options(parsed.calling(), may_bring_template=False)
    assert error.value.param == param


def test_all_that_is_wrong_is_named() -> None:
    with pytest.raises(Invalid) as error:
        read(temperature="hot", n=0, mirostat=1, ebnf="2", messages=[{"role": "user"}])
    assert error.value.code == "unknown_parameter" and error.value.param == "mirostat"
    for words in (
        "field: mirostat",
        "field: ebnf",
        "temperature: ",
        "n: ",
        "missing required parameter: messages[0].content",
    ):
        assert words in str(error.value)
    with pytest.raises(Invalid) as missing:
        parse(ChatCompletionBody, b'{"model": "m"}')
    assert (missing.value.code, missing.value.param) == ("missing_required_parameter", "messages")
    with pytest.raises(Invalid) as many:
        parse(ChatCompletionBody, orjson.dumps({f"field{number}": 1 for number in range(100_000)}))
    assert len(str(many.value)) < 1000


def test_an_answer_comes_back_with_its_calls_and_thoughts() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "refusal": None,
        "annotations": [],
        "reasoning_content": "Hm.",
        "audio": None,
    }
    answered = {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "2", "cache_control": {"type": "ephemeral"}}],
    }
    broken = {**call, "index": 0, "function": {"name": "add", "arguments": '{"a": '}}
    messages = [
        message.to_wire() for message in read(messages=[said, answered, {**said, "tool_calls": [broken]}]).messages
    ]
    assert messages == [
        ChatMessage("assistant", "", None, (ToolCall("call_1", "add", '{"a": 1}'),), None, "Hm."),
        ChatMessage("tool", "2", None, (), "call_1"),
        ChatMessage("assistant", "", None, (ToolCall("call_1", "add", '{"a": '),), None, "Hm."),
    ]
    with pytest.raises(Invalid, match=r"only an assistant calls functions"):
        read(messages=[{**said, "role": "user"}])
    for kind, words in (
        ("video_url", "video can't be understood"),
        ("input_audio", "audio can't"),
        ("thing", "only parts of type text"),
    ):
        with pytest.raises(Invalid, match=words) as error:
            read(
                messages=[
                    {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "data:"}}]}
                ]
            )
        assert error.value.param == "messages[0].content[1].type"


def test_the_template_is_told_what_the_request_says() -> None:
    body = read(
        reasoning_effort="none",
        verbosity="low",
        chat_template_kwargs={"thinking": True, "x": None},
        documents=[{"title": "T"}],
        continue_final_message=True,
    )
    options = body.chat_options(body.calling(), may_bring_template=False)
    assert json.loads(options.template_kwargs) == {
        "reasoning_effort": "none",
        "verbosity": "low",
        "enable_thinking": False,
        "thinking": True,
        "x": None,
    }
    assert json.loads(options.documents) == [{"title": "T"}]
    assert (options.add_generation_prompt, options.continue_final_message) == (False, True)
    assert (
        read(chat_template="{{ 1 }}").chat_options(read().calling(), may_bring_template=True).chat_template == "{{ 1 }}"
    )


def test_the_salt_is_of_the_key_too() -> None:
    salts = {
        read(**fields).intent().requests[0].scheduling.cache_salt
        for fields in ({}, {"cache_salt": "a"}, {"prompt_cache_key": "a"}, {"cache_salt": "a", "prompt_cache_key": "a"})
    }
    assert len(salts) == 4


def test_what_an_operator_can_choose_is_what_there_is() -> None:
    assert set(get_args(ToolCallParser)) == {"auto", "none", *TOOL_CALLS}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING}
    assert not set(FORCED) & set(TOOL_CALLS)
