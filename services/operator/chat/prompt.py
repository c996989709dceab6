"""The line that questions are typed on: editing, history, and pastes of several lines that stay one question."""

import os
import sys
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import EditingMode
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output

HISTORY = Path.home() / ".penstock" / "chat_history"
MAX_HISTORY_BYTES = 1 << 20  # beyond, the older half of it is dropped
NEWLINE_KEYS = "Alt-Enter"


class PrivateHistory(FileHistory):
    """In a file that only its owner reads; the chat goes on when it can't be written."""

    def store_string(self, string: str) -> None:
        try:
            super().store_string(to_utf8(string))
        except OSError as error:
            sys.stderr.write(f"penstock: {self.filename!s}: {error.strerror}\n")


def open_history(path: Path) -> History:
    """The history in that file; where there can be none, one that ends with the chat."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
        if path.stat().st_size > MAX_HISTORY_BYTES:
            shorten(path)
    except OSError as error:
        sys.stderr.write(f"penstock: {path}: {error.strerror}: this chat's history will not be kept\n")
        return InMemoryHistory()
    return PrivateHistory(str(path))


def shorten(path: Path) -> None:
    """Keep the newest entries, half the bytes that there may be."""
    kept: list[str] = []
    num_bytes = 0
    for entry in FileHistory(str(path)).load_history_strings():  # the newest first
        num_bytes += len(entry.encode(errors="replace"))
        if num_bytes > MAX_HISTORY_BYTES // 2:
            break
        kept.append(entry)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    os.close(os.open(aside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
    history = PrivateHistory(str(aside))
    for entry in reversed(kept):
        history.store_string(entry)
    aside.replace(path)


def to_utf8(text: str) -> str:
    """Without the lone surrogates that bytes which are no UTF-8 become."""
    return text.encode("utf-8", "replace").decode()


class Prompt:
    """Asks for one question after the other."""

    def __init__(self, commands: list[str]) -> None:
        """commands: what the Tab key completes at the beginning."""
        self.session: PromptSession[str] = PromptSession(
            history=open_history(HISTORY),
            key_bindings=bindings(),
            multiline=True,
            prompt_continuation=lambda *_: "  ",
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=False,
            enable_suspend=True,
            editing_mode=EditingMode.EMACS,
            output=None if sys.stdout.isatty() else create_output(stdout=sys.stderr),
        )

    def ask(self) -> str | None:
        """The line that was typed; None at the end (Ctrl-D). Raises KeyboardInterrupt for Ctrl-C."""
        try:
            return to_utf8(self.session.prompt("> "))
        except EOFError:
            return None


def bindings() -> KeyBindings:
    """Enter sends, although there may be several lines: those come by Alt-Enter, or by a paste."""
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def insert_newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
