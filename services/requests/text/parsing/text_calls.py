"""Calls that a model writes in a language of its own: as Python, `[f(a=1), g(b="x")]`, or as Gemma
does, `call:f{a:1,b:<escape>x<escape>}`, or as Qwen3-Coder does,
`<tool_call><function=f><parameter=x>…</parameter></function></tool_call>`, each part on lines of
its own.

What they mean is known at their end only, so each call goes out whole. What does not parse, or
calls what is no function, is content.
"""

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any

from services.requests.text.parsing.pieces import Piece, Prose, find_first, held_length, may_begin
from shared.model.json_text import MAX_DEPTH, read_json, write_json

MAX_BLOCK = 64 << 10  # characters; a longer one is content
PYTHON_MARKERS = ("<|python_start|>", "<|python_end|>")
PYTHON_HEAD = re.compile(r"\[\s*([A-Za-z_][\w.-]*)\s*\(")
BEGUN_PYTHON_HEAD = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]*\s*)?")
PYTHON_WORDS = {"true": True, "false": False, "null": None}

GEMMA_STARTS = ("<start_function_call>", "<|tool_call>")
GEMMA_ENDS = ("<end_function_call>", "<tool_call|>")
GEMMA_QUOTES = ("<escape>", '<|"|>')
GEMMA_HEAD = re.compile(r"\s*call:([A-Za-z0-9_.-]+)\s*(?=\{)")
GEMMA_BARE = re.compile(r"[^,{}\[\]<]+")
SPACE = re.compile(r"\s*")

XML_STARTS = ("<tool_call>",)
XML_END = "</tool_call>"
# an end marker within a value is none: a call ends after its </function>
XML_FUNCTION_END = re.compile(r"</function>\s*(?=</tool_call>)")
XML_FUNCTION = re.compile(r"\s*<function=([A-Za-z0-9_.-]{1,128})>(.*)</function>\s*", re.DOTALL)
XML_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,128})>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|$))", re.DOTALL)

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


class PythonicCalls:
    """Parser of answers that are a list of calls in Python's words, from their first character on.
    Prose may follow."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._prose = Prose()
        self._raw = ""  # of the list, or what may become one
        self._at = 0  # how far of it was looked at
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
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
            character = self._raw[self._at]
            self._at += 1
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return self._at
        return None


def python_calls(text: str) -> list[Call] | None:
    """The calls in a list of them; None: it is none, or has an argument that is no plain value."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of "\d" in a string
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [python_call(each) for each in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Raises ValueError."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    return ast.unparse(node.func), {
        keyword.arg: python_value(keyword.value) for keyword in node.keywords if keyword.arg is not None
    }


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


class BlockCalls:
    """Parser of calls that stand between markers, each of which is read as a whole."""

    def __init__(
        self,
        names: frozenset[str],
        starts: tuple[str, ...],
        find_end: Callable[[str], tuple[int, str] | None],
        read: Callable[[str], Call | None],
    ) -> None:
        """names: of the functions; find_end: where a block's end marker is, and which; read: the
        call that a block is, None for one that is content."""
        self.names = names
        self.starts = starts
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
        """Up to the end marker, but for one between quotes."""
        whole = self._block + self._text
        self._block, self._text = whole, ""
        end = self.find_end(whole[:MAX_BLOCK])
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
        call = self.read(block)
        pieces = call_pieces([call], self.names) if call is not None else None
        if pieces is None:
            return self._prose.say(start + block + end)
        self._prose.call()
        return pieces


def gemma_calls(names: frozenset[str]) -> BlockCalls:
    """Parser of the calls of FunctionGemma and Gemma 4."""
    return BlockCalls(names, GEMMA_STARTS, gemma_end, gemma_call)


def gemma_end(text: str) -> tuple[int, str] | None:
    """Find where the end marker is, and which."""
    at = 0
    while (found := find_first(text[at:], GEMMA_ENDS + GEMMA_QUOTES)) is not None:
        at += found[0]
        if found[1] in GEMMA_ENDS:
            return at, found[1]
        close = text.find(found[1], at + len(found[1]))
        if close < 0:
            return None
        at = close + len(found[1])
    return None


def gemma_call(text: str) -> Call | None:
    head = GEMMA_HEAD.match(text)
    if head is None:
        return None
    try:
        arguments, end = gemma_value(text, head.end(), 0)
    except ValueError:
        return None
    return (head[1], arguments) if not text[end:].strip() else None


def gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins there, and where it ends. Raises ValueError."""
    at = skip_space(text, at)
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    for quote in GEMMA_QUOTES:
        if text.startswith(quote, at):
            end = text.index(quote, at + len(quote))
            return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return gemma_items(text, at + 1, "}", depth + 1)
    if text.startswith("[", at):
        return gemma_items(text, at + 1, "]", depth + 1)
    bare = GEMMA_BARE.match(text, at)
    if bare is None:
        raise ValueError("no value")
    try:
        return read_json(bare[0]), bare.end()
    except ValueError:
        return bare[0].strip(), bare.end()


def gemma_items(text: str, at: int, closing: str, depth: int) -> tuple[Any, int]:
    """An object's fields, or a list's elements. Raises ValueError."""
    fields: dict[str, Any] = {}
    elements: list[Any] = []
    while True:
        at = skip_space(text, at)
        if text.startswith(closing, at):
            return fields if closing == "}" else elements, at + 1
        if closing == "}":
            colon = text.index(":", at)
            key = text[at:colon].strip()
            for quote in GEMMA_QUOTES:
                key = key.removeprefix(quote).removesuffix(quote)
            fields[key], at = gemma_value(text, colon + 1, depth)
        else:
            element, at = gemma_value(text, at, depth)
            elements.append(element)
        at = skip_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(closing, at):
            raise ValueError("neither a comma nor the end")


def skip_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    assert found is not None
    return found.end()


def xml_calls(names: frozenset[str], texts: frozenset[str]) -> BlockCalls:
    """Parser of Qwen3-Coder's calls of these functions. texts: the parameters whose values are texts as
    they stand, as function.parameter; other values are JSON, if they parse as such."""

    def read(block: str) -> Call | None:
        call = XML_FUNCTION.fullmatch(block)
        if call is None:
            return None
        arguments: dict[str, Any] = {}
        rest = call[2]
        while (found := XML_PARAMETER.match(rest)) is not None:
            arguments[found[1]] = found[2] if f"{call[1]}.{found[1]}" in texts else xml_value(found[2])
            rest = rest[found.end() :]
        return (call[1], arguments) if not rest.strip() else None

    return BlockCalls(names, XML_STARTS, xml_end, read)


def xml_end(text: str) -> tuple[int, str] | None:
    """Find where the end marker is."""
    at = text.find(XML_END)
    if at >= 0 and "<function=" in text[:at]:
        found = XML_FUNCTION_END.search(text)
        at = found.end() if found is not None else -1
    return (at, XML_END) if at >= 0 else None


def xml_value(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return text
