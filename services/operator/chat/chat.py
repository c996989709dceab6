"""The chat itself: questions from the keyboard, or one from the command line or a pipe."""

import base64
import re
import signal
import sys
import time
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from services.operator.chat.conversation import ChatHistory
from services.operator.chat.display import Display, clean, make_display, on_interrupt, quiet_keyboard
from services.operator.chat.prompt import NEWLINE_KEYS, Prompt, to_utf8
from services.operator.chat.server import ChatError, ReportedUsage, ServedModel, Server
from shared.process.errors import StartupError

MAX_QUESTION_BYTES = 8 << 20  # of a pipe
MAX_IMAGE_BYTES = 20 << 20  # as the server's
IMAGE_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}  # by how their files begin
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)  # a path such as /etc/hosts is the beginning of a question

HELP = f"""\
/system [TEXT]   show the system prompt, or set it (/system none takes it away)
/model [NAME]    list the models, or go on with another
/image FILE      send an image with the next question, to a model that sees
/regenerate      answer the last question again
/save FILE       write the conversation: Markdown, or messages to a .json
/reset           forget what was said; the system prompt stays
/help, /exit
Enter sends; {NEWLINE_KEYS} begins a new line; what is pasted stays one question.
Ctrl-C stops an answer, Ctrl-D ends the chat."""

COMMANDS = ("help", "reset", "system", "model", "image", "regenerate", "save", "exit", "quit")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    url: str
    model: str | None = None
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    images: tuple[str, ...] = ()  # files that go with the first question


@dataclass(slots=True)
class ChatAnswer:
    """An answer as far as it came."""

    text: str = ""
    usage: ReportedUsage | None = None
    finish_reason: str = ""
    seconds: float = 0.0
    ttft_s: float | None = None

    @property
    def figures(self) -> str:
        """A line with what the answer cost; empty if the server did not count."""
        if self.usage is None or self.ttft_s is None:
            return ""
        parts = [f"{self.usage.num_output_tokens:,} tokens"]
        decoding_s = self.seconds - self.ttft_s
        if self.usage.num_output_tokens > 1 and decoding_s > 0:
            parts.append(f"{(self.usage.num_output_tokens - 1) / decoding_s:,.1f} tokens/s")
        return " · ".join([*parts, f"TTFT {self.ttft_s:.2f} s"])


class Chat:
    """One conversation with one server."""

    def __init__(self, server: Server, options: ChatSettings, display: Display) -> None:
        """Raises StartupError without a server, or a model there."""
        self.server = server
        self.options = options
        self.display = display
        self.conversation = ChatHistory(options.system)
        self.images = tuple(read_image(path) for path in options.images)  # of the next question
        self.models = {model.name: model for model in server.models()}
        self.model = self.find_model(options.model) if options.model else self.first_model()

    def first_model(self) -> ServedModel:
        if not self.models:
            raise StartupError(f"{self.server.url} serves no model at the moment: see penstock status")
        return next(iter(self.models.values()))

    def find_model(self, name: str) -> ServedModel:
        """Raises StartupError for a name that the server does not serve; one that isn't Penstock
        may serve more than it lists.
        """
        if name in self.models or not self.server.is_penstock:
            return self.models.get(name, ServedModel(name))
        close = get_close_matches(name, self.models, 1)
        served = f"did you mean {close[0]}?" if close else f"it serves {', '.join(self.models) or 'none at the moment'}"
        raise StartupError(f"no model {name!r} at {self.server.url}: {served}")

    def ask(self, question: str) -> ChatAnswer | None:
        """Show the answer as it comes, and remember it. None if there was none; the display shows why."""
        if limit := self.model.max_model_len:
            self._say_dropped(self.conversation.trim(question, limit))
        answer, images = ChatAnswer(), self.images
        is_stopped = False
        try:
            with quiet_keyboard(), on_interrupt(signal.default_int_handler):
                self._receive(question, answer)
        except KeyboardInterrupt:
            is_stopped = True
        except ChatError as error:
            self.display.end()
            self.display.notice(f"error: {error}")
            if not answer.text:
                return None
        self.display.end()
        if answer.finish_reason == "length":
            self.display.notice("cut off: the answer has reached --max-tokens, or the end of the model's context")
        if is_stopped:
            self.display.notice("stopped")
        if answer.text or not is_stopped:
            self.conversation.add(
                question,
                answer.text,
                answer.usage.num_prompt_tokens + answer.usage.num_output_tokens if answer.usage else 0,
                images,
            )
            self.images = ()
        return answer

    def _receive(self, question: str, answer: ChatAnswer) -> None:
        """The whole answer; with fewer of the oldest turns, while the server says that all are too
        many. Raises ChatError.
        """
        while True:
            try:
                self._stream(question, answer)
                return
            except ChatError as error:
                if not error.is_context_full or answer.text or not self.conversation.turns:
                    raise
                del self.conversation.turns[0]
                self._say_dropped(1)

    def _stream(self, question: str, answer: ChatAnswer) -> None:
        body: dict[str, Any] = {"model": self.model.name, "messages": self.conversation.messages(question, self.images)}
        body |= {
            name: value
            for name in ("temperature", "max_tokens", "seed")
            if (value := getattr(self.options, name)) is not None
        }
        started_at = time.monotonic()
        for piece in self.server.answer(body):
            now = time.monotonic() - started_at
            if piece.notice:
                self.display.passing(piece.notice)
            if (piece.text or piece.reasoning) and answer.ttft_s is None:
                answer.ttft_s = now
            if piece.reasoning:
                self.display.reasoning(piece.reasoning)
            if piece.text:
                answer.text += piece.text
                self.display.text(piece.text)
            if not piece.usage:
                answer.seconds = now
            answer.finish_reason = piece.finish_reason or answer.finish_reason
            answer.usage = piece.usage or answer.usage

    def _say_dropped(self, count: int) -> None:
        if count:
            self.display.notice(
                f"the context is full: forgot the oldest {'turn' if count == 1 else f'{count} turns'} of this chat"
            )

    def command(self, name: str, argument: str) -> bool:
        """Carry a command out. Returns whether the chat goes on."""
        match name:
            case "exit" | "quit":
                return False
            case "help":
                self.say(HELP)
            case "reset":
                self.conversation.turns.clear()
                self.say("forgotten")
            case "system":
                self.set_system(argument)
            case "model":
                self.set_model(argument)
            case "save":
                self.save(argument)
            case "image":
                self.add_image(argument)
            case "regenerate":
                self.regenerate()
            case _:
                close = get_close_matches(name, COMMANDS, 1)
                self.say(f"no command /{name}: {f'did you mean /{close[0]}?' if close else '/help lists them'}")
        return True

    def set_system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "none" else text
        self.say(f"system prompt: {self.conversation.system or 'none'}")

    def set_model(self, name: str) -> None:
        try:
            self.models = {model.name: model for model in self.server.models()}
            if name:
                self.model = self.find_model(name)
        except StartupError as error:
            self.say(f"error: {error}")
            return
        self.say(
            "\n".join(f"{'*' if each == self.model.name else ' '} {each}" for each in self.models)
            if not name
            else f"now with {self.model.name}"
        )

    def add_image(self, path: str) -> None:
        try:
            self.images += (read_image(path),) if path else ()
        except StartupError as error:
            self.say(f"error: {error}")
            return
        self.say(
            f"{len(self.images)} image{'s' * (len(self.images) != 1)} with the next question"
            if path
            else "/image FILE: which one?"
        )

    def save(self, path: str) -> None:
        if not path:
            self.say("/save FILE: where to?")
            return
        try:
            self.conversation.save(Path(path).expanduser(), self.model.name)
        except (OSError, ValueError, RuntimeError) as error:
            self.say(f"error: {path}: {error.strerror if isinstance(error, OSError) and error.strerror else error}")
            return
        self.say(f"written to {path}")

    def regenerate(self) -> None:
        if not self.conversation.turns:
            self.say("there is no answer yet")
            return
        last = self.conversation.turns.pop()
        self.images = last.images
        answer = self.ask(last.question)
        if answer is None:
            self.conversation.turns.append(last)
        else:
            self.show_figures(answer)

    def show_figures(self, answer: ChatAnswer) -> None:
        if answer.figures:
            self.display.notice(answer.figures)

    def say(self, text: str) -> None:
        sys.stdout.write(clean(text) + "\n")
        sys.stdout.flush()


