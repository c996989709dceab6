"""Answer: a chat's text, parsed, and Delta: what one event adds to it. Both are of no API: each API
has its own way to write them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from shared.model.parsing.answer import INPUT, AnswerParser, Parsing
from shared.model.parsing.pieces import Piece, merged
from shared.wire.logprobs import TokenLogprob

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(slots=True)
class Call:
    call_id: str
    name: str
    arguments: list[str]
    is_custom: bool = False


@dataclass(slots=True)
class CallDelta:
    """A part of a call: its beginning, more of its arguments, or both."""

    number: int  # of the answer's calls
    call: Call
    arguments: str = ""
    is_new: bool = False


@dataclass(slots=True)
class Delta:
    """The part of an answer that one event adds."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    kinds: list[str] = field(
        default_factory=list
    )  # of these three those that are there, in the order in which they began
    logprobs: Sequence[TokenLogprob] | None = None  # None: not requested
    finish_reason: str | None = None  # None: the choice goes on
    stop_reason: str | int | None = None

    @property
    def is_told(self) -> bool:
        """Whether a client hears of it."""
        return (
            bool(self.kinds) or self.finish_reason is not None or any(not each.is_end for each in self.logprobs or ())
        )

    def add_content(self, text: str) -> None:
        self._note("content")
        self.content += text

    def add_reasoning(self, text: str) -> None:
        self._note("reasoning")
        self.reasoning += text

    def add_call(self, part: CallDelta) -> None:
        self._note("calls")
        if self.calls and self.calls[-1].number == part.number:
            self.calls[-1].arguments += part.arguments
        else:
            self.calls.append(part)

    def _note(self, kind: str) -> None:
        if kind not in self.kinds:
            self.kinds.append(kind)


class Answer:
    """The answer so far."""

    def __init__(self, parsing: Parsing, name: str, *, has_reasoning: bool) -> None:
        """name: of the choice; the ids of its calls are made of it, so that every reader of
        the answer finds the same."""
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[Call] = []
        self.num_reasoning_tokens = 0
        self.is_reasoning_model = bool(parsing.reasoning)
        self._parser = AnswerParser(parsing)
        self._parsing = parsing
        self._name = name
        self.has_reasoning = has_reasoning
        self._held: list[str] | None = None  # the arguments so far of the call of a custom tool that is being made

    def _with_inputs(self, pieces: list[Piece], *, is_end: bool) -> list[Piece]:
        """Put each custom tool's input in the place of its arguments. The arguments are held until
        the input is whole."""
        made: list[Piece] = []
        for piece in pieces:
            if piece.kind == "call":
                made += self._take_input()
                self._held = [] if piece.text in self._parsing.customs else None
            if piece.kind == "arguments" and self._held is not None:
                self._held.append(piece.text)
            else:
                made.append(piece)
        return made + (self._take_input() if is_end else [])

    def _take_input(self) -> list[Piece]:
        held, self._held = self._held, None
        return [Piece("arguments", input_of("".join(held)))] if held else []

    @property
    def is_legacy(self) -> bool:
        return self._parsing.is_legacy

    @property
    def has_called(self) -> bool:
        """Whether it ends with calls that the model chose to make. (OpenAI's answers to a named
        tool_choice end with stop.)"""
        return bool(self.calls) and self._parsing.tool_calls != "arguments"

    def add(self, text: str, *, is_end: bool) -> Delta:
        """The text of one event, which is one token. Returns what is new."""
        pieces = self._parser.feed(text)
        self.num_reasoning_tokens += self._parser.is_reasoning or any(piece.kind == "reasoning" for piece in pieces)
        if is_end:
            pieces = merged(pieces + self._parser.finish())
        if self._parsing.customs:
            pieces = self._with_inputs(pieces, is_end=is_end)
        delta = Delta()
        for piece in pieces:
            if piece.kind == "content":
                self.content.append(piece.text)
                delta.add_content(piece.text)
            elif piece.kind == "reasoning" and self.has_reasoning:
                self.reasoning.append(piece.text)
                delta.add_reasoning(piece.text)
            elif piece.kind == "call":
                self.calls.append(
                    Call(self._call_id(len(self.calls)), piece.text, [], piece.text in self._parsing.customs)
                )
                delta.add_call(CallDelta(len(self.calls) - 1, self.calls[-1], is_new=True))
            elif piece.kind == "arguments":
                self.calls[-1].arguments.append(piece.text)
                delta.add_call(CallDelta(len(self.calls) - 1, self.calls[-1], piece.text))
        return delta

    def _call_id(self, number: int) -> str:
        """Mistral's templates take ids of nine letters and digits only."""
        digest = int.from_bytes(hashlib.blake2b(f"{self._name}.{number}".encode(), digest_size=24).digest())
        length = 9 if self._parsing.tool_calls == "mistral" else 24
        letters = "".join(LETTERS[digest // len(LETTERS) ** place % len(LETTERS)] for place in range(length))
        return letters if self._parsing.tool_calls == "mistral" else f"call_{letters}"


def input_of(arguments: str) -> str:
    """A custom tool's input: the one argument that its function has; what a model broke off, or
    made otherwise, is given as it wrote it."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
