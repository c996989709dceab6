"""The forms of calls and thoughts, read off templates of the families' shapes, and off such as no family has."""

import json
from typing import Any

import pytest

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.template_probe import ASKED, CALL_IDS, CALLS, WITH_TOOLS, as_message, form_of_calls
from shared.model.parsing.answer import AnswerParser, Parsing
from shared.model.parsing.forms import FORMS, Form, call_form, encode, reads_calls, thought_marks
from shared.model.parsing.json_calls import CALL_ID, CallForm
from shared.model.parsing.reasoning import Marks
from shared.model.parsing.tagged_calls import TaggedForm
from shared.wire.messages import ChatMessage
from tests.stages.test_chat_template import Texts

HEAD = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
TAIL = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
JSON = "{{ c.function.arguments | tojson }}"


def template(calls: str, call: str, calls_end: str = "", thought: str = THOUGHT) -> str:
    """calls, call, calls_end: before all calls, each one, and behind all."""
    loop = f"{{% for c in m.tool_calls %}}{call}{{% endfor %}}"
    return f"{HEAD}{thought}{{{{ m.content }}}}{{% if m.tool_calls %}}{calls}{loop}{calls_end}{{% endif %}}{TAIL}"


def with_arguments(one: str) -> str:
    """one: an argument, of its name k and its value v."""
    return f"{{% for k, v in c.function.arguments.items() %}}{one}{{% endfor %}}"