def chat(options: ChatSettings, question: str) -> int:
    """Until Ctrl-D; with a question, or with standard input that is no terminal, one answer.
    Returns the exit code. Raises StartupError.
    """
    is_interactive = sys.stdin.isatty() and not question
    question = question if is_interactive else whole_question(question)
    server = Server(options.url)
    try:
        one = Chat(server, options, make_display())
        if is_interactive:
            # between two answers Ctrl-C is the prompt's, which reads keys; as a signal it would end the chat
            with on_interrupt(signal.SIG_IGN):
                converse(one)
            return 0
        answer = one.ask(question)
        return 0 if answer is not None and answer.finish_reason else 1
    finally:
        server.close()


def read_image(path: str) -> str:
    """The image in a file as a data URL. Raises StartupError."""
    file = Path(path).expanduser()
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= MAX_IMAGE_BYTES else b""
    except (OSError, RuntimeError) as error:
        raise StartupError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if size > MAX_IMAGE_BYTES:
        raise StartupError(f"{path}: an image has at most {MAX_IMAGE_BYTES >> 20} MiB")
    kind = next((kind for start, kind in IMAGE_TYPES.items() if data.startswith(start)), None)
    if kind is None:
        raise StartupError(f"{path}: no PNG, JPEG, WebP or GIF")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def whole_question(question: str) -> str:
    """The question of the command line, and below it what standard input holds. Raises StartupError
    if that is nothing, or too much.
    """
    piped = "" if sys.stdin.isatty() else sys.stdin.buffer.read(MAX_QUESTION_BYTES + 1).decode("utf-8", "replace")
    if len(piped) > MAX_QUESTION_BYTES:
        raise StartupError(f"standard input holds more than a question can: {MAX_QUESTION_BYTES >> 20} MiB")
    whole = "\n\n".join(part for part in (to_utf8(question).strip(), piped.strip()) if part)
    if not whole:
        raise StartupError("there is no question: neither as an argument nor on standard input")
    return whole


def converse(one: Chat) -> None:
    """Questions and commands in turn."""
    prompt = Prompt([f"/{name}" for name in COMMANDS])
    one.say(f"{one.model.name} at {one.server.url}\n/help lists the commands, Ctrl-D ends the chat")
    while True:
        one.say("")
        try:
            typed = prompt.ask()
        except KeyboardInterrupt:
            one.say("Ctrl-D or /exit ends the chat")
            continue
        if typed is None:
            return
        if not typed.strip():
            continue
        command = COMMAND.fullmatch(typed.strip())
        if command is not None:
            if not one.command(command[1], (command[2] or "").strip()):
                return
        elif (answer := one.ask(typed.strip())) is not None:
            one.show_figures(answer)
