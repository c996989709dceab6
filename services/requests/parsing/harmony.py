"""gpt-oss' answers (OpenAI, "Harmony response format", 2025): messages, each behind a header that names
its channel, and for a call the function.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
"""

import re
from typing import Literal

from services.requests.parsing.json_scanner import JsonScanner
from services.requests.parsing.pieces import Piece, find_first, held_length, may_begin

HEADS = ("<|start|>", "<|channel|>")
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
CHANNEL = re.compile(r"<\|channel\|>\s*([A-Za-z]+)")
RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]{1,128})")
MAX_HEADER = 512  # characters; a longer one is content


class HarmonyParser:
    """Splits an answer in reasoning, content and calls. What stands before a first header is content,
    as is a call of what is no function. Between two messages of a kind comes a line's end."""

    def __init__(self, names: frozenset[str], *, has_reasoning: bool) -> None:
        """has_reasoning: else thoughts are content."""
        self.names = names
        self.has_reasoning = has_reasoning
        self._text = ""  # not decided yet
        self._state: Literal["outside", "header", "message", "call"] = "outside"
        self._kind: Literal["reasoning", "content"] = "content"  # of the message
        self._said: set[str] = set()  # kinds
        self._is_first = False  # nothing was said of the message
        self._arguments = JsonScanner()

    @property
    def is_inside(self) -> bool:
        """Whether the model thinks."""
        return self._state == "message" and self._kind == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {"outside": self._begin, "header": self._read_header, "message": self._go_on, "call": self._go_on}
        while self._text and steps[self._state](pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        text, self._text = self._text, ""
        if self._state in ("outside", "header"):
            self._start("content")
        self._say(text, pieces)
        if self._state == "call" and self._arguments.held:
            pieces.append(Piece("arguments", self._arguments.held))
        return pieces

    def _begin(self, _: list[Piece]) -> bool:
        text = self._text.lstrip()
        if text.startswith(HEADS):
            self._text, self._state = text, "header"
        elif may_begin(text, HEADS):
            return False
        else:
            self._start("content")
        return True

    def _read_header(self, pieces: list[Piece]) -> bool:
        end = self._text.find(MESSAGE)
        if end > MAX_HEADER or (end < 0 and len(self._text) >= MAX_HEADER + len(MESSAGE)):
            self._start("content")
            self._say(self._text[:1], pieces)  # which would begin a header again
            self._text = self._text[1:]
            return True
        if end < 0:
            return False
        header, self._text = self._text[:end], self._text[end + len(MESSAGE) :]
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self.names:
            self._state, self._arguments = "call", JsonScanner()
            pieces += [Piece("call", recipient[1])]
        else:
            is_thought = channel is not None and channel[1] == "analysis"
            self._start("reasoning" if is_thought and self.has_reasoning else "content")
        return True

    def _go_on(self, pieces: list[Piece]) -> bool:
        """In a message or a call, up to its end."""
        found = find_first(self._text, (*ENDS, *HEADS))
        keep = found[0] if found is not None else len(self._text) - held_length(self._text, (*ENDS, *HEADS))
        self._say(self._text[:keep], pieces)
        self._text = self._text[keep:]
        if found is None:
            return False
        self._text = self._text.removeprefix(found[1]) if found[1] in ENDS else self._text
        self._state = "outside"
        return True

    def _start(self, kind: Literal["reasoning", "content"]) -> None:
        self._state, self._kind, self._is_first = "message", kind, True

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if self._state == "call":
            end = self._arguments.feed(text)
            pieces.append(Piece("arguments", self._arguments.take()))
            text = text[end:].lstrip() if self._arguments.is_done else text[end:]
            if self._arguments.is_broken or (self._arguments.is_done and text):  # what is left is no argument
                text = self._arguments.held + text
                self._start("content")
        if text and self._state == "message":
            if self._is_first and self._kind in self._said:
                pieces.append(Piece(self._kind, "\n"))
            self._is_first = False
            self._said.add(self._kind)
            pieces.append(Piece(self._kind, text))
