"""Calls that a model writes as JSON: `{"name": …, "arguments": {…}}` between markers, or the name
before the arguments.

A call begins when its name is known to be a function's and its arguments begin; from then on they
go out as they come. What is no call is content: a block that does not begin one as it stands,
marker and all, and what follows arguments that stop being JSON.
"""

import re
from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct

from shared.model.json_text import read_json, write_json
from shared.model.parsing.json_scanner import JsonScanner
from shared.model.parsing.pieces import Mark, Piece, Prose, find_first, held_length, may_begin

NAME = r"[A-Za-z0-9_.-]{1,128}"
JSON_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*|"tool_call_id"\s*:\s*"[^"]{0,64}"\s*,\s*)?"(?:tool_)?name"\s*:\s*"('
    + NAME
    + r')"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
CALL_ID = "\x00"  # in the marks of a form: any call's identifier
# One identifier, for the pattern of several takes exponential time
NameMarks = Annotated[str, Meta(max_length=128, pattern=r"\A[^\x00]*\x00?[^\x00]*\Z")]
MAX_HEAD = 512  # characters, of what stands before the arguments
SEPARATORS = " \t\r\n[],;"


class CallForm(Struct, frozen=True, tag="json"):
    """How a family of models marks its calls."""

    starts: tuple[Mark, ...] = ()
    ends: tuple[Mark, ...] = ()
    between: tuple[Mark, ...] = ()  # marks before, between and behind the calls of a block
    may_be_bare: bool = False  # an answer that begins with an object, or a list, may be a call without a marker
    has_names_first: bool = False  # name{…} or name[ARGS]{…}
    before_name: NameMarks = ""  # marks of a name that comes first, which models may leave out
    behind_name: NameMarks = ""
    # False: a grammar had the model write calls alone, so an end that begins none is one that was cut off
    has_prose: bool = True

    def parser(self, names: frozenset[str], texts: frozenset[str]) -> "JsonCalls":  # noqa: ARG002
        return JsonCalls(self, names)


@lru_cache(maxsize=64)
def named_head(form: CallForm) -> re.Pattern[str]:
    """The text before the arguments of a call whose name comes first. A number of the call may follow the
    name."""
    before, behind = (rf"(?:{loosely(marks)}\s*)?" if marks else "" for marks in (form.before_name, form.behind_name))
    return re.compile(rf"\s*{before}({NAME})(?::\d{{1,4}})?\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]{{1,64}}\s*)?{behind}")


def loosely(marks: str) -> str:
    """A pattern of marks between which there may be white space."""
    return r"\s*".join(re.escape(part) for part in marks.split()).replace(re.escape(CALL_ID), r"[^\s<>\[\]{}]{0,128}")


class ObjectCall:
    """One call as an object. Reads up to its end."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.is_broken = False
        self.has_begun = False
        self._whole = JsonScanner()
        self._arguments: JsonScanner | None = None
        self._read: list[str] = []
        self._head = ""

    @property
    def is_done(self) -> bool:
        return self._whole.is_done or (
            self._whole.is_broken and self._arguments is not None and self._arguments.is_done
        )

    @property
    def rest(self) -> str:
        """The text read that is no part of the call: all of it, or the rest that its arguments held
        back."""
        return self._arguments.held if self._arguments is not None else "".join(self._read)

    def feed(self, text: str, pieces: list[Piece]) -> int:
        """Returns where it stopped."""
        end = self._whole.feed(text)
        if self._arguments is None:
            self._read.append(text[:end])
            end -= self._look_at_head(text[:end], pieces)
        elif not self._arguments.is_done:
            self._arguments.feed(text[:end])
            self._go_on(pieces)
        self.is_broken = self.is_broken or (self._whole.is_broken and not self.is_done)
        return end

    def _look_at_head(self, text: str, pieces: list[Piece]) -> int:
        """Returns how many characters too many were read, should what was read begin no call."""
        if len(self._head) < MAX_HEAD:
            self._head += text[: MAX_HEAD - len(self._head)]
            if (found := JSON_HEAD.match(self._head)) is not None:
                read = "".join(self._read)
                if found[1] not in self.names:
                    self.is_broken = True
                    self._read = [read[: found.end() + 1]]
                    return len(read) - found.end() - 1
                self._begin(found[1], pieces)
                self._arguments = JsonScanner()
                self._arguments.feed(read, found.end())
                self._go_on(pieces)
                return 0
        if self._whole.is_done:
            self._read_whole(pieces)
        return 0

    def _begin(self, name: str, pieces: list[Piece]) -> None:
        self.has_begun = True
        pieces.append(Piece("call", name))

    def _go_on(self, pieces: list[Piece]) -> None:
        assert self._arguments is not None
        pieces.append(Piece("arguments", self._arguments.take()))

    def _read_whole(self, pieces: list[Piece]) -> None:
        """An object whose fields come in another order, or whose arguments are a text of JSON."""
        found = call_of("".join(self._read))
        if found is None or found[0] not in self.names:
            self.is_broken = True
            return
        self._begin(found[0], pieces)
        pieces.append(Piece("arguments", found[1]))


def call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of an object that is a call."""
    try:
        value = read_json(text, strict=False)
        if isinstance(value.get("function"), dict):
            value = value["function"]
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if isinstance(name := value.get("name", value.get("tool_name")), str) and isinstance(arguments, dict):
            return name, write_json(arguments)
    except ValueError:
        return None
    return None


class NamedCall:
    """One call as a name and, behind it, its arguments."""

    def __init__(self, head: re.Pattern[str], names: frozenset[str]) -> None:
        self.head = head
        self.names = names
        self.is_broken = False
        self.has_begun = False
        self._arguments = JsonScanner()
        self._head = ""

    @property
    def is_done(self) -> bool:
        return self._arguments.is_done

    @property
    def rest(self) -> str:
        return self._arguments.held if self.has_begun else self._head

    def feed(self, text: str, pieces: list[Piece]) -> int:
        at = 0
        if not self.has_begun:
            brace = text.find("{")
            at = min(brace if brace >= 0 else len(text), MAX_HEAD - len(self._head))
            self._head += text[:at]
            if len(self._head) >= MAX_HEAD:
                self.is_broken = True
                return at
            if brace < 0:
                return at
            found = self.head.fullmatch(self._head)
            if found is None or found[1] not in self.names:
                self.is_broken = True
                return at
            self.has_begun = True
            pieces.append(Piece("call", found[1]))
        end = self._arguments.feed(text, at)
        pieces.append(Piece("arguments", self._arguments.take()))
        self.is_broken = self._arguments.is_broken
        return end


class JsonCalls:
    """Parser of a form."""

    def __init__(self, form: CallForm, names: frozenset[str]) -> None:
        self.form = form
        self.names = names
        self._markers = (*form.between, *form.starts, *form.ends)
        self._prose = Prose()
        self._text = ""  # not read yet
        self._mode = "start" if form.may_be_bare else "content"  # start, content, block, call
        self._pending = ""  # of a block in which no call has begun
        self._has_call = False  # in this block
        self._call: ObjectCall | NamedCall | None = None

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._text and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is not None and self._call.has_begun:
            pieces.append(Piece("arguments", self._call.rest))
        elif self.form.has_prose:
            rest = "" if self._has_call else self._pending
            pieces += self._prose.say(rest + (self._call.rest if self._call is not None else "") + self._text)
        return pieces + self._prose.finish()

    def _step(self, pieces: list[Piece]) -> bool:
        """Read on. False: not before more has come."""
        if self._mode == "call":
            return self._in_call(pieces)
        if self._mode == "block":
            return self._block(pieces)
        return self._content(pieces) if self._mode == "content" else self._start()

    def _start(self) -> bool:
        """Nothing but white space so far."""
        text = self._text.lstrip()
        if not text:
            return False
        if text[0] in "{[":
            self._enter_block(self._text[: len(self._text) - len(text)])
            self._text = text
        else:
            self._mode = "content"
        return True

    def _content(self, pieces: list[Piece]) -> bool:
        found = find_first(self._text, self.form.starts)
        if found is None:
            keep = len(self._text) - held_length(self._text, self.form.starts)
            pieces += self._prose.say(self._text[:keep])
            self._text = self._text[keep:]
            return False
        at, marker = found
        pieces += self._prose.say(self._text[:at])
        self._text = self._text[at + len(marker) :]
        self._enter_block(marker)
        return True

    def _enter_block(self, pending: str) -> None:
        self._mode, self._pending, self._has_call = "block", pending, False

    def _block(self, pieces: list[Piece]) -> bool:
        """Between a start marker and the next call, or behind one."""
        for marker in self._markers:
            if self._text.startswith(marker):
                self._text = self._text[len(marker) :]
                self._meet(marker, pieces)
                return True
        if may_begin(self._text, self._markers):
            return False
        character = self._text[0]
        if character == "{":
            self._call, self._mode = ObjectCall(self.names), "call"
        elif self.form.has_names_first and (character.isalnum() or character == "_"):
            self._call, self._mode = NamedCall(named_head(self.form), self.names), "call"
        elif character in SEPARATORS:
            self._pending += character
            self._text = self._text[1:]
        else:
            self._leave_block("", pieces)
        return True

    def _meet(self, marker: str, pieces: list[Piece]) -> None:
        if marker in self.form.between:
            self._pending += marker
        elif marker in self.form.starts:
            if not self._has_call:
                pieces += self._prose.say(self._pending)
            self._enter_block(marker)
        else:
            self._leave_block(marker, pieces)

    def _leave_block(self, rest: str, pieces: list[Piece]) -> None:
        """Back to content. Of a block with calls, separators and markers are no content; of one
        without, all is."""
        self._mode = "content"
        if not self._has_call:
            pieces += self._prose.say(self._pending + rest)
        self._pending = ""

    def _in_call(self, pieces: list[Piece]) -> bool:
        assert self._call is not None
        end = self._call.feed(self._text, pieces)
        self._text = self._text[end:]
        if self._call.has_begun and not self._has_call:
            self._has_call = True
        if self._call.has_begun:
            self._prose.call()
        if self._call.is_done and not self._call.is_broken:
            self._call, self._mode, self._pending = None, "block", ""
        elif self._call.is_broken:
            rest = self._call.rest if self._has_call else self._pending + self._call.rest
            self._call, self._mode, self._pending = None, "content", ""
            pieces += self._prose.say(rest)
        else:
            return False
        return True
