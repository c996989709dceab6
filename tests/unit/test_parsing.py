"""Answers to content and calls: the forms that model families write, as their makers document them."""

import json
from typing import Any

import pytest

from shared.model.parsing.answer import AnswerParser, Parsing
from shared.model.parsing.pieces import Piece, merged

NAMES = ("get_weather", "add", "f")
WEATHER = {"location": "Paris", "unit": "celsius"}
WEATHER_JSON = '{"location": "Paris", "unit": "celsius"}'
CALL = '{"name": "get_weather", "arguments": ' + WEATHER_JSON + "}"
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2.5, null, {"c": "\\"}{"}]}}'
END = "it's <|tool_call_end|> class=1"
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


@pytest.mark.parametrize(
    ("form", "text", "argument"),
    [
        ("lfm2", "<|tool_call_start|>[f(a='''it's <|tool_call_end|> class=1''', from=1)]<|tool_call_end|>", END),
        ("pythonic", "[f(a='''it's <|tool_call_end|> class=1''', from=1)]", END),
        ("pythonic", "[f(a='''it's )] \\''' ''', from=1)]", "it's )] ''' "),
        ("pythonic", '[f(a="""one " and "" and )]""", from=1)]', 'one " and "" and )]'),
        ("pythonic", "[f(a='', from=1)]", ""),
        ("pythonic", "[f(a='''''', from=1)]", ""),
        ("pythonic", "[f(a='''x''' \")]\", from=1)]", "x)]"),
    ],
)
def test_a_text_in_three_quotes_stays_as_it_is(form: str, text: str, argument: str) -> None:
    calls = [("f", {"a": argument, "from": 1})]
    assert read(parse(text, form)) == ("", "", calls)
    for cut in range(1, len(text)):
        assert read(parse(text, form, cuts=(cut,))) == ("", "", calls)
    assert read(parse(text, form, cuts=tuple(range(1, len(text))))) == ("", "", calls)
