"""Answer: a chat's text, parsed, as OpenAI's clients read it: an assistant's message, or the deltas that make one."""

import hashlib
from dataclasses import dataclass
from typing import Any

from services.gateway.parsing.answer import AnswerParser, Parsing
from services.gateway.parsing.pieces import Piece, merged

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(slots=True)
class Call:
    call_id: str
    name: str
    arguments: list[str]


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
        self.fresh = [piece for piece in pieces if piece.kind != "reasoning" or self._has_reasoning]
        for piece in self.fresh:
            if piece.kind == "content":
                self.content.append(piece.text)
            elif piece.kind == "reasoning":
                self.reasoning.append(piece.text)
            elif piece.kind == "call":
                self.calls.append(Call(self._call_id(len(self.calls)), piece.text, []))
            else:
                self.calls[-1].arguments.append(piece.text)

    def message(self) -> dict[str, Any]:
        """The message's fields, but for its role."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        made: dict[str, Any] = {"content": content if content or not (self.calls or reasoning) else None}
        if self.is_reasoning_model and self._has_reasoning:
            made |= {"reasoning_content": reasoning or None, "reasoning": reasoning or None}
        if self.calls:
            made["tool_calls"] = [function_call(call, "".join(call.arguments)) for call in self.calls]
        return made

    def _call_id(self, number: int) -> str:
        """Mistral's templates take ids of nine letters and digits only."""
        digest = int.from_bytes(hashlib.blake2b(f"{self._name}.{number}".encode(), digest_size=24).digest())
        length = 9 if self._parsing.tool_calls == "mistral" else 24
        letters = "".join(LETTERS[digest // len(LETTERS) ** place % len(LETTERS)] for place in range(length))
        return letters if self._parsing.tool_calls == "mistral" else f"call_{letters}"


def function_call(call: Call, arguments: str) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


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
            delta.setdefault("tool_calls", []).append({"index": number, **function_call(answer.calls[number], "")})
        else:
            entries = delta.setdefault("tool_calls", [])
            if not entries or entries[-1]["index"] != number:
                entries.append({"index": number, "function": {"arguments": ""}})
            entries[-1]["function"]["arguments"] += piece.text
    return delta
