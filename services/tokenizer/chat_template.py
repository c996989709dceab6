"""Messages to text, by the model's own chat template, within bounds of time and memory."""

import json
from typing import Any

from services.tokenizer.template_features import find_parsers, template_with_tools
from services.tokenizer.template_probe import MAX_RENDERED, probe
from shared.model.json_text import read_json
from shared.model.parsing.forms import HARMONY
from shared.process.errors import Invalid, StartupError
from shared.process.helper import HelperProcess, HelperStuck
from shared.process.plain import Unreadable
from shared.process.telemetry import get_logger
from shared.wire.messages import ChatMessage, ChatOptions

log = get_logger("penstock.tokenizer")

WORKER = "services.tokenizer.template_worker"
NUM_TRIES = 2  # a worker that is killed must not cost a request
# The worker's processor time: a machine that is busy is not the template's fault
COMPILE_LIMIT_S = 20.0
RENDER_LIMIT_S = 2.0  # for one conversation; 8 MiB take a tenth of it
QUICK_LIMIT_S = 0.1  # where others wait: a conversation that takes longer is rendered elsewhere
ANSWER_TIMEOUT_S = 60.0  # by the clock, on a machine that is busy; at first the worker imports its modules


class Slow:
    """Stands for the text of a conversation that takes longer than a quick ChatTemplate may."""


SLOW = Slow()


