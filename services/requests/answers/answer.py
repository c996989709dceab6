"""Answer: a chat's text, parsed, as OpenAI's clients read it: an assistant's message, or the deltas that make one."""

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from services.requests.parsing.answer import INPUT, AnswerParser, Parsing
from services.requests.parsing.pieces import Piece, merged

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(slots=True)
class Call:
    call_id: str
    name: str
    arguments: list[str]
    is_custom: bool = False


class Answer:
    """What was made of the text so far; and of the last event, what is new."""

    def __init__(self, parsing: Parsing, name: str, *, has_reasoning: bool) -> None:
        """name: of the choice; the ids of its calls are made of it, so that whoever reads the answer again finds the same."""
        self.fresh: list[Piece] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[Call] = []
        self.num_reasoning_tokens = 0
        self.is_reasoning_model = bool(parsing.reasoning)
        self._parser = AnswerParser(parsing)
        self._parsing = parsing
        self._name = name
        self._has_reasoning = has_reasoning
        self._held: list[str] | None = None  # the arguments so far of the call of a custom tool that is being made

    def _with_inputs(self, pieces: list[Piece], *, is_end: bool) -> list[Piece]:
        """The same with the input of each call of a custom tool, once it is whole, in the place of its arguments, which are held until then."""
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
        """Whether it ends with calls that the model chose to make. (OpenAI's answers to a named tool_choice end with stop.)"""
        return bool(self.calls) and self._parsing.tool_calls != "arguments"

    def add(self, text: str, *, is_end: bool) -> None:
        """The text of one event, which is one token."""
        pieces = self._parser.feed(text)
        self.num_reasoning_tokens += self._parser.is_reasoning or any(piece.kind == "reasoning" for piece in pieces)
        if is_end:
            pieces = merged(pieces + self._parser.finish())
        if self._parsing.customs:
            pieces = self._with_inputs(pieces, is_end=is_end)
        self.fresh = [piece for piece in pieces if piece.kind != "reasoning" or self._has_reasoning]
        for piece in self.fresh:
            if piece.kind == "content":
                self.content.append(piece.text)
            elif piece.kind == "reasoning":
                self.reasoning.append(piece.text)
            elif piece.kind == "call":
                self.calls.append(Call(self._call_id(len(self.calls)), piece.text, [], piece.text in self._parsing.customs))
            else:
                self.calls[-1].arguments.append(piece.text)

    def message(self) -> dict[str, Any]:
        """The message's fields, but for its role."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        made: dict[str, Any] = {"content": content if content or not (self.calls or reasoning) else None}
        if self.is_reasoning_model and self._has_reasoning:
            made |= {"reasoning_content": reasoning or None, "reasoning": reasoning or None}
        if self.calls and self.is_legacy:
            made["function_call"] = {"name": self.calls[0].name, "arguments": "".join(self.calls[0].arguments)}
        elif self.calls:
            made["tool_calls"] = [call_entry(call, "".join(call.arguments)) for call in self.calls]
        return made

    def _call_id(self, number: int) -> str:
        """Mistral's templates take ids of nine letters and digits only."""
        digest = int.from_bytes(hashlib.blake2b(f"{self._name}.{number}".encode(), digest_size=24).digest())
        length = 9 if self._parsing.tool_calls == "mistral" else 24
        letters = "".join(LETTERS[digest // len(LETTERS) ** place % len(LETTERS)] for place in range(length))
        return letters if self._parsing.tool_calls == "mistral" else f"call_{letters}"


def call_entry(call: Call, arguments: str) -> dict[str, Any]:
    """Of tool_calls."""
    if call.is_custom:
        return {"id": call.call_id, "type": "custom", "custom": {"name": call.name, "input": arguments}}
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def input_of(arguments: str) -> str:
    """A custom tool's input: the one argument that its function has; what a model broke off, or made otherwise, is given as it wrote it."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def delta_of(answer: Answer) -> dict[str, Any]:
    """What the last event added; one delta, so that no connection breaks in the middle of an event."""
    delta: dict[str, Any] = {}
    number = len(answer.calls) - sum(piece.kind == "call" for piece in answer.fresh) - 1  # of the call that is being made
    for piece in answer.fresh:
        if piece.kind == "content":
            delta["content"] = delta.get("content", "") + piece.text
        elif piece.kind == "reasoning":
            thought = delta.get("reasoning", "") + piece.text
            delta |= {"reasoning_content": thought, "reasoning": thought}
        elif piece.kind == "call":
            number += 1
            delta.setdefault("tool_calls", []).append({"index": number, **call_entry(answer.calls[number], "")})
        else:
            kind, field = ("custom", "input") if answer.calls[number].is_custom else ("function", "arguments")
            entries = delta.setdefault("tool_calls", [])
            if not entries or entries[-1]["index"] != number:
                entries.append({"index": number, kind: {field: ""}})
            entries[-1][kind][field] += piece.text
    if answer.is_legacy and "tool_calls" in delta:
        delta["function_call"] = delta.pop("tool_calls")[0]["function"]
    return delta
