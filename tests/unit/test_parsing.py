"""Answers to reasoning, content and calls: the forms that model families write, as their makers
document them; and however a text is cut, the same.
"""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model.parsing.answer import FORCED, AnswerParser, Parsing
from shared.model.parsing.forms import REASONING, TOOL_CALLS, encode
from shared.model.parsing.json_calls import CallForm
from shared.model.parsing.json_scanner import JsonScanner
from shared.model.parsing.pieces import Piece, merged
from shared.model.parsing.tagged_calls import TaggedForm
from tests.examples import examples

NAMES = ("get_weather", "add", "f")
WEATHER = {"location": "Paris", "unit": "celsius"}
WEATHER_JSON = '{"location": "Paris", "unit": "celsius"}'
CALL = '{"name": "get_weather", "arguments": ' + WEATHER_JSON + "}"
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2.5, null, {"c": "\\"}{"}]}}'
ADDED = {"a": 1, "b": [2.5, None, {"c": '"}{'}]}

Answer = tuple[str, str, list[tuple[str, Any]]]  # reasoning, content, calls


def parse(
    text: str, tool_calls: str = "", reasoning: str = "", cuts: tuple[int, ...] = (), max_calls: int = 0
) -> list[Piece]:
    parser = AnswerParser(
        Parsing(reasoning, tool_calls, NAMES, max_calls, ("get_weather.location", "get_weather.unit"))
    )
    pieces: list[Piece] = []
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        pieces += parser.feed(text[begin:end])
    return merged(pieces + parser.finish())


def read(pieces: list[Piece]) -> Answer:
    """The answer that a client puts together."""
    thoughts, content = (
        "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("reasoning", "content")
    )
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
    return thoughts, content, [(name, json.loads(arguments)) for name, arguments in calls]


FORMS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("get_weather", WEATHER)]),
    (
        "hermes",
        f"Look.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>\n",
        "Look.",
        [("get_weather", WEATHER), ("add", ADDED)],
    ),
    ("hermes", f"<tool_call>\n{CALL}\n{ADD}", "", [("get_weather", WEATHER), ("add", ADDED)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call> done', "done", [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "add", "parameters": {}}}</tool_call>',
        "",
        [("add", {})],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "two\nlines\tand a tab"}}</tool_call>',
        "",
        [("f", {"x": "two\nlines\tand a tab"})],
    ),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}',
        "",
        [("add", {"a": 1})],
    ),
    (
        "llama3_json",
        '{"name": "add", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}',
        "",
        [("add", {"a": 1}), ("f", {})],
    ),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {ADD}]", "", [("get_weather", WEATHER), ("add", ADDED)]),
    (
        "mistral",
        f"Well. [TOOL_CALLS]get_weather[ARGS]{WEATHER_JSON}[TOOL_CALLS]f{{}}",
        "Well.",
        [("get_weather", WEATHER), ("f", {})],
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{WEATHER_JSON}", "", [("get_weather", WEATHER)]),
    ("granite", f"<|tool_call|>[{CALL}, {ADD}]", "", [("get_weather", WEATHER), ("add", ADDED)]),
    ("granite", f"<tool_call>[{CALL}]", "", [("get_weather", WEATHER)]),
    ("granite", f"<function_call> {CALL}\n<function_call> {ADD}", "", [("get_weather", WEATHER), ("add", ADDED)]),
    (
        "pythonic",
        "[get_weather(location='Paris', unit=\"celsius\"), add(a=-1, b=[2.5, None, {'c': true}])]",
        "",
        [("get_weather", WEATHER), ("add", {"a": -1, "b": [2.5, None, {"c": True}]})],
    ),
    (
        "qwen3_coder",
        'I look.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2.5, null, {"c": '
        '"\\"}{"}]\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "I look.",
        [("add", ADDED), ("f", {})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=location>\n12\n</parameter>\n<parameter=unit>\ntwo\n</tool_call>"
        "\n\n</parameter>\n</function>"
        "\n</tool_call>",
        "",
        [("get_weather", {"location": "12", "unit": "two\n</tool_call>\n"})],
    ),
    (
        "glm45",
        "Look.\n<tool_call>get_weather\n<arg_key>location</arg_key>\n<arg_value>12</arg_value>\n<arg_key>unit</arg_key>\n"
        "<arg_value>two\n</tool_call> </arg_value>\n</tool_call>\n<tool_call>f</tool_call>",
        "Look.",
        [("get_weather", {"location": "12", "unit": "two\n</tool_call> "}), ("f", {})],
    ),
    (
        "glm45",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
        '<arg_value>[2.5, null, {"c": "\\"}{"}]</arg_value></tool_call>',
        "",
        [("add", ADDED)],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="location">Paris</parameter>\n'
        '<parameter name="unit">celsius</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        "",
        [("get_weather", WEATHER), ("f", {})],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "",
        [("add", {"a": 1, "b": "x"})],
    ),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{WEATHER_JSON}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>So.",
        "So.",
        [("get_weather", WEATHER), ("f", {})],
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{WEATHER_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("get_weather", WEATHER), ("f", {})],
    ),
    (
        "kimi_k2",
        "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{WEATHER_JSON}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "Well.",
        [("get_weather", WEATHER), ("f", {})],
    ),
    (
        "lfm2",
        'I look.<|tool_call_start|>[get_weather(location=\'Paris\', unit="celsius"), f(from="<|tool_call_end|>")]'
        "<|tool_call_end|> So.",
        "I look.So.",
        [("get_weather", WEATHER), ("f", {"from": "<|tool_call_end|>"})],
    ),
    (
        "olmo3",
        "<function_calls>\nadd(a=1)\nf(x='two\\nlines')\n</function_calls>",
        "",
        [("add", {"a": 1}), ("f", {"x": "two\nlines"})],
    ),
    ("pythonic", "<|python_start|>[f()]<|python_end|> So.", "So.", [("f", {})]),
    ("pythonic", '[f(class="x", b="from = 1")]', "", [("f", {"class": "x", "b": "from = 1"})]),
    (
        "gemma",
        "<start_function_call>call:get_weather{location:<escape>Paris<escape>,unit:<escape>celsius<escape>}<end_function_call>",
        "",
        [("get_weather", WEATHER)],
    ),
    (
        "gemma",
        'Yes. <|tool_call>call:add{a:1,b:[2.5,null,{c:<|"|>}<tool_call|>{<|"|>}]}<tool_call|><|tool_call>call:f{}<tool_call|>',  # noqa: E501
        "Yes.",
        [("add", {"a": 1, "b": [2.5, None, {"c": "}<tool_call|>{"}]}), ("f", {})],
    ),
    (
        "calls",
        '[{"name": "add", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]',
        "",
        [("add", {"a": 1}), ("f", {})],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), FORMS)
