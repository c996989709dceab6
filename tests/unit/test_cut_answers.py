"""However an answer is cut, the same comes out; nothing is lost, and nothing takes time squared."""

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
from shared.model.parsing.pieces import Piece
from shared.model.parsing.tagged_calls import TaggedForm
from tests.examples import examples
from tests.unit.test_parsing import ADD, CALL, FORMS, parse, read

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
        "[f(a='''",
        "''')]",
        '"""',
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


@pytest.mark.parametrize(
    ("form", "text", "cut"),
    [
        ("gemma", "<|tool_call>call:f{a:[" + '<|"|>x<|"|>,' * 2000, 8),
        ("lfm2", "<|tool_call_start|>[f(a='" + "x" * 50_000, 8),
        ("lfm2", "<|tool_call_start|>" + "\\'" * 30_000, 60_000),
        ("pythonic", "[f(a='''" + "'x\\" * 20_000, 8),
    ],
)
def test_a_long_block_takes_no_time_squared(form: str, text: str, cut: int) -> None:
    started = time.process_time()
    assert {piece.kind for piece in parse(text, form, cuts=tuple(range(cut, len(text), cut)))} == {"content"}
    assert time.process_time() - started < 3.0
