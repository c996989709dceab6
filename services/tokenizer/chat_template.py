"""Messages to text, by the model's own chat template, within bounds of time and memory."""

import json
import select
import signal
import subprocess
import sys
import weakref
from typing import Any

from services.tokenizer.template_features import find_parsers, template_with_tools
from services.tokenizer.template_worker import frame_of, read_frame
from shared.model.json_text import read_json
from shared.process.errors import Invalid, StartupError
from shared.process.telemetry import get_logger
from shared.wire.messages import ChatMessage, ChatOptions

log = get_logger("penstock.tokenizer")

# Of the worker's processor time: what the machine does meanwhile is not the template's fault
COMPILE_LIMIT_S = 20.0
RENDER_LIMIT_S = 2.0  # for one conversation; 8 MiB take a tenth of it
QUICK_LIMIT_S = 0.1  # where others wait: a conversation that takes longer is rendered elsewhere
# by the clock, on a machine that is busy; at the start, the worker imports what it needs
ANSWER_TIMEOUT_S = 60.0


class Slow:
    """Stands for the text of a conversation that takes longer than a quick ChatTemplate may."""


SLOW = Slow()


class ChatTemplate:
    """Owns the worker that renders. One that does not stop in time is killed, and another is
    started."""

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
        self._worker: _Worker | None = None
        self._problem = ""  # what makes the template unusable, whatever is said

    def parsers(self, tool_calls: str, reasoning: str) -> dict[str, str]:
        """How the model writes calls and thoughts: find_parsers' words."""
        return find_parsers(self._template, tool_calls, reasoning, self._with_tools)

    def start(self) -> None:
        """Start the worker, which compiles the template: one that is broken is found now, and the
        first conversation need not wait."""
        if self._template is None or self._worker is not None or self._problem:
            return
        worker = _Worker(self._template, self._special_tokens)
        try:
            compiled = worker.begin()
        except TimeoutError:
            log.warning("the worker that renders chat templates did not start", timeout_s=ANSWER_TIMEOUT_S)
            return
        if compiled is not None and "error" not in compiled:
            self._worker = worker
        elif compiled is not None or worker.has_run_out:
            self._problem = compiled["error"] if compiled is not None else f"it takes more than {COMPILE_LIMIT_S:g} s to compile"
            log.error("the model's chat template can't be used, only completions can", problem=self._problem)

    def render(self, conversations: list[tuple[ChatMessage, ...]], options: list[ChatOptions] | None = None) -> list[str | Invalid | Slow]:
        """Render each conversation as the model was trained to read it, up to where the assistant
        speaks; or the template's word against it.

        Whatever goes wrong is about this conversation (or a broken template), and fails this request
        alone.
        """
        if self._template is None:
            return [Invalid("this model has no chat template: use /v1/completions", param="messages", code="no_chat_template") for _ in conversations]
        if not conversations:
            return []
        self.start()
        if self._problem:
            reason = f"this model's chat template can't be used ({self._problem}): use /v1/completions"
            return [Invalid(reason, code="chat_template_broken", status=501) for _ in conversations]
        if self._worker is None:
            return [_away("does not start") for _ in conversations]
        rendered: list[str | Invalid | Slow] = []
        for messages, each in zip(conversations, options or [ChatOptions()] * len(conversations), strict=True):
            try:
                rendered.append(self._render(messages, each))
            except Exception as error:  # the others of the batch have nothing to do with it
                log.error("a conversation could not be given to the chat template", error=error)
                rendered.append(_refused("the chat template", f"they can't be given to it ({type(error).__name__})"))
        return rendered

    def _render(self, messages: tuple[ChatMessage, ...], options: ChatOptions) -> str | Invalid | Slow:
        name = "the request's chat_template" if options.chat_template else "the model's chat template"
        try:
            tools, documents, kwargs = (read_json(text or "null") for text in (options.tools, options.documents, options.template_kwargs))
        except ValueError as error:  # a gateway checks them, but this is whatever was in Redis
            return _refused(name, f"its tools, documents or variables are not JSON: {error}")
        conversation = frame_of({
            "limit_s": QUICK_LIMIT_S if self._is_quick else RENDER_LIMIT_S,
            "messages": [to_template(message) for message in messages],
            "tools": tools,
            "documents": documents,
            "kwargs": kwargs or {},
            "chat_template": options.chat_template or (self._with_tools if tools and self._with_tools != self._template else ""),
            "add_generation_prompt": options.add_generation_prompt,
            "continue_final_message": options.continue_final_message,
        })  # fmt: skip
        for _ in range(2):  # if a worker was killed, no request fails
            self.start()
            worker, self._worker = self._worker, None
            if worker is None:
                continue
            try:
                rendered = worker.ask(conversation)
            except TimeoutError:
                log.warning("chat template timed out", timeout_s=ANSWER_TIMEOUT_S)
                return _away(f"does not answer within {ANSWER_TIMEOUT_S:g} s")
            if rendered is not None:
                self._worker = worker
            has_run_out = worker.has_run_out if rendered is None else rendered.get("has_run_out", False)
            if has_run_out and self._is_quick:
                return SLOW
            if has_run_out:
                log.warning("chat template took too long and was stopped", limit_s=RENDER_LIMIT_S)
                return _refused(name, f"it takes more than {RENDER_LIMIT_S:g} s", "chat_template" if options.chat_template else "messages")
            if rendered is not None:
                return str(rendered["text"]) if "text" in rendered else _refused(name, rendered["error"], rendered.get("param", "messages"))
            log.warning("the worker that renders chat templates died, starting another")
        return _refused(name, "it ends the process that renders it")


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
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": to_object(call.arguments)}} for call in message.tool_calls
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


class _Worker:
    """The process, which ends when this object does."""

    def __init__(self, template: str, special_tokens: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "services.tokenizer.template_worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._stop = weakref.finalize(self, _end, self._process)
        self._first = frame_of((template, special_tokens, COMPILE_LIMIT_S))

    def begin(self) -> dict[str, Any] | None:
        """Start the worker and return what it says of the template, as `ask`."""
        return self.ask(self._first)

    def ask(self, frame: bytes) -> dict[str, Any] | None:
        """Ask the worker and return its answer; None if it has ended instead. Raises TimeoutError,
        having ended it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        answer: dict[str, Any] | None = None
        has_come = True
        try:
            self._process.stdin.write(frame)
            self._process.stdin.flush()
            has_come = bool(select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)[0])
            answer = read_frame(self._process.stdout) if has_come else None
        except (OSError, json.JSONDecodeError):  # it died, in the middle of something
            answer = None
        if answer is None:
            self._stop()
        if not has_come:
            raise TimeoutError
        return answer

    @property
    def has_run_out(self) -> bool:
        """Whether it ended because its processor time was used up."""
        return self._process.returncode == -signal.SIGPROF


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill it, wait for it, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:  # what was still to be written has no reader any more
                continue


def _refused(name: str, reason: str, param: str = "messages") -> Invalid:
    refused = "messages" if param == "chat_template" else param
    return Invalid(f"{name} refuses these {refused}: {reason}", param=param, code="chat_template_error")


def _away(what: str) -> Invalid:
    """The machine is at fault, so it is worth another try."""
    return Invalid(f"the process that renders chat templates {what}", code="chat_template_unavailable", status=503)
