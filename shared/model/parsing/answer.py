"""AnswerParser: the parsers of one answer, by name, one behind the other: reasoning first, and
calls in what is left. gpt-oss' form has one parser for both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.model.parsing.forms import HARMONY, OTHERS, TEXT_MARKS, call_form, reads_calls, thought_marks
from shared.model.parsing.harmony import HarmonyParser
from shared.model.parsing.json_calls import CallForm, JsonCalls
from shared.model.parsing.pieces import Parser, Piece, merged
from shared.model.parsing.reasoning import ReasoningParser

INPUT = "input"  # the argument of a custom tool's function


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the answers of a request are parsed; a part of its record, so that a gateway that
    resumes it parses alike."""

    reasoning: str = ""  # the form's name, or its JSON; empty: not at all
    tool_calls: str = ""  # the same, or of FORCED
    names: Sequence[str] = ()  # of the functions
    max_calls: int = 0  # those beyond are dropped; 0: none is
    texts: Sequence[str] = ()  # the parameters, as function.parameter, whose values are texts as they stand
    customs: Sequence[
        str
    ] = ()  # of the names, those of custom tools: the one argument is a text, which the client gets as it is
    is_legacy: bool = False  # the client knows one function_call, and no tool_calls

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a marker may be a special token, which is no text unless asked for."""
        return self.reasoning not in ("", *TEXT_MARKS) or reads_calls(self.tool_calls)


class ForcedCall:
    """Parser of an answer that is nothing but one function's arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Piece]:
        text = text if self._has_begun else text.lstrip()
        if not text:
            return []
        call = [] if self._has_begun else [Piece("call", self.name)]
        self._has_begun = True
        return [*call, Piece("arguments", text)]

    def finish(self) -> list[Piece]:
        return []


FORCED: dict[str, Callable[[frozenset[str]], Parser]] = {
    "calls": lambda names: JsonCalls(CallForm(may_be_bare=True, has_prose=False), names),
    "arguments": lambda names: ForcedCall(next(iter(names))),
}


class AnswerParser:
    def __init__(self, parsing: Parsing) -> None:
        names = frozenset(parsing.names)
        self._reasoning = make_reasoning_parser(parsing, names)
        # a later version's form, in a record that this one resumes, is read as text
        has_calls = parsing.tool_calls in FORCED or (reads_calls(parsing.tool_calls) and parsing.tool_calls != HARMONY)
        self._tool_calls = make_tool_parser(parsing.tool_calls, names, frozenset(parsing.texts)) if has_calls else None
        self._max_calls = parsing.max_calls
        self._num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the model thinks, as far as the text says."""
        return self._reasoning is not None and self._reasoning.is_inside

    def feed(self, text: str) -> list[Piece]:
        return merged(
            self._bounded(
                self._into_calls(
                    self._reasoning.feed(text) if self._reasoning is not None else [Piece("content", text)]
                )
            )
        )

    def finish(self) -> list[Piece]:
        pieces = self._into_calls(self._reasoning.finish() if self._reasoning is not None else [])
        return merged(self._bounded(pieces + (self._tool_calls.finish() if self._tool_calls is not None else [])))

    def _into_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tool_calls is None:
            return pieces
        return [
            found
            for piece in pieces
            for found in (self._tool_calls.feed(piece.text) if piece.kind == "content" else [piece])
        ]

    def _bounded(self, pieces: list[Piece]) -> list[Piece]:
        kept = []
        for piece in pieces:
            self._num_calls += piece.kind == "call"
            if not self._max_calls or piece.kind not in ("call", "arguments") or self._num_calls <= self._max_calls:
                kept.append(piece)
        return kept


def make_reasoning_parser(parsing: Parsing, names: frozenset[str]) -> ReasoningParser | HarmonyParser | None:
    if parsing.reasoning == HARMONY:
        return HarmonyParser(names)
    marks = thought_marks(parsing.reasoning)
    return ReasoningParser(marks) if marks is not None else None


def make_tool_parser(name: str, names: frozenset[str], texts: frozenset[str] = frozenset()) -> Parser:
    """A fresh parser of the form of that name, of calls of these functions. texts: as of
    Parsing."""
    form = call_form(name)
    return form.parser(names, texts) if form is not None else (OTHERS | FORCED)[name](names)
