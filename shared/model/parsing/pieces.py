"""Piece: what a parser makes of a stretch of text; and what all parsers have to do with markers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from msgspec import Meta

Mark = Annotated[str, Meta(min_length=1, max_length=128)]  # of a form that comes as JSON


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an answer. "call" begins a call, and its text is the function's name;
    "arguments" go on with the last one's, as JSON."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str


class Parser(Protocol):
    """Feeds on an answer's text, and says of each stretch what it is as soon as that is certain."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """Return what was held back, once no more text can come. Nothing is fed afterwards."""
        ...


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours of one kind, and drop empty pieces. Calls are never joined."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].kind == piece.kind != "call":
            found[-1] = Piece(piece.kind, found[-1].text + piece.text)
        elif piece.text:
            found.append(piece)
    return found


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Find where the first of the markers begins in the text, and which it is; of several that
    begin there, the one named first."""
    found = [(at, number) for number, marker in enumerate(markers) if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, number = min(found)
    return at, markers[number]


def held_length(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of the text that may be the beginning of a marker."""
    for length in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def may_begin(text: str, markers: Sequence[str]) -> bool:
    """Whether more text could make one of the markers of it."""
    return any(marker.startswith(text) for marker in markers)


class Prose:
    """Content around calls. White space at its end is held back: between content and a call it is part
    of neither."""

    def __init__(self) -> None:
        self._space = ""
        self._is_after_call = False

    def say(self, text: str) -> list[Piece]:
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        return [Piece("content", content)] if content else []

    def call(self) -> None:
        """A call begins here."""
        self._space = ""
        self._is_after_call = True

    def finish(self) -> list[Piece]:
        return [Piece("content", self._space)] if self._space else []
