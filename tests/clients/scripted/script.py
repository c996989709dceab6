"""The scripted model says the next turn of the script whose phrase is in the conversation.

A script is a JSON file: {"tasks": [{"phrase": "a phrase of the user's", "turns": [{"call": "read",
"arguments": {...}}, {"say": "It holds {found}."}], "find": "a regex"}],
 "otherwise": "..."}
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOL_ANSWER = "<tool_response>"  # a user's message that begins with it is what a tool answered


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: a call of a tool, or text."""

    say: str = ""  # {found}: what `find` finds in the last tool's answer
    call: str = ""  # the tool's name
    arguments: dict[str, Any] | None = None

    def spell(self, found: str) -> str:
        """As the model writes it, calls in Hermes' form."""
        if self.call:
            return f"<tool_call>\n{json.dumps({'name': self.call, 'arguments': self.arguments or {}}, ensure_ascii=False)}\n</tool_call>"  # noqa: E501
        return self.say.replace("{found}", found)


@dataclass(frozen=True, slots=True)
class Task:
    phrase: str
    turns: tuple[Turn, ...]
    find: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Script:
    tasks: tuple[Task, ...]
    otherwise: str

    @classmethod
    def read(cls, path: Path) -> "Script":
        said = json.loads(path.read_text(encoding="utf-8"))
        tasks = [
            Task(each["phrase"], tuple(Turn(**turn) for turn in each["turns"]), each.get("find", ""))
            for each in said["tasks"]
        ]
        return cls(tuple(tasks), said["otherwise"])

    def answer(self, messages: Sequence[Message]) -> str:
        """The next turn. A request that does not offer the turn's tool, such as an agent's for a
        title, gets the text that is said otherwise.
        """
        for task in self.tasks:
            asked_at = max(
                (at for at, each in enumerate(messages) if each.role == "user" and task.phrase in each.text),
                default=None,
            )
            if asked_at is None:
                continue
            later = messages[asked_at + 1 :]
            turn = task.turns[min(sum(each.role == "assistant" for each in later), len(task.turns) - 1)]
            if turn.call and not is_offered(turn.call, messages):
                return self.otherwise
            answers = [each.text for each in later if each.text.startswith(TOOL_ANSWER)]
            found = re.search(task.find, answers[-1]) if task.find and answers else None
            return turn.spell(found[0] if found else "nothing")
        return self.otherwise


def is_offered(tool: str, messages: Sequence[Message]) -> bool:
    return any(each.role == "system" and f'"name": {json.dumps(tool)}' in each.text for each in messages)
