"""JsonScanner: follows a JSON object or list character by character, and tells where it ends or
where it stops being JSON.

What it has accepted comes out as it went in, but for line breaks and other control characters in
strings: models write them as they are, and JSON wants them escaped.
"""

import json
import re

from shared.model.json_text import MAX_DEPTH, MAX_DIGITS

MAX_WORD = 64  # characters
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
SPACE = re.compile(r"[ \t\r\n]+")
WORD = re.compile(r"[-+.0-9A-Za-z]+")
SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,4})?")
CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    def __init__(self) -> None:
        self.held = ""  # read, but not certain yet: the beginning of a number, a word or an escape
        self._stack: list[str] = []
        # what may come: value, first (value or end), key, first_key (key or end), colon, next
        # (comma or end), string, word; done, broken
        self._state = "value"
        self._is_key = False  # of the string that is being read
        self._accepted: list[str] = []

    @property
    def is_done(self) -> bool:
        return self._state == "done"

    @property
    def is_broken(self) -> bool:
        return self._state == "broken"

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at` on. Returns where it stopped: at the end of the text, behind the value's
        end, or at what is no JSON."""
        while at < len(text) and self._state not in ("done", "broken"):
            if self._state == "string":
                at = self._string(text, at)
            elif self._state == "word":
                at = self._word(text, at)
            elif (space := SPACE.match(text, at)) is not None:
                self._accepted.append(space[0])
                at = space.end()
            else:
                at = self._structure(text[at], at)
        return at

    def take(self) -> str:
        """The text accepted since the last call."""
        text = "".join(self._accepted)
        self._accepted.clear()
        return text

    def _structure(self, character: str, at: int) -> int:
        """A character between values."""
        state = self._state
        if character == '"' and state in ("value", "first", "key", "first_key"):
            self._is_key, self._state = state in ("key", "first_key"), "string"
        elif character in "{[" and state in ("value", "first") and len(self._stack) < MAX_DEPTH:
            self._stack.append(character)
            self._state = "first_key" if character == "{" else "first"
        elif self._stack and character == CLOSING[self._stack[-1]] and state in ("first", "first_key", "next"):
            self._stack.pop()
            self._end_value()
        elif character == ":" and state == "colon":
            self._state = "value"
        elif character == "," and state == "next":
            self._state = "key" if self._stack[-1] == "{" else "value"
        elif WORD.match(character) is not None and state in ("value", "first") and self._stack:
            self._state = "word"
            return at
        else:
            self._state = "broken"
            return at
        self._accepted.append(character)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        if self.held:
            return self._escape(text, at)
        if (plain := PLAIN.match(text, at)) is not None:
            self._accepted.append(plain[0])
            return plain.end()
        character = text[at]
        if character == "\\":
            self.held = character
        elif character == '"':
            self._accepted.append(character)
            self._end_string()
        else:
            self._accepted.append(json.dumps(character)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        longer = self.held + text[at]
        if ESCAPE.fullmatch(longer) is not None:
            self._accepted.append(longer)
            self.held = ""
        elif BEGUN_ESCAPE.fullmatch(longer) is not None:
            self.held = longer
        else:
            self._state = "broken"
            return at
        return at + 1

    def _word(self, text: str, at: int) -> int:
        """A number, or true, false, null: certain once something else follows."""
        if (word := WORD.match(text, at)) is not None:
            held = self.held or word[0]
            if len(self.held) + len(word[0]) > (MAX_DIGITS if held[0] in "-0123456789" else MAX_WORD):
                self._state = "broken"
                return at
            self.held += word[0]
            return word.end()
        if SCALAR.fullmatch(self.held) is None:
            self._state = "broken"
            return at
        self._accepted.append(self.held)
        self.held = ""
        self._end_value()
        return at

    def _end_string(self) -> None:
        if self._is_key:
            self._state = "colon"
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._state = "next" if self._stack else "done"
