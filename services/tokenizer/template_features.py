"""Features that a model's chat template shows: how it writes calls and thoughts, and what a
template makes use of. Read off its text; nothing is run: template_probe.py sees more, where a template writes calls."""

import re
from typing import Any

from shared.model.parsing.forms import thought_marks

# The first whose words are all in the template.
TOOL_CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "to=", "functions.")),
    ("kimi_k2", ("<|tool_call_begin|>", "functions")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("gemma", ("<start_function_call>",)),
    ("gemma", ("<|tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<function_call>",)),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", '"name"')),
    ("hermes", ("<tool_call>", "tojson")),
    ("pythonic", ("tools", "[func_name1(params_name1=")),
    ("pythonic", ("tools", "<|python_start|>")),
    ("llama3_json", ("tools", '"parameters"', "<|start_header_id|>")),
    ("llama3_json", ("tools", "<|python_tag|>")),
)
REASONING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "analysis")),
    ("gemma4", ("<|channel>", "thought")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("granite", ("Here is my thought process:", "Here is my response:")),
    ("qwen3", ("<think>", "</think>")),
    ("deepseek_r1", ("</think>",)),
)


def template_with_tools(templates: Any, default: str) -> str:
    """The template of a request with tools, of the tokenizer's named ones (a text: it has one): `tool_use`, as in
    transformers, unless only in the default's form calls can be read."""
    named = templates.get("tool_use") if isinstance(templates, dict) else None
    return named if named and (_calls_of(named) or not _calls_of(default)) else default


def _calls_of(template: str) -> str:
    """The form of calls. A template that does not know of tools is told of them in Hermes' form
    (tool_prompt.py), so its model answers in that."""
    return _first(TOOL_CALLS, template) or ("hermes" if not knows(template, "tools") else "")


def find_parsers(
    template: str | None, tool_calls: str, reasoning: str, with_tools: str | None = None
) -> dict[str, str]:
    """The parsers of the model's answers. tool_calls, reasoning: the operator's word; auto: what the
    template says. with_tools: the template of requests with tools, if it is another."""
    if template is None:
        return {}
    parsers = {
        "tool_calls": _calls_of(with_tools or template) if tool_calls == "auto" else tool_calls,
        "reasoning": _first(REASONING, template) if reasoning == "auto" else reasoning,
    }
    if "harmony" in parsers.values():  # one parser for both
        parsers = dict.fromkeys(parsers, "harmony")
    return {name: parser for name, parser in parsers.items() if parser not in ("", "none")}


def _first(rules: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    return next((name for name, words in rules if all(word in template for word in words)), "")


def knows(template: str, variable: str) -> bool:
    """Whether the template mentions a variable, a field or a role of this name."""
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None


def wants_parts(template: str) -> bool:
    """Whether contents must be lists of parts: the template goes through them, and never asks
    whether one is a text."""
    goes_through = re.search(r"\bin\s+\w+(\[[^\]]*\])?(\.content\b|\[\s*['\"]content['\"]\s*\])", template)
    return goes_through is not None and "is string" not in template


def opened_thought(text: str, reasoning: str, options: Any) -> str:
    """The part of the answer that a rendered conversation holds already, if that is the beginning
    of a thought: the answer is to begin with it.

    options: ChatOptions; without a generation prompt nothing of an answer was said.
    """
    if not reasoning or not options.add_generation_prompt:
        return ""
    marks = thought_marks(reasoning)
    if marks is None:
        return ""
    start, end = marks.starts[0], marks.ends[0]
    stripped = text.rstrip()
    if stripped.endswith(start):
        return start + text[len(stripped) :]
    # DeepSeek's early templates leave even the opening to the model, which leaves it out
    return start + "\n" if reasoning == "deepseek_r1" and not stripped.endswith(end) else ""
