"""A conversation so far, and the part of it that still fits into the model's context."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MOST_ROOM = 1024  # tokens that are kept free for an answer, at most
BYTES_A_TOKEN = 3  # of a question whose tokens are not counted yet; English has more


@dataclass(slots=True)
class ChatTurn:
    """A question and its answer."""

    question: str
    answer: str
    num_tokens: int = 0  # in the context; 0 if the server did not count
    images: tuple[str, ...] = ()  # of the question, as data URLs


@dataclass(slots=True)
class ChatHistory:
    system: str = ""
    turns: list[ChatTurn] = field(default_factory=list)

    def messages(self, question: str, images: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """As Chat Completions wants them. images: of the question, as data URLs."""
        messages: list[tuple[str, Any]] = [("system", self.system)] if self.system else []
        for turn in self.turns:
            messages += [("user", content_of(turn.question, turn.images)), ("assistant", turn.answer)]
        return [
            {"role": role, "content": content} for role, content in [*messages, ("user", content_of(question, images))]
        ]

    def add(self, question: str, answer: str, total_tokens: int, images: tuple[str, ...] = ()) -> None:
        """total_tokens: of the whole conversation as the server counted it; 0: it did not."""
        self.turns.append(
            ChatTurn(question, answer, max(0, total_tokens - sum(turn.num_tokens for turn in self.turns)), images)
        )

    def trim(self, question: str, max_model_len: int) -> int:
        """Drop the oldest turns until the question fits, with room for an answer. Returns how many that were.

        The server has the last word: a question is only an estimate until it has counted it.
        """
        room = min(MOST_ROOM, max_model_len // 4)
        wanted = len(question.encode()) // BYTES_A_TOKEN + room
        num_dropped = 0
        while self.turns and sum(turn.num_tokens for turn in self.turns) + wanted > max_model_len:
            del self.turns[0]
            num_dropped += 1
        return num_dropped

    def save(self, path: Path, model: str) -> None:
        """Write it down, as Chat Completions' messages (.json) or as Markdown. Raises OSError,
        FileExistsError among them.
        """
        speeches: list[tuple[Literal["System", "You"] | str, str]] = [("System", self.system)] if self.system else []
        for turn in self.turns:
            speeches += [("You", turn.question), (model, turn.answer)]
        if path.suffix == ".json":
            roles = {"System": "system", "You": "user"}
            messages = [{"role": roles.get(name, "assistant"), "content": content} for name, content in speeches]
            text = json.dumps(messages, ensure_ascii=False, indent=2)
        else:
            text = "\n\n".join(f"## {name}\n\n{content}" for name, content in speeches)
        with path.open("x", encoding="utf-8") as file:
            file.write(text + "\n")


def content_of(question: str, images: tuple[str, ...]) -> str | list[dict[str, Any]]:
    """A message's content: the images, then the text."""
    return (
        [*({"type": "image_url", "image_url": {"url": url}} for url in images), {"type": "text", "text": question}]
        if images
        else question
    )
