"""The forms of calls and of thoughts, by name; and one that was read off a chat template, which travels as
JSON in place of a name."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import msgspec

from shared.model.parsing.gemma_calls import gemma_calls
from shared.model.parsing.harmony import ANSWER, BETWEEN, THOUGHT
from shared.model.parsing.json_calls import CallForm
from shared.model.parsing.pieces import Parser
from shared.model.parsing.python_calls import PythonForm, PythonicCalls
from shared.model.parsing.reasoning import Marks
from shared.model.parsing.tagged_calls import TaggedForm

HARMONY = "harmony"  # one parser for both
THINK = Marks(("<think>",), ("</think>",))
REASONING: dict[str, Marks] = {
    "deepseek_r1": THINK,
    "qwen3": THINK,
    "granite": Marks(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "mistral": Marks(("[THINK]",), ("[/THINK]",)),
    "gemma4": Marks(("<|channel>thought",), ("<channel|>",)),
    HARMONY: Marks((THOUGHT,), (BETWEEN + ANSWER,)),
}
TEXT_MARKS = ("deepseek_r1", "qwen3", "granite")  # of REASONING, those whose marks are text in every tokenizer

KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DSML = "｜DSML｜"
T = TypeVar("T")
Form = CallForm | TaggedForm | PythonForm
FORMS: dict[str, Form] = {
    "hermes": CallForm(("<tool_call>",), ("</tool_call>",)),
    "llama3_json": CallForm(("<|python_tag|>",), may_be_bare=True),
    "mistral": CallForm(("[TOOL_CALLS]",), has_names_first=True, behind_name="[ARGS]"),
    "granite": CallForm(("<|tool_call|>", "<tool_call>", "<function_call>"), ("</tool_call>",)),
    "qwen3_coder": TaggedForm(
        "<tool_call>",
        "<function=",
        ">",
        "<parameter=",
        (">",),
        "</parameter>",
        "</function>",
        "</tool_call>",
        has_lines=True,
    ),
    "glm45": TaggedForm(
        "<tool_call>",
        "",
        "",
        "<arg_key>",
        ("</arg_key><arg_value>", "</arg_key>\n<arg_value>"),
        "</arg_value>",
        "",
        "</tool_call>",
    ),
    "minimax_m2": TaggedForm(
        "<minimax:tool_call>",
        '<invoke name="',
        '">',
        '<parameter name="',
        ('">',),
        "</parameter>",
        "</invoke>",
        "</minimax:tool_call>",
    ),
    "deepseek_v32": TaggedForm(
        f"<{DSML}function_calls>",
        f'<{DSML}invoke name="',
        '">',
        f'<{DSML}parameter name="',
        ('" string="true">', '" string="false">'),
        f"</{DSML}parameter>",
        f"</{DSML}invoke>",
        f"</{DSML}function_calls>",
    ),
    "deepseek_v31": CallForm(
        (DEEPSEEK_CALLS[0], DEEPSEEK_CALL[0]),
        (DEEPSEEK_CALLS[1],),
        DEEPSEEK_CALL,
        has_names_first=True,
        behind_name="<｜tool▁sep｜>",
    ),
    "deepseek_v3": CallForm(
        (DEEPSEEK_CALLS[0], DEEPSEEK_CALL[0]),
        (DEEPSEEK_CALLS[1],),
        ("```", *DEEPSEEK_CALL),
        has_names_first=True,
        before_name="function<｜tool▁sep｜>",
        behind_name="```json",
    ),
    "kimi_k2": CallForm(
        ("<|tool_calls_section_begin|>", KIMI_CALL[0]),
        ("<|tool_calls_section_end|>",),
        KIMI_CALL,
        has_names_first=True,
        before_name="functions.",
        behind_name="<|tool_call_argument_begin|>",
    ),
    "lfm2": PythonForm("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": PythonForm("<function_calls>", "</function_calls>"),
}
OTHERS: dict[str, Callable[[frozenset[str]], Parser]] = {"pythonic": PythonicCalls, "gemma": gemma_calls}
TOOL_CALLS = (*FORMS, *OTHERS, HARMONY)


MAX_FORM = 4096  # characters of a form's JSON
FORM_DECODER: msgspec.json.Decoder[Form] = msgspec.json.Decoder(Form)
MARKS_DECODER = msgspec.json.Decoder(Marks)


@lru_cache(maxsize=64)
def call_form(name: str) -> Form | None:
    """The form of that name, or that the text is JSON of; None: it is neither, or of another version."""
    return read_form(FORM_DECODER, name) if name.startswith("{") else FORMS.get(name)


@lru_cache(maxsize=64)
def thought_marks(name: str) -> Marks | None:
    """The same of thoughts."""
    return read_form(MARKS_DECODER, name) if name.startswith("{") else REASONING.get(name)


def read_form(decoder: msgspec.json.Decoder[T], text: str) -> T | None:
    try:
        return decoder.decode(text) if len(text) <= MAX_FORM else None
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None


def encode(form: Form | Marks) -> str:
    return msgspec.json.encode(form).decode()


def reads_calls(name: str) -> bool:
    return name in TOOL_CALLS or call_form(name) is not None
