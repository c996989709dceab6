"""Answers to thoughts and what follows them: Harmony's messages, and marks around a thought."""

import time

import pytest

from shared.model.parsing.answer import AnswerParser, Parsing
from shared.model.parsing.pieces import Piece, merged
from tests.unit.test_parsing import ADD, ADDED, CALL, NAMES, WEATHER, WEATHER_JSON, Answer, parse, read

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
