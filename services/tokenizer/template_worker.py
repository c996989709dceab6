"""`python -m services.tokenizer.template_worker`: renders chat templates, in a process of its own that
can be killed.

A template is a program that came with the model. transformers runs it sandboxed, so that it touches
nothing; but it may go on for ever, or fill the memory. A question is JSON: a template to compile, or a
conversation with its template. The answer is an object: empty for a template that compiles, the text of
a conversation, or the error, or `has_run_out` if the question's processor time was used up. Where
Python can't interrupt the template within GRACE_S of that, SIGPROF ends the child that renders. The
child is kept from question to question: it has compiled the template.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.tokenizer.template_features import knows, wants_parts
from services.tokenizer.tool_prompt import explain_tools, in_turns, spell_calls
from shared.process.worker import run_worker

MAX_CHARACTERS = 32 << 20  # of a text; a body's text has 32 MiB at most
MEMORY = 1 << 30  # bytes
GRACE_S = 0.5  # of processor time, for what Python can't interrupt


class OutOfTime(BaseException):
    """No template can catch it."""


def answer(question: bytes) -> dict[str, Any]:
    """question: limit_s, template; of a conversation also what `render` reads."""
    asked = json.loads(question)
    try:
        with limited(asked["limit_s"]):
            return render(asked) if "messages" in asked else compile_template(asked["template"])
    except OutOfTime:
        return {"has_run_out": True}
    except Exception as error:  # also around the template's call: it is an error of this conversation
        return {"error": reason_of(error)}


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises OutOfTime after so much processor time, and ends the process when that does not
    help."""
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(*_: object) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    raise OutOfTime


def compile_template(template: str) -> dict[str, str]:
    """{}, or {"error": why no conversation can be rendered}."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:
        return {"error": reason_of(error)}
    return {}


def reason_of(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return str(error) or type(error).__name__


def render(conversation: dict[str, Any]) -> dict[str, str]:
    """{"text": the conversation as the model was trained to read it, up to where the assistant
    speaks}, or {"error": why there is none}.

    conversation: template, special_tokens, messages, tools, documents, kwargs, add_generation_prompt,
    continue_final_message.
    """
    template = conversation["template"]
    messages, tools = _in_terms_of(template, conversation["messages"], conversation["tools"])
    if conversation["documents"] and not knows(template, "documents"):
        return {"error": "it knows of no documents", "param": "documents"}
    options = {
        "documents": conversation["documents"],
        "add_generation_prompt": conversation["add_generation_prompt"],
        "continue_final_message": conversation["continue_final_message"],
        **conversation["special_tokens"],
        **conversation["kwargs"],
    }
    rendered = _with_its_arguments(template, messages, tools, options)
    if "error" in rendered and len(turns := in_turns(messages)) < len(messages):
        alternating = _with_its_arguments(template, turns, tools, options)
        rendered = alternating if "text" in alternating else rendered
    return rendered


def _with_its_arguments(
    template: str, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any]
) -> dict[str, str]:
    """The conversation with the arguments of calls as the template wants them: as objects, or as text."""
    rendered = _render(template, messages, tools, options)
    if _wants_arguments_as_text(rendered, messages):
        spelt = _render(template, [_with_spelt_arguments(message) for message in messages], tools, options)
        rendered = spelt if "text" in spelt else rendered
    return rendered


def _in_terms_of(template: str, messages: list[dict[str, Any]], tools: Any) -> tuple[list[dict[str, Any]], Any]:
    """The messages and the tools without what the template does not know, which plain messages say
    instead."""
    if not knows(template, "developer"):
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
        ]
    if not knows(template, "tool_calls") and not knows(template, "tool"):
        messages = spell_calls(messages)
    if tools and not knows(template, "tools"):
        messages, tools = explain_tools(messages, tools), None
    return ([with_parts(message) for message in messages] if wants_parts(template) else messages), tools


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of one part."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _wants_arguments_as_text(rendered: dict[str, str], messages: list[dict[str, Any]]) -> bool:
    """Whether the template failed on a call's arguments, or printed them as Python does."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    parsed = [call["arguments"] for call in calls if isinstance(call["arguments"], dict)]
    return bool(parsed) and (
        "error" in rendered or any(str(arguments) in rendered["text"] for arguments in parsed if arguments)
    )


def _with_spelt_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _render(
    template: str, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any]
) -> dict[str, str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        [text], _ = render_jinja_template([messages], chat_template=template, tools=tools or None, **options)
    except Exception as error:  # a template raises what it likes
        return {"error": reason_of(error)}
    return {"text": text} if len(text) <= MAX_CHARACTERS else {"error": f"it makes a text of {len(text)} characters"}


def main() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would import it for nothing
    _render("", [{}], None, {})  # imports modules, while the tokenizer still loads
    run_worker(answer, MEMORY, is_kept=True)


if __name__ == "__main__":
    main()
