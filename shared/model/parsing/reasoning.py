"""A model's thoughts before its answer, between two markers at the beginning of what it writes."""

from msgspec import Struct

from shared.model.parsing.pieces import Mark, Piece, find_first, held_length, may_begin


class Marks(Struct, frozen=True):
    """How a family of models marks its thoughts."""

    starts: tuple[Mark, ...]
    ends: tuple[Mark, ...]


class ReasoningParser:
    """Splits a text in "reasoning" and "content". White space around the markers is neither's."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.is_inside = False
        self._is_over = False
        self._text = ""  # not decided yet
        self._space = ""  # behind what was thought so far
        self._is_empty = True  # nothing was said since the last marker

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._text and (
            self._answer(pieces) if self._is_over else self._think(pieces) if self.is_inside else self._begin()
        ):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        if not self._text:
            return []
        return [Piece("reasoning", self._space + self._text) if self.is_inside else Piece("content", self._text)]

    def _begin(self) -> bool:
        """The first words: do they open a thought?"""
        text = self._text.lstrip()
        found = next((marker for marker in self.marks.starts if text.startswith(marker)), None)
        if found is not None:
            self.is_inside = True
            self._text = text[len(found) :]
        elif may_begin(text, self.marks.starts):
            return False
        else:
            self._is_over, self._is_empty = True, False
        return True

    def _think(self, pieces: list[Piece]) -> bool:
        if self._is_empty:  # some models open it again where the template did
            text = self._text.lstrip()
            found = next((marker for marker in self.marks.starts if text.startswith(marker)), None)
            if found is not None:
                self._text = text[len(found) :]
                return True
            if may_begin(text, self.marks.starts):
                return False
        end = find_first(self._text, self.marks.ends)
        keep = end[0] if end is not None else len(self._text) - held_length(self._text, self.marks.ends)
        self._say(self._text[:keep], pieces)
        if end is None:
            self._text = self._text[keep:]
            return False
        self._text = self._text[keep + len(end[1]) :]
        self.is_inside, self._is_over, self._is_empty = False, True, True
        return True

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if self._is_empty:
            text = text.lstrip()
        if text:
            self._is_empty = False
            text = self._space + text
            content = text.rstrip()
            self._space = text[len(content) :]
            pieces.append(Piece("reasoning", content))

    def _answer(self, pieces: list[Piece]) -> bool:
        text = self._text.lstrip() if self._is_empty else self._text
        self._text = ""
        if text:
            self._is_empty = False
            pieces.append(Piece("content", text))
        return False
