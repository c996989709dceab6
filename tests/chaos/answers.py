"""An answer as it grows, event by event, and how it differs from the one that is known.

The known answer says how much text each sequence has at each position, so that a token that comes
twice or never shows where it happens, and not only at the end.
"""

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any


class Wrong(Exception):
    """The answer is not what it should be. `kind` is doubled, missing or different."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Choice:
    """One sequence's answer."""

    text: str = ""
    logprobs: list[tuple[str, float]] = field(default_factory=list)  # token, logprob
    finish_reason: str | None = None
    num_ends: int = 0  # chunks with a finish_reason
    lengths: dict[int, int] = field(default_factory=dict)  # by position: characters of text up to it

    def add(self, piece: dict[str, Any]) -> None:
        """A chunk's choice, or a whole answer's."""
        self.text += piece_text(piece)
        self.logprobs += piece_logprobs(piece.get("logprobs"))
        if piece.get("finish_reason"):
            self.finish_reason = piece["finish_reason"]
            self.num_ends += 1

    def length_at(self, position: int) -> int:
        positions = list(self.lengths)  # in the order in which they came: rising
        at = bisect_right(positions, position)
        return self.lengths[positions[at - 1]] if at else 0


@dataclass(slots=True)
class Answer:
    """A response so far. `last_id` is where to resume."""

    choices: list[Choice]
    last_id: str | None = None
    response_id: str | None = None
    num_completion_tokens: int | None = None

    @classmethod
    def empty(cls, n: int) -> "Answer":
        return cls([Choice() for _ in range(n)])

    @property
    def positions(self) -> list[int]:
        return parse_positions(self.last_id, len(self.choices))

    def add_chunk(self, chunk: dict[str, Any], event_id: str | None, known: "Answer | None") -> None:
        """A chunk of a stream. Raises Wrong where it does not continue the known answer."""
        self.response_id = chunk.get("id") or self.response_id
        if chunk.get("usage"):
            self.num_completion_tokens = chunk["usage"]["completion_tokens"]
        before = self.positions
        now = before if event_id is None else parse_positions(event_id, len(self.choices))
        if any(after < earlier for after, earlier in zip(now, before, strict=True)):
            raise Wrong("doubled", f"event id {event_id} after {self.last_id}")
        for piece in chunk["choices"]:
            index = piece["index"]
            choice = self.choices[index]
            has_text = bool(piece_text(piece))
            if has_text and now[index] == before[index]:
                raise Wrong(
                    "doubled", f"text at position {now[index]} of choice {index} a second time: {piece_text(piece)!r}"
                )
            choice.add(piece)
            if known is None:
                choice.lengths[now[index]] = len(choice.text)
            elif has_text:
                check_prefix(known.choices[index], choice, index, now[index])
        self.last_id = event_id or self.last_id

    def add_event(self, event: dict[str, Any], known: "Answer | None") -> None:
        """An event of a response. Raises Wrong where its number or its text does not continue the known answer."""
        number, before = event["sequence_number"], -1 if self.last_id is None else int(self.last_id)
        if number != before + 1:
            raise Wrong("doubled" if number <= before else "missing", f"event {number} after {before}")
        self.last_id, choice = str(number), self.choices[0]
        if event["type"] == "response.output_text.delta":
            choice.text += event["delta"]
        if known is None:
            choice.lengths[number] = len(choice.text)
        else:
            check_prefix(known.choices[0], choice, 0, number)

    def add_response(self, response: dict[str, Any]) -> None:
        """A response that has ended. Raises Wrong if it is not what its events said."""
        text = "".join(part["text"] for item in response["output"] for part in item["content"])
        choice = self.choices[0]
        if self.last_id is not None and choice.text != text:
            raise Wrong(difference(choice.text, text), f"the events of {response['id']}: {show(choice.text, text)}")
        choice.text, choice.finish_reason = text, response["status"]
        choice.num_ends += 1
        self.response_id = response["id"]
        self.num_completion_tokens = response["usage"]["output_tokens"]

    def add_whole(self, body: dict[str, Any]) -> None:
        self.response_id = body.get("id")
        self.num_completion_tokens = body["usage"]["completion_tokens"]
        for piece in body["choices"]:
            self.choices[piece["index"]].add(piece)

    def compare(self, known: "Answer", *, was_resumed: bool) -> None:
        """Raises Wrong unless this is the known answer. A resumed stream need not repeat how a
        sequence ended before.
        """
        for index, (choice, right) in enumerate(zip(self.choices, known.choices, strict=True)):
            if choice.text != right.text:
                raise Wrong(difference(choice.text, right.text), f"choice {index}: {show(choice.text, right.text)}")
            if choice.num_ends > 1 and not was_resumed:
                raise Wrong("doubled", f"choice {index}: ended {choice.num_ends} times")
            if choice.finish_reason != right.finish_reason and not (was_resumed and choice.finish_reason is None):
                raise Wrong(
                    "different", f"choice {index}: finish_reason {choice.finish_reason}, not {right.finish_reason}"
                )
            if choice.logprobs != right.logprobs:
                at = next(
                    (at for at, (a, b) in enumerate(zip(choice.logprobs, right.logprobs, strict=False)) if a != b), -1
                )
                pair = (
                    (choice.logprobs[at], right.logprobs[at])
                    if at >= 0
                    else (len(choice.logprobs), len(right.logprobs))
                )
                raise Wrong("different", f"choice {index}: logprob {at} is {pair[0]}, not {pair[1]}")
        counts = self.num_completion_tokens, known.num_completion_tokens
        if not was_resumed and None not in counts and counts[0] != counts[1]:
            raise Wrong("different", f"usage says {counts[0]} completion tokens, not {counts[1]}")


def check_prefix(right: Choice, choice: Choice, index: int, position: int) -> None:
    """Raises Wrong unless `choice`, which has come as far as `position`, is how `right` begins."""
    expected = right.length_at(position)
    if choice.text == right.text[:expected]:
        return
    raise Wrong(
        difference(choice.text, right.text[:expected]),
        f"choice {index} at position {position}: {show(choice.text, right.text[:expected])}",
    )


def piece_text(piece: dict[str, Any]) -> str:
    """The text in a choice of a chunk or of a whole answer, of either endpoint."""
    message = piece.get("delta") or piece.get("message") or {}
    return str(piece.get("text") or message.get("content") or "")


def piece_logprobs(logprobs: dict[str, Any] | None) -> list[tuple[str, float]]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"] or []]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def parse_positions(event_id: str | None, n: int) -> list[int]:
    if event_id is None:
        return [0] * n
    positions = [int(part) for part in event_id.split(",")]
    if len(positions) != n:
        raise Wrong("different", f"event id {event_id!r} for {n} sequences")
    return positions


def difference(text: str, right: str) -> str:
    """A name for what is wrong."""
    if len(text) > len(right):
        return "doubled"
    return "missing" if len(text) < len(right) else "different"


def show(text: str, right: str) -> str:
    at = next((at for at, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), min(len(text), len(right)))
    return json.dumps(
        {"same_characters": at, "got": text[at : at + 60], "known": right[at : at + 60]}, ensure_ascii=False
    )
