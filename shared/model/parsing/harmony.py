"""gpt-oss' answers (OpenAI, "Harmony response format", 2025): messages, each behind a header that names
its channel, and for a call the function.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
"""

import re
from collections.abc import Callable
from typing import Literal

from shared.model.parsing.json_scanner import JsonScanner
from shared.model.parsing.pieces import Piece, held_length, may_begin

THOUGHT, ANSWER = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
BETWEEN = "<|end|><|start|>assistant"
# A header begins so. The markers alone may be text.
HEADS = ("<|start|>assistant", "<|channel|>analysis", "<|channel|>commentary", "<|channel|>final")
FIRST_TOKENS = ("<|start|>", "<|channel|>")
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (*ENDS, *HEADS)
MARKER = re.compile("|".join(map(re.escape, MARKERS)))
SPACE = re.compile(r"\s*")
CHANNEL = re.compile(r"<\|channel\|>([a-z]+)")
RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]{1,128})")
MAX_HEADER = 512  # characters; a longer one is content
LONGEST = max(map(len, MARKERS))

Kind = Literal["reasoning", "content"]


class HarmonyParser:
    """Splits an answer in reasoning, content and calls. What stands before a first header is content,
    as is a call of what is no function. Between two messages of a kind comes a line's end."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._text = ""  # not decided yet, from _at on
        self._at = 0
        self._state: Literal["outside", "header", "message", "call"] = "outside"
        self._kind: Kind = "content"  # of the message
        self._is_first = False  # nothing was said of the message
        self._said: set[str] = set()  # kinds
        self._call = ""  # a function's name, until its arguments begin
        self._arguments = JsonScanner()

    @property
    def is_inside(self) -> bool:
        """Whether the model thinks."""
        return self._state == "message" and self._kind == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._text, self._at = self._text[self._at :] + text, 0
        pieces: list[Piece] = []
        steps: dict[str, Callable[[list[Piece]], bool]] = {
            "outside": self._begin,
            "header": self._read_header,
            "message": self._read_message,
            "call": self._read_call,
        }
        while self._at < len(self._text) and steps[self._state](pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """A header that was cut off is left out."""
        pieces: list[Piece] = []
        rest = self._text[self._at :]
        if self._state == "call":
            pieces.append(Piece("arguments", self._arguments.held))
        elif self._state == "message" or (
            self._state == "outside" and not rest.lstrip().startswith(FIRST_TOKENS) and (rest.strip() or not self._said)
        ):
            self._say(rest, pieces)
        return pieces

    def _begin(self, _: list[Piece]) -> bool:
        found = SPACE.match(self._text, self._at)
        assert found is not None
        if self._text.startswith(HEADS, found.end()):
            self._state, self._at = "header", found.end()
        elif may_begin(self._text[found.end() : found.end() + LONGEST], HEADS):
            return False
        else:
            self._start("content")
        return True

    def _read_header(self, pieces: list[Piece]) -> bool:
        end = self._text.find(MESSAGE, self._at, self._at + MAX_HEADER + len(MESSAGE))
        if end < 0 and len(self._text) - self._at < MAX_HEADER + len(MESSAGE):
            return False
        if end < 0:
            self._start("content")
            self._say(self._text[self._at], pieces)  # the rest is no header
            self._at += 1
            return True
        header, self._at = self._text[self._at : end], end + len(MESSAGE)
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self.names:
            self._state, self._call, self._arguments = "call", recipient[1], JsonScanner()
        else:
            self._start("reasoning" if channel is not None and channel[1] == "analysis" else "content")
        return True

    def _read_message(self, pieces: list[Piece]) -> bool:
        found = MARKER.search(self._text, self._at)
        end = (
            found.start()
            if found is not None
            else len(self._text) - held_length(self._text[max(self._at, len(self._text) - LONGEST) :], MARKERS)
        )
        self._say(self._text[self._at : end], pieces)
        self._at = end
        return self._end_message() if found is not None else False

    def _read_call(self, pieces: list[Piece]) -> bool:
        """Markers may stand in the arguments' texts: they are looked for where the JSON stops."""
        self._at = self._arguments.feed(self._text, self._at)
        if arguments := self._arguments.take().lstrip() if self._call else self._arguments.take():
            self._begin_call(pieces)
            pieces.append(Piece("arguments", arguments))
        if self._arguments.is_done:
            space = SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
        rest = self._text[self._at : self._at + LONGEST]
        if rest.startswith(MARKERS):
            if self._call:
                self._begin_call(pieces)
                pieces.append(Piece("arguments", "{}"))
            return self._end_message()
        if may_begin(rest, MARKERS):
            return False
        held = self._arguments.held
        self._start("content")
        self._say(held, pieces)
        return True

    def _begin_call(self, pieces: list[Piece]) -> None:
        if self._call:
            pieces.append(Piece("call", self._call))
            self._said.add("call")
            self._call = ""

    def _end_message(self) -> bool:
        """At a marker: the next header, or the end of this message."""
        if self._text.startswith(HEADS, self._at):
            self._state = "header"
        else:
            self._at = self._text.index(">", self._at) + 1
            self._state = "outside"
        return True

    def _start(self, kind: Kind) -> None:
        self._state, self._kind, self._is_first = "message", kind, True

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._is_first and self._kind in self._said:
            pieces.append(Piece(self._kind, "\n"))
        self._is_first = False
        self._said.add(self._kind)
        pieces.append(Piece(self._kind, text))