def test_a_family_s_calls_are_found(form: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert read(parse(text, form)) == ("", content, calls)
    assert read(parse(text, form, max_calls=1))[2] == calls[:1]


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
HARMONY: list[tuple[str, Answer]] = [
    (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Yes.<|return|>", ("Hm.", "Yes.", [])),
    (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Yes.", ("Hm.", "Yes.", [])),
    ("<|channel|>final<|message|>Yes.<|return|>", ("", "Yes.", [])),
    (f"{THOUGHT}<|start|>assistant{THOUGHT}", ("Hm.\nHm.", "", [])),
    (
        f"{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{WEATHER_JSON}<|call|>",
        ("Hm.", "", [("get_weather", WEATHER)]),
    ),
    (
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|> {WEATHER_JSON} <|call|>",
        ("", "", [("get_weather", WEATHER)]),
    ),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.f<|message|>{{}}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{WEATHER_JSON}",
        ("", "I look.", [("f", {}), ("get_weather", WEATHER)]),
    ),
    ("<|channel|>commentary to=functions.nobody<|message|>{}<|call|>", ("", "{}", [])),
    ("<|channel|>analysis to=python<|message|>print(1)<|call|>", ("print(1)", "", [])),
    (
        '<|channel|>commentary to=functions.f<|message|>{"code": "print(\'<|start|>assistant<|end|>\')"}<|call|>',
        ("", "", [("f", {"code": "print('<|start|>assistant<|end|>')"})]),
    ),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", ("", "", [("f", {})])),
    ("<|channel|>commentary to=functions.f<|message|>{}<|call|>\n", ("", "", [("f", {})])),
    ("<|channel|>commentary to=functions.f<|message|>not JSON<|call|>", ("", "not JSON", [])),
    (
        "Write `<|channel|>` then text, and `<|message|>` after.",
        ("", "Write `<|channel|>` then text, and `<|message|>` after.", []),
    ),
    ("<|start|>user<|message|>Hm.", ("", "<|start|>user<|message|>Hm.", [])),
    ("<|channel|>commentary to=functions.f<|message|>{} and more<|call|>", ("", "and more", [("f", {})])),
    ("Plain text.", ("", "Plain text.", [])),
    ("  ", ("", "  ", [])),
    ("<|channel|>analysis", ("", "", [])),
    (f"{THOUGHT}<|start|>assistant<|channel|>fin", ("Hm.", "", [])),
    (f"{THOUGHT}<|start|>", ("Hm.", "", [])),
    ("<|channel|>final" + "x" * 600 + "<|message|>y", ("", "<|channel|>final" + "x" * 600 + "<|message|>y", [])),
    (f"{THOUGHT}{{}}", ("Hm.", "{}", [])),
]


@pytest.mark.parametrize(("text", "answer"), HARMONY)
def test_harmony(text: str, answer: Answer) -> None:
    assert read(parse(text, "harmony", "harmony")) == answer
    assert read(parse(text, "harmony", "harmony", tuple(range(1, len(text))))) == answer
    assert [piece.kind for piece in parse(text, "", "harmony")] == [
        piece.kind for piece in parse(text, "harmony", "harmony")
    ]


def test_a_long_answer_in_harmony_takes_no_time_squared() -> None:
    text = "<|end|>" * 100_000
    started = time.process_time()
    assert parse(text, "harmony", "harmony") == []
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    ("form", "text", "cut"),
    [
        ("gemma", "<|tool_call>call:f{a:[" + '<|"|>x<|"|>,' * 2000, 8),
        ("lfm2", "<|tool_call_start|>[f(a='" + "x" * 50_000, 8),
        ("lfm2", "<|tool_call_start|>" + "\\'" * 30_000, 60_000),
    ],
)
def test_a_long_block_takes_no_time_squared(form: str, text: str, cut: int) -> None:
    started = time.process_time()
    assert {piece.kind for piece in parse(text, form, cuts=tuple(range(cut, len(text), cut)))} == {"content"}
    assert time.process_time() - started < 3.0


def test_harmony_s_forced_calls_are_in_its_last_message() -> None:
    text = f'{THOUGHT}<|start|>assistant<|channel|>final<|message|>[{{"name": "add", "parameters": {{"a": 1}}}}]'
    assert read(parse(text, "calls", "harmony")) == ("Hm.", "", [("add", {"a": 1})])
    parser = AnswerParser(Parsing("harmony", "harmony", NAMES))
    parser.feed("<|channel|>analysis<|message|>H")
    assert parser.is_reasoning and parser.feed("<|end|>") == [] and not parser.is_reasoning


def test_harmony_s_calls_in_an_answer_that_must_not_call_are_content() -> None:
    text = f"<|channel|>commentary to=functions.get_weather<|message|>{WEATHER_JSON}<|call|>"
    parser = AnswerParser(Parsing("harmony"))
    assert merged(parser.feed(text) + parser.finish()) == [Piece("content", WEATHER_JSON)]


BROKEN = [
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {"x": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": 7}</tool_call> and on'),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "a < b, and <tool_cal> is no marker; nor is </tool_call>"),
    ("hermes", "<tool_call>\n"),
    ("hermes", '<tool_call>{"name": "add", "argum'),
    ("llama3_json", '{"answer": 42, "name": 7} is an object'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", 'Prose. {"name": "add", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]nobody{}"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("granite", "<|tool_call|>[]"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[add(1, 2)]"),
    ("pythonic", "[add(a=open('x'))]"),
    ("pythonic", "[add(a=1"),
    ("pythonic", "[nobody(a=1)]"),
    ("pythonic", "[add(a=1), nobody()]"),
    ("pythonic", "[add(**b)]"),
    ("pythonic", "[add(a=" + "[" * 3000),
    ("gemma", "<start_function_call>call:add{a:<escape>x}<end_function_call>"),
    ("gemma", "<start_function_call>call:add{a:1<end_function_call>"),
    ("gemma", "<|tool_call>call:nobody{}<tool_call|> ok"),
    ("qwen3_coder", "<tool_call>\n<function=nobody>\n</function>\n</tool_call> ok"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nno parameter\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call> no function </tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1"),
    ("glm45", "<tool_call>nobody\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call> ok"),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1</minimax:tool_call>'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.nobody:0<|tool_call_argument_begin|>{}"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a='<|tool_call_end|>"),
    ("olmo3", "<function_calls>print</function_calls> on"),
    ("olmo3", "<function_calls>import os\nf(a=1)</function_calls>"),
    ("of a later version", "<tool_call>{}</tool_call>"),
    ("gemma", "<start_function_call>call:add{a:" + "[" * 200),
]


@pytest.mark.parametrize(("form", "text"), BROKEN)
def test_what_is_no_call_is_content_as_it_stands(form: str, text: str) -> None:
    assert "".join(piece.text for piece in parse(text, form)) == text
    assert {piece.kind for piece in parse(text, form)} == {"content"}


def test_a_call_that_stops_being_json_keeps_what_was_said_and_the_rest_is_content() -> None:
    pieces = parse('<tool_call>{"name": "add", "arguments": {"a": 1, "b": tru}}</tool_call> sorry', "hermes")
    assert pieces == [
        Piece("call", "add"),
        Piece("arguments", '{"a": 1, "b": '),
        Piece("content", "tru}}</tool_call> sorry"),
    ]
    assert parse('<tool_call>{"name": "add", "arguments": {"a": 12', "hermes") == [
        Piece("call", "add"),
        Piece("arguments", '{"a": 12'),
    ]


def test_arguments_go_out_as_they_come() -> None:
    parser = AnswerParser(Parsing("", "hermes", NAMES))
    assert parser.feed("<tool_call>") == []
    assert parser.feed('{"name": "add", "arguments": ') == []
    assert parser.feed('{"a') == [Piece("call", "add"), Piece("arguments", '{"a')]
    assert parser.feed('": "x') == [Piece("arguments", '": "x')]
    assert parser.feed("\\") == []
    assert parser.feed("u00e9") == [Piece("arguments", "\\u00e9")]
    assert parser.feed('"}') == [Piece("arguments", '"}')]
    assert parser.feed("}</tool_call>") == parser.finish() == []


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "content"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("deepseek_r1", "<think>\n<think>\nHm. </thin </think>Yes. <think>", "Hm. </thin", "Yes. <think>"),
        ("qwen3", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("qwen3", "No thought. <think>", "", "No thought. <think>"),
        ("qwen3", "<think>cut off <", "cut off <", ""),
        ("qwen3", " <thi", "", " <thi"),
        ("granite", "Here is my thought process: Hm.\nHere is my response: Yes.", "Hm.", "Yes."),
        ("mistral", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
        ("gemma4", "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    ],
)
def test_reasoning_is_told_from_the_answer(parser: str, text: str, reasoning: str, content: str) -> None:
    assert read(parse(text, "", parser)) == (reasoning, content, [])


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    text = f"<think>I might <tool_call>{CALL}</tool_call> it.</think>\n<tool_call>{ADD}</tool_call>"
    assert read(parse(text, "hermes", "qwen3")) == (f"I might <tool_call>{CALL}</tool_call> it.", "", [("add", ADDED)])


@pytest.mark.parametrize(("form", "content"), [("calls", ""), ("llama3_json", '{"name": "ad')])
def test_a_list_of_calls_that_is_cut_off_ends_with_its_last_whole_one(form: str, content: str) -> None:
    """Where calls alone may be written, nothing of the next is content; elsewhere it is, without
    the comma before it.
    """
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "ad'
    assert read(parse(text, form)) == ("", content, [("add", {"a": 1})])


def test_a_forced_call_is_its_arguments() -> None:
    parser = AnswerParser(Parsing("", "arguments", ("add",)))
    assert parser.feed(" ") == []
    assert parser.feed(' {"a"') == [Piece("call", "add"), Piece("arguments", '{"a"')]
    assert parser.feed(": 1}") == [Piece("arguments", ": 1}")]


def test_a_text_in_three_quotes_stays_as_it_is() -> None:
    text = "<|tool_call_start|>f(a='''it's <|tool_call_end|> class=1''', from=1)<|tool_call_end|>"
    calls = [("f", {"a": "it's <|tool_call_end|> class=1", "from": 1})]
    assert read(parse(text, "lfm2")) == read(parse(text, "lfm2", cuts=tuple(range(len(text))))) == ("", "", calls)


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|tool_call|>",
        "<function_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[ARGS]",
        "<start_function_call>",
    ),
    *(
        "<end_function_call>",
        "<|tool_call>",
        "<tool_call|>",
        "<|python_start|>",
        "<|python_end|>",
        "<think>",
        "</think>",
        "[THINK]",
    ),
    *(
        "<|start|>",
        "assistant",
        "<|channel|>",
        "analysis",
        "final",
        "to=functions.add",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|constrain|>json",
    ),
    *(
        "Here is my thought process:",
        "Here is my response:",
        "<|channel>thought",
        "<channel|>",
        CALL,
        ADD,
        '{"name": "f", "arguments": {}}',
    ),
    *(
        '{"name": "unknown", "arguments": {"x": "<tool_call>',
        '"}}',
        "[f(a=1)]",
        "[add(a='x\\'', b={'c': [1]})",
        "call:f{a:<escape>x<escape>}",
    ),
    *(
        "<function=f>",
        "<parameter=x>",
        "</parameter>",
        "</function>",
        "<arg_key>a</arg_key>",
        "<arg_value>1</arg_value>",
        "<tool_call>f\n",
    ),
    *(
        '<minimax:tool_call><invoke name="f">',
        '<parameter name="x">',
        "</invoke>",
        "</minimax:tool_call>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}",
        "```<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
        "<|tool_call_end|>",
        "<|tool_call_start|>",
        "<function_calls>",
        "</function_calls>",
    ),
    *('call:add{a:<|"|>x<|"|>,b:[1]}', '"<tool_call>"', "f", "add", "1.5", "true", "é", *'{}[]"\\ \n,;:-<'),
]
OF_A_TEMPLATE = (  # forms that have no name
    encode(TaggedForm("<tool_call>", "", ":", "<arg_key>", ("=",), ";", "</invoke>", "</function_calls>")),
    encode(
        CallForm(("<think>", "[ARGS]"), ("</think>",), ("[ARGS]", "```"), has_names_first=True, before_name="\x00f")
    ),
)
TEXTS = st.lists(
    st.one_of(st.sampled_from(PIECES), st.sampled_from([text for _, text, _, _ in FORMS]), st.text(max_size=4)),
    max_size=8,
).map("".join)


@examples(400)
@given(
    text=TEXTS,
    form=st.sampled_from(["", *TOOL_CALLS, *FORCED, *OF_A_TEMPLATE]),
    reasoning=st.sampled_from(["", *REASONING]),
    data=st.data(),
    max_calls=st.sampled_from([0, 0, 1]),
)
def test_however_a_text_is_cut_the_same_comes_out(
    text: str, form: str, reasoning: str, data: Any, max_calls: int
) -> None:
    whole = parse(text, form, reasoning, max_calls=max_calls)
    by_character = parse(text, form, reasoning, tuple(range(1, len(text))), max_calls)
    assert by_character == whole
    if len(text) > 1:
        cuts = tuple(sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=6))))
        assert parse(text, form, reasoning, cuts, max_calls) == whole


@examples(200)
@given(
    text=TEXTS, form=st.sampled_from([name for name in TOOL_CALLS if name != "harmony"])
)  # which has headers for other messages, too
def test_without_a_call_nothing_of_a_text_is_lost(text: str, form: str) -> None:
    pieces = parse(text, form)
    if not any(piece.kind == "call" for piece in pieces):
        assert "".join(piece.text for piece in pieces) == text


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(
    value=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON_VALUES),
    indent=st.sampled_from([None, 2]),
    is_ascii=st.booleans(),
)
def test_the_scanner_takes_all_of_json(value: Any, indent: int | None, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    scanner = JsonScanner()
    assert scanner.feed(text + "}") == len(text) and scanner.is_done
    assert scanner.take() == text
    for form in ("hermes", "mistral", "granite"):
        marker = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "granite": "<|tool_call|>"}[form]
        assert read(parse(marker + '{"name": "f", "arguments": ' + text + "}", form))[2] == [("f", value)]


@pytest.mark.parametrize("end", ["}", ""], ids=["whole", "cut off"])
def test_a_long_number_is_an_argument_in_one_piece(end: str) -> None:
    """A grammar sets digits no bound, so a forced call may have hundreds."""
    arguments = '{"a": ' + "12" * 500 + end
    text = '[{"name": "add", "parameters": ' + arguments
    parser = AnswerParser(Parsing("", "calls", ("add",)))
    pieces = [piece for at in range(0, len(text), 7) for piece in parser.feed(text[at : at + 7])] + parser.finish()
    assert pieces[0] == Piece("call", "add") and {piece.kind for piece in pieces[1:]} == {"arguments"}
    assert "".join(piece.text for piece in pieces[1:]) == arguments


@settings(deadline=None)
@given(text=st.text(st.sampled_from('{}[]":,\\ue1-+.0tfn \n'), max_size=12))
def test_the_scanner_takes_nothing_but_json(text: str) -> None:
    scanner = JsonScanner()
    end = scanner.feed("{" + text)
    try:
        _, right = json.JSONDecoder(strict=False).raw_decode("{" + text)
    except ValueError:
        assert not scanner.is_done
    else:
        assert scanner.is_done and end == right