class ChatTemplate:
    """Owns the helper process that renders. A template that does not stop in time is killed."""

    def __init__(self, tokenizer: Any, *, is_quick: bool = False) -> None:
        """tokenizer: of transformers; is_quick: a conversation has QUICK_LIMIT_S, and is Slow
        beyond it.

        Raises StartupError where the tokenizer has several templates and none of them is the
        default.
        """
        try:
            self._template = tokenizer.get_chat_template() if getattr(tokenizer, "chat_template", None) else None
        except ValueError as error:
            raise StartupError(f"the model's chat template can't be chosen: {error}") from None
        self._with_tools = template_with_tools(tokenizer.chat_template, self._template) if self._template else ""
        self._special_tokens = dict(tokenizer.special_tokens_map) if self._template else {}
        self._is_quick = is_quick
        self._helper = HelperProcess(WORKER)
        self._is_compiled = False  # by the helper
        self._problem = ""  # what makes the template unusable for all conversations

    def parsers(self, tool_calls: str, reasoning: str) -> dict[str, str]:
        """How the model writes calls and thoughts: the operator's word, else what the template writes for known
        ones, else find_parsers' words."""
        parsers = find_parsers(self._template, tool_calls, reasoning, self._with_tools)
        asked = {name for name, word in (("tool_calls", tool_calls), ("reasoning", reasoning)) if word == "auto"}
        if self._template is None or not asked or HARMONY in parsers.values():
            return parsers
        if parsers.get("tool_calls") == "pythonic":  # such templates write calls as JSON, but ask the model for Python
            asked.discard("tool_calls")
        for _ in range(NUM_TRIES):
            self.start()
        if not self._is_compiled:
            if not self._problem:
                log.warning(
                    "the chat template could not be tried, so its words alone say how the model writes calls and "
                    "thoughts; --tool-call-parser and --reasoning-parser say it, too",
                    **parsers,
                )
            return parsers
        shown = probe(self._template, self._with_tools, self._render_probe)
        return parsers | {name: form for name, form in shown.items() if name in asked}

    def _render_probe(self, messages: tuple[ChatMessage, ...], options: ChatOptions) -> str | None:
        """Within the longer limit: what is read off a template can't depend on how busy the machine is."""
        text = self._render(messages, options, is_quick=False)
        return text if isinstance(text, str) and len(text) <= MAX_RENDERED else None

    def start(self) -> None:
        """Start the helper and compile the template: one that is broken is found now, and the first
        conversation need not wait."""
        if self._template is None or self._is_compiled or self._problem:
            return
        try:
            compiled = self._ask({"template": self._template, "limit_s": COMPILE_LIMIT_S})
        except (HelperStuck, EOFError, OSError, Unreadable) as error:
            log.warning(
                "the process that renders chat templates did not start", error=str(error) or type(error).__name__
            )
            return
        self._is_compiled = not compiled
        if compiled:
            self._problem = compiled.get("error", f"it takes more than {COMPILE_LIMIT_S:g} s to compile")
            log.error("the model's chat template can't be used, only completions can", problem=self._problem)

    def render(
        self, conversations: list[tuple[ChatMessage, ...]], options: list[ChatOptions] | None = None
    ) -> list[str | Invalid | Slow]:
        """Render each conversation as the model was trained to read it, up to where the assistant
        speaks; or the template's error. An error fails its conversation alone."""
        if self._template is None:
            return [
                Invalid(
                    "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
                )
                for _ in conversations
            ]
        if not conversations:
            return []
        self.start()
        if self._problem:
            reason = f"this model's chat template can't be used ({self._problem}): use /v1/completions"
            return [Invalid(reason, code="chat_template_broken", status=501) for _ in conversations]
        if not self._is_compiled:
            return [_away("does not start") for _ in conversations]
        rendered: list[str | Invalid | Slow] = []
        for messages, each in zip(conversations, options or [ChatOptions()] * len(conversations), strict=True):
            try:
                rendered.append(self._render(messages, each, is_quick=self._is_quick))
            except Exception as error:  # the others of the batch have nothing to do with it
                log.error("a conversation could not be given to the chat template", error=error)
                rendered.append(_refused("the chat template", f"they can't be given to it ({type(error).__name__})"))
        return rendered

    def _render(
        self, messages: tuple[ChatMessage, ...], options: ChatOptions, *, is_quick: bool
    ) -> str | Invalid | Slow:
        name = "the request's chat_template" if options.chat_template else "the model's chat template"
        try:
            tools, documents, kwargs = (
                read_json(text or "null") for text in (options.tools, options.documents, options.template_kwargs)
            )
        except ValueError as error:  # a gateway checks them, but this is whatever was in Redis
            return _refused(name, f"its tools, documents or variables are not JSON: {error}")
        return self._render_within(
            {
                "limit_s": QUICK_LIMIT_S if is_quick else RENDER_LIMIT_S,
                "template": options.chat_template or (self._with_tools if tools else self._template),
                "special_tokens": self._special_tokens,
                "messages": [to_template(message) for message in messages],
                "tools": tools,
                "documents": documents,
                "kwargs": kwargs or {},
                "add_generation_prompt": options.add_generation_prompt,
                "continue_final_message": options.continue_final_message,
            },
            name,
            "chat_template" if options.chat_template else "messages",
            is_quick=is_quick,
        )

    def _render_within(
        self, conversation: dict[str, Any], name: str, param: str, *, is_quick: bool
    ) -> str | Invalid | Slow:
        """Render within the limits of time. name: the template's, for errors; param: the field at fault if
        it takes too long."""
        for _ in range(NUM_TRIES):
            self.start()
            if not self._is_compiled:
                continue
            try:
                rendered = self._ask(conversation)
            except HelperStuck:
                log.warning("chat template timed out", timeout_s=ANSWER_TIMEOUT_S)
                return _away(f"does not answer within {ANSWER_TIMEOUT_S:g} s")
            except (EOFError, OSError, Unreadable):
                log.warning("the process that renders chat templates died, starting another")
                continue
            if "has_run_out" in rendered and is_quick:
                return SLOW
            if "has_run_out" in rendered:
                log.warning("chat template took too long and was stopped", limit_s=RENDER_LIMIT_S)
                return _refused(name, f"it takes more than {RENDER_LIMIT_S:g} s", param)
            return (
                str(rendered["text"])
                if "text" in rendered
                else _refused(name, rendered["error"], rendered.get("param", "messages"))
            )
        return _refused(name, "it ends the process that renders it")

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer. Raises as HelperProcess.ask, apart from TimeoutError."""
        is_compiled, self._is_compiled = self._is_compiled, False
        try:
            answer: dict[str, Any] = self._helper.ask(json.dumps(question).encode(), ANSWER_TIMEOUT_S, ANSWER_TIMEOUT_S)
        except TimeoutError:
            return {"has_run_out": True}
        self._is_compiled = is_compiled  # by a child that goes on
        return answer


def to_template(message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it: of calls, with their arguments as an object where they are
    one."""
    parts = [{"type": "text", "text": part.text} if part.image is None else {"type": "image"} for part in message.parts]
    entry: dict[str, Any] = {"role": message.role, "content": parts or message.content}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        entry |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
        if not (message.content and message.tool_calls):  # gpt-oss' name; its template refuses both before a call
            entry["thinking"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": to_object(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return entry


def to_object(arguments: str) -> Any:
    """The object that the text is JSON of, if it is one; else the text: a model may have written
    anything."""
    try:
        value = read_json(arguments or "{}")
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _refused(name: str, reason: str, param: str = "messages") -> Invalid:
    refused = "messages" if param == "chat_template" else param
    return Invalid(f"{name} refuses these {refused}: {reason}", param=param, code="chat_template_error")


def _away(what: str) -> Invalid:
    """The machine is at fault, so it is worth another try."""
    return Invalid(f"the process that renders chat templates {what}", code="chat_template_unavailable", status=503)
