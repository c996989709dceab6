"""Checks of another server's behaviour: one request each, and what has to hold of its answer; or
how it is refused on purpose.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.deployment import Deployment

PAGE = Path(__file__).parents[2] / "docs" / "use" / "other-apis.md"

Ask = Callable[[str, Any], Any]  # a path and a body to an answer's JSON; of a stream, its events


@dataclass(frozen=True)
class Check:
    what: str
    path: str
    body: Any  # None: GET
    holds: Callable[[Any, Ask], object]  # of the answer
    status: int = 200


@dataclass(frozen=True)
class Refusal:
    """A request refused, or answered otherwise, on purpose."""

    what: str  # the first cell of its row in docs/use/other-apis.md, which says why
    path: str
    body: Any
    status: int
    holds: Callable[[Any], object]


def reply_of(demo: Deployment, path: str, body: Any) -> httpx.Response:
    return demo.get(path) if body is None else demo.post(path, body)


def read(reply: httpx.Response) -> Any:
    """Its JSON; of a stream, the JSON of its events; of another text, that."""
    kind = reply.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]
    return reply.json() if kind.startswith("application/json") else reply.text


def run(check: Check, demo: Deployment) -> None:
    reply = reply_of(demo, check.path, check.body)
    assert reply.status_code == check.status, reply.text
    answer = read(reply)
    assert check.holds(answer, lambda path, body: read(reply_of(demo, path, body))), answer


def refuse(refusal: Refusal, demo: Deployment) -> None:
    reply = reply_of(demo, refusal.path, refusal.body)
    assert reply.status_code == refusal.status, reply.text
    assert refusal.holds(read(reply)), reply.text
    assert f"| {refusal.what} |" in PAGE.read_text(encoding="utf-8"), "the page says why"