HERMES = '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": ' + JSON + "}\n</tool_call>"
GLM = (
    "\n<tool_call>{{ c.function.name }}"
    + with_arguments("\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>")
    + "\n</tool_call>"
)
CODER = (
    "\n<tool_call>\n<function={{ c.function.name }}>"
    + with_arguments("\n<parameter={{ k }}>\n{{ v }}\n</parameter>")
    + "\n</function>\n</tool_call>"
)
INVOKE = (
    '<invoke name="{{ c.function.name }}">\n'
    + with_arguments('<parameter name="{{ k }}">{{ v }}</parameter>\n')
    + "</invoke>\n"
)
KIMI = "<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>" + JSON
DEEPSEEK = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n" + JSON + "\n```<｜tool▁call▁end｜>"
)
PYTHON = (
    "{{ c.function.name }}("
    + with_arguments("{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}")
    + "){% if not loop.last %}, {% endif %}"
)
GEMMA = (
    "<|tool_call>call:{{ c.function.name }}{"
    + with_arguments(
        '{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v }}{% endif %}{% if not loop.last %},{% endif %}'
    )
    + "}<tool_call|>"
)
MISTRAL = "[TOOL_CALLS]{{ c.function.name }}[ARGS]" + JSON
NAMED: list[tuple[str, str]] = [
    (template("", HERMES), "hermes"),
    (template("", GLM), "glm45"),
    (template("", CODER), "qwen3_coder"),
    (template("\n<minimax:tool_call>\n", INVOKE, "</minimax:tool_call>"), "minimax_m2"),
    (template("<|tool_calls_section_begin|>", KIMI + "<|tool_call_end|>", "<|tool_calls_section_end|>"), "kimi_k2"),
    (template("<｜tool▁calls▁begin｜>", DEEPSEEK, "<｜tool▁calls▁end｜>"), "deepseek_v3"),
    (template("<|tool_call_start|>[", PYTHON, "]<|tool_call_end|>"), "lfm2"),
    (template("", GEMMA), "gemma"),
    (template("", MISTRAL), "mistral"),
]
BOX = CODER.replace("tool_call", "seed:box").replace("\n{{ v }}\n", "{{ v }}")
STEP = "<|call|>{{ c.id }}<|name|>{{ c.function.name }}<|args|>" + JSON + "<|done|>"
LISTED = '{"tool_name": "{{ c.function.name }}", "parameters": ' + JSON + "}{% if not loop.last %}, {% endif %}"
UNNAMED = [
    template("", BOX),
    template("<steps>", INVOKE.replace("invoke", "step"), "</steps>"),
    template("<|calls|>", STEP, "<|calls_end|>"),
    template("<|START_ACTION|>[", LISTED, "]<|END_ACTION|>"),
    template("", "<function={{ c.function.name }}>" + JSON + "</function>"),
    template("<TOOLS>[", LISTED.replace("tool_name", "name").replace("parameters", "arguments"), "]</TOOLS>"),
]


def parsers_of(text: str) -> dict[str, str]:
    return ChatTemplate(Texts(text)).parsers("auto", "auto")


@pytest.mark.parametrize(("text", "form"), NAMED, ids=[form for _, form in NAMED])
def test_a_form_that_has_a_name_is_recognised(text: str, form: str) -> None:
    assert parsers_of(text) == {"tool_calls": form, "reasoning": "qwen3"}


def read(form: str, text: str, cut: int) -> list[Any]:
    """The calls of a text that comes in parts of so many characters."""
    parser = AnswerParser(Parsing("", form, [name for name, _ in CALLS]))
    pieces = [piece for at in range(0, len(text), cut) for piece in parser.feed(text[at : at + cut])] + parser.finish()
    calls: list[Any] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
        else:
            calls.append(piece.text)
    return [call if isinstance(call, str) else (call[0], json.loads(call[1])) for call in calls]


@pytest.mark.parametrize("text", UNNAMED)
def test_a_form_that_has_no_name_is_read_off_the_template(text: str) -> None:
    form = parsers_of(text)["tool_calls"]
    assert form not in FORMS and call_form(form) is not None
    called = ChatMessage("assistant", "I look.", None, tuple(map(as_message, CALL_IDS, CALLS)))
    [rendered] = ChatTemplate(Texts(text)).render([(ASKED, called)], [WITH_TOOLS])
    assert isinstance(rendered, str)
    answer = rendered.rpartition("<|assistant|>")[2].removesuffix("<|end|>")
    for cut in (1, 3, len(answer)):
        assert [item for item in read(form, answer, cut) if not isinstance(item, str)] == CALLS
        assert "".join(item for item in read(form, answer, cut) if isinstance(item, str)) == "I look."


def test_a_thought_between_marks_without_a_name() -> None:
    thought = "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>\n{% endif %}"
    marks = thought_marks(parsers_of(template("", HERMES, thought=thought))["reasoning"])
    assert marks is not None and (marks.starts, marks.ends) == (("<seed:think>",), ("</seed:think>",))


def test_words_are_asked_where_a_template_drops_calls_and_thoughts() -> None:
    dropping = HEAD + "{{ m.content.split('</think>')[-1] }}" + TAIL + "{# tool_calls [TOOL_CALLS] reasoning #}"
    assert parsers_of(dropping) == {"tool_calls": "mistral", "reasoning": "deepseek_r1"}
    refusing = "{{ raise_exception('no') }}" + dropping
    assert parsers_of(refusing) == {"tool_calls": "mistral", "reasoning": "deepseek_r1"}


@pytest.mark.parametrize(
    "turn",
    [
        "get_zebra" + '{"a":' * 100_000,
        "<tool_call>" + "{" * 4000 + "get_zebra",
        '<tool_call>{"name": "get_zebra", "arguments": {"kappa": "violet", "lambda": 42',
        "<" + "x" * 1000 + '>get_zebra{"kappa": "violet", "lambda": 42}',
        f'<q>{CALL_IDS[0]}a{CALL_IDS[0]}<w>get_zebra{{"kappa": "violet", "lambda": 42}}',
    ],
    ids=["deep", "open", "cut off", "long", "identifiers"],
)
def test_a_turn_that_no_form_can_come_of(turn: str) -> None:
    assert form_of_calls(turn, 1) == ""


@pytest.mark.parametrize(
    "form",
    [
        CallForm(("",)),
        CallForm(("<q>",), ("",)),
        CallForm(("<q>",), between=("",)),
        CallForm(("<q>",), has_names_first=True, before_name=2 * f"{CALL_ID}a"),
        CallForm(tuple(f"<{number}>" for number in range(1000))),
        TaggedForm("", "", "", "<k>", ("=",), ";", "", "<e>"),
        TaggedForm("<s>", "", "", "<k>", (), ";", "", "<e>"),
    ],
)
def test_a_form_of_another_version_that_would_not_end_is_none(form: Form) -> None:
    assert call_form(encode(form)) is None and not reads_calls(encode(form))
    assert thought_marks(encode(Marks(("",), ("</t>",)))) is None


def test_a_template_that_takes_long_is_read_as_any_other() -> None:
    """Else replicas on busy machines would know other forms than the rest."""
    slow = "{% for i in range(400) %}{% for j in range(1000) %}{% endfor %}{% endfor %}" + template("", HERMES)
    assert ChatTemplate(Texts(slow), is_quick=True).parsers("auto", "auto") == {
        "tool_calls": "hermes",
        "reasoning": "qwen3",
    }


def test_the_operators_word_stands() -> None:
    text = template("", HERMES)
    assert ChatTemplate(Texts(text)).parsers("granite", "auto") == {"tool_calls": "granite", "reasoning": "qwen3"}
    assert ChatTemplate(Texts(text)).parsers("auto", "none") == {"tool_calls": "hermes"}
