"""Calls as Python: `[f(a=1), g(b="x")]`, with or without markers around the list."""

import ast
import keyword
import re
import warnings
from typing import Any

from msgspec import Struct

from shared.model.parsing.blocks import MAX_BLOCK, BlockCalls, Call, call_pieces, end_outside_strings
from shared.model.parsing.pieces import Mark, Piece, Prose, may_begin

PYTHON_MARKERS = ("<|python_start|>", "<|python_end|>")
PYTHON_HEAD = re.compile(r"\[\s*([A-Za-z_][\w.-]*)\s*\(")
BEGUN_PYTHON_HEAD = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]*\s*)?")
PYTHON_STRING = "|".join(
    rf"{quote}{quote}{quote}(?:[^\\]|\\.)*?{quote}{quote}{quote}|{quote}(?!{quote}{quote})(?:[^{quote}\\]|\\.)*{quote}"
    for quote in "'\""
)
# A string, one that does not end, or an argument whose name is a word of Python's own, which no call may have
STRING_OR_KEYWORD = re.compile(rf"{PYTHON_STRING}|['\"].*|\b({'|'.join(keyword.kwlist)})(?=\s*=[^=])", re.DOTALL)
ESCAPED = "_word_"
PYTHON_WORDS = {"true": True, "false": False, "null": None}


class PythonicCalls:
    """Parser of answers that are a list of calls in Python's words, from their first character on.
    Prose may follow."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._prose = Prose()
        self._raw = ""  # of the list, or what may become one
        self._at = 0  # how far of it was looked at
        self._depth = 0
        self._quote = ""  # one or three, of the string that has not ended
        self._is_prose = False
        self._behind: str | None = None  # the list, what may be the beginning of the end marker

    def feed(self, text: str) -> list[Piece]:
        if self._is_prose:
            return self._prose.say(text)
        if self._behind is not None:
            return self._end(text)
        self._raw += text
        beginning = self._raw.lstrip()
        if beginning.startswith(PYTHON_MARKERS[0]):
            beginning = beginning[len(PYTHON_MARKERS[0]) :].lstrip()
        elif PYTHON_MARKERS[0].startswith(beginning):
            return []
        head = PYTHON_HEAD.match(beginning)
        if (head is None and BEGUN_PYTHON_HEAD.fullmatch(beginning) is None and beginning) or (
            head is not None and head[1] not in self.names
        ):
            return self._give_up()
        if head is None:
            return []
        start = len(self._raw) - len(beginning)
        end = self._find_end(start)
        if end is None:
            return self._give_up() if len(self._raw) - start > MAX_BLOCK else []
        pieces = call_pieces(python_calls(self._raw[start:end]), self.names) if end - start <= MAX_BLOCK else None
        if pieces is None:
            return self._give_up()
        self._prose.call()
        self._behind = ""
        return pieces + self._end(self._raw[end:])

    def finish(self) -> list[Piece]:
        if self._behind is not None and not self._is_prose:
            return self._prose.say(self._behind) + self._prose.finish()
        return ([] if self._is_prose else self._give_up()) + self._prose.finish()

    def _end(self, text: str) -> list[Piece]:
        """An end marker may follow the list."""
        self._behind = ((self._behind or "") + text).lstrip()
        if self._behind != PYTHON_MARKERS[1] and may_begin(self._behind, PYTHON_MARKERS[1:]):
            return []
        self._is_prose = True
        return self._prose.say(self._behind.removeprefix(PYTHON_MARKERS[1]))

    def _give_up(self) -> list[Piece]:
        self._is_prose = True
        return self._prose.say(self._raw)

    def _find_end(self, start: int) -> int | None:
        """Behind the bracket that closes the first one."""
        self._at = max(self._at, start)
        while self._at < len(self._raw):
            here, size = self._raw[self._at : self._at + 3], 1
            if here[0] in "\"'\\" and len(here) < 3:  # what it means is in the next two, which a whole list has
                return None
            if self._quote:
                if here[0] == "\\":
                    size = 2
                elif here.startswith(self._quote):
                    size, self._quote = len(self._quote), ""
            elif here[0] in "\"'":
                self._quote = here if here == here[0] * 3 else here[0]
                size = len(self._quote)
            elif here[0] in "([{":
                self._depth += 1
            elif here[0] in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return self._at + 1
            self._at += size
        return None


def python_calls(text: str) -> list[Call] | None:
    """The calls in a list of them, or on lines of their own; None: it is neither, or has an argument that is no
    plain value."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of "\d" in a string
            body = ast.parse(with_names(text).strip()).body
        lines = [line.value for line in body if isinstance(line, ast.Expr)]
        if not lines or len(lines) < len(body):
            return None
        nodes = lines[0].elts if len(lines) == 1 and isinstance(lines[0], ast.List) else lines
        return [python_call(node) for node in nodes] or None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def with_names(text: str) -> str:
    """The text with names of arguments that Python can read."""
    return STRING_OR_KEYWORD.sub(lambda token: f"{ESCAPED}{token[1]}" if token[1] else token[0], text)


def python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Raises ValueError."""
    if not isinstance(node, ast.Call) or node.args or any(argument.arg is None for argument in node.keywords):
        raise ValueError("not a call with named arguments")
    return ast.unparse(node.func), {
        as_written(str(argument.arg)): python_value(argument.value) for argument in node.keywords
    }


def as_written(name: str) -> str:
    """The name of an argument, as it was before with_names."""
    word = name.removeprefix(ESCAPED)
    return word if keyword.iskeyword(word) else name


def python_value(node: ast.expr) -> Any:
    """A Python literal as JSON. Raises ValueError."""
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [python_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            named = [
                (key.value, value)
                for key, value in zip(keys, values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            ]
            if len(named) == len(keys):
                return {key: python_value(value) for key, value in named}
        case ast.Name(id=word) if word in PYTHON_WORDS:
            return PYTHON_WORDS[word]
    raise ValueError("not a plain value")


class PythonForm(Struct, frozen=True, tag="python"):
    """The markers around calls as Python."""

    start: Mark
    end: Mark

    def parser(self, names: frozenset[str], texts: frozenset[str]) -> BlockCalls:  # noqa: ARG002
        find_end = end_outside_strings((self.end,), PYTHON_STRING, ("'", '"'))
        return BlockCalls(names, (self.start,), (self.end,), find_end, python_calls)
