"""BlockCalls: calls between markers, each block of which is read as a whole, because its meaning is
known at its end only. A block that does not parse, or calls what is no function, is content."""

import re
from collections.abc import Callable
from typing import Any

from shared.model.json_text import write_json
from shared.model.parsing.pieces import Piece, Prose, find_first, held_length

MAX_BLOCK = 64 << 10  # characters; a longer one is content

Call = tuple[str, dict[str, Any]]


def call_pieces(calls: list[Call] | None, names: frozenset[str]) -> list[Piece] | None:
    """The pieces that calls are; None: what was read is none, or of what is no function, or its
    arguments can't be JSON."""
    if calls is None or any(name not in names for name, _ in calls):
        return None
    try:
        return [
            piece
            for name, arguments in calls
            for piece in (Piece("call", name), Piece("arguments", write_json(arguments)))
        ]
    except ValueError:
        return None


def end_outside_strings(
    ends: tuple[str, ...], string: str, quotes: tuple[str, ...]
) -> Callable[[str], tuple[int, str] | None]:
    """A find_end for which a marker in a string is a part of that. string: the pattern of one; quotes: what begins
    one."""
    marker, quote = ("|".join(map(re.escape, words)) for words in (ends, quotes))
    token = re.compile(rf"({marker})|{string}|({quote})", re.DOTALL)

    def find_end(text: str) -> tuple[int, str] | None:
        for found in token.finditer(text):
            if found[1] is not None:
                return found.start(), found[1]
            if found[2] is not None:  # a string that has not ended yet
                return None
        return None

    return find_end


class BlockCalls:
    """Parser of a form."""

    def __init__(
        self,
        names: frozenset[str],
        starts: tuple[str, ...],
        ends: tuple[str, ...],
        find_end: Callable[[str], tuple[int, str] | None],
        read: Callable[[str], list[Call] | None],
    ) -> None:
        """names: of the functions; find_end: where a block's end marker is, and which of `ends`; read: the
        calls that a block is, None for one that is content."""
        self.names = names
        self.starts = starts
        self.ends = ends
        self.find_end = find_end
        self.read = read
        self._prose = Prose()
        self._text = ""  # of prose, what may be the beginning of a marker
        self._marker = ""  # that began the block; empty: in prose
        self._block = ""

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._text += text
        while self._text and (self._in_block(pieces) if self._marker else self._in_prose(pieces)):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._marker:
            pieces += self._end_block("")
        return pieces + self._prose.say(self._text) + self._prose.finish()

    def _in_prose(self, pieces: list[Piece]) -> bool:
        found = find_first(self._text, self.starts)
        if found is None:
            keep = len(self._text) - held_length(self._text, self.starts)
            pieces += self._prose.say(self._text[:keep])
            self._text = self._text[keep:]
            return False
        at, self._marker = found
        pieces += self._prose.say(self._text[:at])
        self._text = self._text[at + len(self._marker) :]
        return True

    def _in_block(self, pieces: list[Piece]) -> bool:
        """Up to the end marker. It is looked for once one has come: a block comes in thousands of pieces."""
        whole = self._block + self._text
        begin = max(0, len(self._block) - max(map(len, self.ends)) + 1)  # of a marker that was not whole before
        has_marker = find_first(whole[begin:MAX_BLOCK], self.ends) is not None
        self._block, self._text = whole, ""
        end = self.find_end(whole[:MAX_BLOCK]) if has_marker else None
        if end is None:
            if len(whole) > MAX_BLOCK:
                pieces += self._prose.say(self._marker + whole[:MAX_BLOCK])
                self._marker, self._block, self._text = "", "", whole[MAX_BLOCK:]
                return True
            return False
        at, marker = end
        self._block, self._text = whole[:at], whole[at + len(marker) :]
        pieces += self._end_block(marker)
        return True

    def _end_block(self, end: str) -> list[Piece]:
        block, start = self._block, self._marker
        self._marker = self._block = ""
        pieces = call_pieces(self.read(block), self.names)
        if pieces is None:
            return self._prose.say(start + block + end)
        self._prose.call()
        return pieces
