"""Conversations with tools, thoughts and documents, through chat templates built like those of the
families; and what a template says of its model.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.tokenizer.answers import describe
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.encoder import Encoder
from services.tokenizer.template_features import find_parsers, opened_thought, template_with_tools
from shared.model.constraint import Constraint
from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid
from shared.wire.messages import ChatMessage, ChatOptions, ContentPart, GenerateRequest, TokenizedRequest, ToolCall
from tests.stages.line_of_stages import FILES, MODEL, text_tokenizer
from tests.stages.test_chat_template import Texts

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = ChatOptions(tools=json.dumps([TOOL]))
ASKED = ChatMessage("user", "1 + 2?")
CALLED = ChatMessage("assistant", "", None, (ToolCall("c1", "add", '{"a": 1, "b": "é"}'),))
ANSWERED = ChatMessage("tool", "3", None, (), "c1")

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% "
    "endif %}"
)
# The call with its arguments as JSON from an object, as text, and as whatever str() makes of them
HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content "
    "}}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": %s}</tool_call>{% endfor %}</>{% endfor %}'
)
TOLD = f"<tools>{json.dumps([TOOL])}</tools><user>1 + 2?</>"
AS_OBJECT, AS_TEXT, AS_TEXT_ADDED = (
    HERMES.replace("%s", how)
    for how in ("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}", "{{ '' + c.function.arguments }}")
)
KNOWS_DEVELOPER = PLAIN + "{# developer #}"


@cache
def chat_template(text: str) -> ChatTemplate:
    """One a text: its worker imports transformers."""
    return ChatTemplate(Texts(text))


@pytest.fixture(scope="module", autouse=True)
def templates() -> Iterator[None]:
    """Their workers end with the module."""
    yield
    chat_template.cache_clear()


def render(template: str, *messages: ChatMessage, **options: Any) -> Any:
    [text] = chat_template(template).render([messages], [ChatOptions(**options)])
    return text


@pytest.mark.parametrize("template", [AS_OBJECT, AS_TEXT, AS_TEXT_ADDED])
def test_calls_reach_a_template_in_the_form_that_it_wants(template: str) -> None:
    text = render(template, ASKED, CALLED, ANSWERED, tools=TOOLS.tools)
    assert f"<tools>{json.dumps([TOOL])}</tools><user>1 + 2?</>" in text
    assert '<assistant><tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call></><tool>3</>' in text


def test_arguments_that_are_no_json_are_told_as_they_are() -> None:
    text = render(AS_TEXT, ChatMessage("assistant", "", None, (ToolCall("c1", "add", '{"a": '),)))
    assert '"arguments": {"a": }' in text


def test_a_template_that_knows_of_no_tools_is_told_in_words() -> None:
    system = ChatMessage("system", "Be brief.")
    text = render(PLAIN, system, ASKED, CALLED, ANSWERED, ANSWERED, tools=TOOLS.tools)
    assert text.startswith("<system>Be brief.\n\nYou may call functions") and json.dumps(TOOL) in text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    answers = "<tool_response>\n3\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert text.endswith(f"</><user>1 + 2?</><assistant>{call}</><user>{answers}</><assistant>")
    assert render(PLAIN, ASKED, tools=TOOLS.tools).startswith("<user>You may call functions")
    assert render(PLAIN, ASKED) == "<user>1 + 2?</><assistant>"


# As Gemma's and Mistral's have it: the first counts all messages, the second neither calls nor what tools answer
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must "
    "alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}</>{% endfor %}"
)
ALTERNATING_WITH_TOOLS = (
    "[AVAILABLE_TOOLS]{{ tools | tojson }}{% set at = namespace(number=0) %}{% for m in messages %}{% if m.role != "
    "'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (at.number % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% "
    "set at.number = at.number + 1 %}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}{% endfor %}</>{% "
    "endfor %}"
)
MORE = ChatMessage("user", "And now?")


def test_what_the_user_says_to_a_tool_s_answer_is_one_turn_with_it() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    answer = "<tool_response>\n3\n</tool_response>"
    for template in (ALTERNATING, PLAIN):
        text = render(template, ASKED, CALLED, ANSWERED, ANSWERED, MORE, CALLED, ANSWERED, add_generation_prompt=False)
        assert text == (
            f"<user>1 + 2?</><assistant>{call}</><user>{answer}\n{answer}\nAnd "
            f"now?</><assistant>{call}</><user>{answer}</>"
        )


def test_a_template_that_wants_turns_to_alternate_gets_them() -> None:
    assert render(ALTERNATING, ASKED, MORE) == "<user>1 + 2?\nAnd now?</>"
    text = render(ALTERNATING_WITH_TOOLS, ASKED, MORE, CALLED, ANSWERED, MORE, tools=TOOLS.tools)
    assert text.endswith("<user>1 + 2?\nAnd now?</><assistant>[TOOL_CALLS]add</><tool>3\nAnd now?</>"), text
    thought = ChatMessage("assistant", "Well.", reasoning="hm")
    assert render(ALTERNATING, ASKED, thought, ChatMessage("assistant", "3")).endswith("<assistant>hmWell.\n3</>")
    parts = ChatMessage("user", "", parts=(ContentPart("Look."),))
    assert (
        render(ALTERNATING, ASKED, parts).count("'text'") == 6
    )  # keys and values of three parts, the middle one a new line
    refused = render(ALTERNATING, CALLED, ASKED)
    assert isinstance(refused, Invalid) and "roles must alternate" in str(refused)
    assert render(PLAIN, ASKED, MORE) == "<user>1 + 2?</><user>And now?</><assistant>"


def test_a_developer_is_a_system_where_the_template_knows_none() -> None:
    said = ChatMessage("developer", "Be brief.")
    assert render(PLAIN, said, ASKED) == "<system>Be brief.</><user>1 + 2?</><assistant>"
    assert render(KNOWS_DEVELOPER, said, ASKED) == "<developer>Be brief.</><user>1 + 2?</><assistant>"
    refusing = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{% "
        "endfor %}"
    )
    refused = render(refusing, said, ASKED)
    assert isinstance(refused, Invalid) and "no system here" in str(refused) and refused.param == "messages"


def test_a_template_has_what_the_request_brings() -> None:
    template = (
        "{{ effort }}{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{% if enable_thinking is false %}!{% "
        "endif %}{{ messages[0].reasoning_content }}"
    )
    thought = ChatMessage("assistant", "", reasoning="hm")
    kwargs = json.dumps({"effort": "low", "enable_thinking": False})
    assert render(template, thought, documents='[{"title": "T"}]', template_kwargs=kwargs) == "low[T]!hm"
    refused = render(PLAIN, ASKED, documents='[{"title": "T"}]')
    assert isinstance(refused, Invalid) and refused.param == "documents"
    assert render(PLAIN, ASKED, chat_template="{{ messages[0].content }}{{ bos_token }}") == "1 + 2?<s>"
    broken = render(PLAIN, ASKED, chat_template="{% for")
    assert isinstance(broken, Invalid) and broken.status == 400
    assert render(PLAIN, ASKED, add_generation_prompt=False) == "<user>1 + 2?</>"
    assert render(
        PLAIN, ASKED, ChatMessage("assistant", "It is "), add_generation_prompt=False, continue_final_message=True
    ).endswith("<assistant>It is ")


TOOL_USE = HERMES.replace("%s", "{{ c.function.arguments | tojson }}")  # as Hermes 2 Pro has beside a plain one


def named_in_the_config(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    templates = [
        {"name": "default", "template": PLAIN},
        {"name": "rag", "template": "rag"},
        {"name": "tool_use", "template": TOOL_USE},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))


def named_in_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    for name, template in (("tool_use", TOOL_USE), ("rag", "rag")):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template)


@pytest.mark.parametrize("put", [named_in_the_config, named_in_files])
def test_a_template_named_tool_use_is_that_of_requests_with_tools(put: Callable[[Path], None], tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FILES.folder / name, tmp_path)
    put(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate(tokenizer)
    [plain, told, choosing_none] = template.render([(ASKED,)] * 3, [ChatOptions(), TOOLS, ChatOptions(documents="[]")])
    messages = [{"role": "user", "content": "1 + 2?"}]
    assert (
        plain
        == choosing_none
        == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == "<user>1 + 2?</><assistant>"
    )
    assert (
        told
        == tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        == TOLD
    )
    assert template.parsers("auto", "auto") == {"tool_calls": "hermes"}
    described = json.loads(describe(tokenizer, MODEL, 1, ()).text)
    assert (described["chat_template"], described["chat_template_tool_use"]) == (PLAIN, TOOL_USE)


def test_a_tool_use_template_whose_calls_can_not_be_read_is_not_taken_for_one_whose_can() -> None:
    unknown = "{{ tools }} in a form of its own"
    assert template_with_tools({"default": PLAIN, "tool_use": unknown}, PLAIN) == PLAIN
    assert template_with_tools({"default": unknown, "tool_use": unknown + "!"}, unknown) == unknown + "!"
    assert (
        template_with_tools({"default": PLAIN, "tool_use": "[TOOL_CALLS]{{ tools }}"}, PLAIN)
        == "[TOOL_CALLS]{{ tools }}"
    )
    assert find_parsers(PLAIN + "<think></think>", "auto", "auto", "[TOOL_CALLS]{{ tools }}") == {
        "tool_calls": "mistral",
        "reasoning": "qwen3",
    }


# The words by which the families' templates are known; the rest of them says nothing here.
SIGNS = [
    (
        '{%- if tools %}…{{ tool | tojson }}…\\n<tool_call>\\n{"name": <function-name>, "arguments": <args>}',
        "hermes",
        "",
    ),
    ("{%- if tools %}…<tool_call> tojson …'<think>' … content.split('</think>')", "hermes", "qwen3"),
    ("… content.split('</think>')[-1] …", "hermes", "deepseek_r1"),
    (
        '{% if tools is not none %}<|start_header_id|>… {"name": function name, "parameters": dictionary',
        "llama3_json",
        "",
    ),
    ('{% if tools %}[func_name1(params_name1=params_value1, …)]<|start_header_id|> "parameters"', "pythonic", ""),
    ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", ""),
    ("[TOOL_CALLS] [THINK] [/THINK]", "mistral", "mistral"),
    ("{{ tools }} <|tool_call_start|>", "lfm2", ""),
    ("{{ tools }} <|tool_call_begin|>functions.", "kimi_k2", ""),
    ("{{ tools }} <｜tool▁calls▁begin｜> </think>", "deepseek_v3", "deepseek_r1"),
    ("{{ tools }}<|tool_call|> Here is my thought process: Here is my response:", "granite", "granite"),
    ("<start_function_declaration>…<start_function_call>call:", "gemma", ""),
    ("<|tool_call>call: <|channel>thought", "gemma", "gemma4"),
    (
        "{%- if tools %}<tools> … <tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1> … "
        '"name"',
        "qwen3_coder",
        "",
    ),
    ('<|start|>assistant<|channel|>analysis<|message|> … to="+"functions.', "harmony", "harmony"),
    ("{{ messages }}", "hermes", ""),
    ("{{ tools }} in a form of its own", "", ""),
]


@pytest.mark.parametrize(("template", "tool_calls", "reasoning"), SIGNS)
def test_the_template_says_how_its_model_writes(template: str, tool_calls: str, reasoning: str) -> None:
    found = find_parsers(template, "auto", "auto")
    assert (found.get("tool_calls", ""), found.get("reasoning", "")) == (tool_calls, reasoning)
    assert find_parsers(template, "none", "none") == {}
    assert find_parsers(template, "mistral", "granite") == {"tool_calls": "mistral", "reasoning": "granite"}


def test_a_model_without_a_template_has_no_parsers() -> None:
    assert find_parsers(None, "hermes", "qwen3") == {}


@pytest.mark.parametrize(
    ("text", "reasoning", "opened"),
    [
        ("<assistant><think>\n", "qwen3", "<think>\n"),
        ("<assistant>", "qwen3", ""),
        ("<assistant><think>\n\n</think>\n\n", "qwen3", ""),
        ("<assistant>", "deepseek_r1", "<think>\n"),
        ("<assistant></think>", "deepseek_r1", ""),
        ("<assistant>[THINK]", "mistral", "[THINK]"),
        ("<assistant><think>\n", "", ""),
        ("<|start|>assistant", "harmony", ""),
    ],
)
def test_a_thought_that_the_template_opened_begins_the_answer(text: str, reasoning: str, opened: str) -> None:
    assert opened_thought(text, reasoning, ChatOptions()) == opened
    assert opened_thought(text, reasoning, ChatOptions(add_generation_prompt=False)) == ""


class Thinking:
    """The demo's tokenizer with another template."""

    def __init__(self, template: str) -> None:
        self.inner = text_tokenizer()
        self.chat_template = template

    def get_chat_template(self) -> str:
        return self.chat_template

    def __call__(self, texts: list[str], **options: Any) -> Any:
        return self.inner(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_what_was_opened_is_echoed_unless_the_answer_must_match_something() -> None:
    encoder = Encoder(Thinking(PLAIN.replace("<assistant>", "<assistant><think>\n") + "{# </think> #}"), FILES)
    assert encoder.parsers == {"tool_calls": "hermes", "reasoning": "qwen3"}
    request = GenerateRequest("r.0", None, MODEL, SamplingParams(max_tokens=1), messages=(ASKED,))
    constrained = GenerateRequest(
        "r.1", None, MODEL, SamplingParams(max_tokens=1), messages=(ASKED,), constraint=Constraint("json_object", "")
    )
    opened, again = encoder.encode([request, constrained], 1024)
    assert isinstance(opened, TokenizedRequest) and opened.echo_text == "<think>\n" and not len(opened.echo_offsets)
    assert isinstance(again, TokenizedRequest) and again.echo_text is None
