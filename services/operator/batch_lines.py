"""The lines of a file of requests, before it is sent. One that is no request would fail the whole
batch: it is left out, and has an answer of its own."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson

from services.requests.store.batches.lines import MAX_LINES, lines_of, read_line
from shared.process.errors import Invalid, StartupError

MAX_LINE_BYTES = 64 << 20  # that is looked at


@dataclass(slots=True)
class Sifted:
    """A file of requests, looked through."""

    endpoint: str = ""  # of its first request; the others must ask for the same
    custom_ids: set[str] = field(default_factory=set)
    refused: dict[int, Invalid] = field(default_factory=dict)  # by line

    def take(self, number: int, line: bytes) -> None:
        """Look at one line."""
        try:
            read = read_line(line, self.endpoint or url_of(line), MAX_LINE_BYTES - 1)
            if read.custom_id in self.custom_ids:
                raise Invalid("the custom_id has been there before", param="custom_id", code="duplicate_custom_id")
        except Invalid as error:
            self.refused[number] = error
            return
        self.endpoint = self.endpoint or url_of(line)
        self.custom_ids.add(read.custom_id)

    def answers(self) -> bytes:
        """The answers of the lines that were left out, as a batch's file of errors has them. What
        such a line calls itself is not to be relied on, so its number names it."""
        return b"".join(
            orjson.dumps(
                {
                    "id": f"line_{number}",
                    "custom_id": None,
                    "response": None,
                    "error": {"code": error.code, "message": str(error), "param": error.param, "line": number},
                }
            )
            + b"\n"
            for number, error in self.refused.items()
        )


def sift(source: Path, file: IO[bytes]) -> Sifted:
    """Look through a file. Beyond the most lines of a batch nothing is looked at: the gateway refuses
    such a file. Raises StartupError for one that asks for nothing."""
    found = Sifted()
    for number, line in lines_of(file, MAX_LINE_BYTES):
        if max(len(found.custom_ids), len(found.refused)) > MAX_LINES:
            break
        found.take(number, line)
    if not found.endpoint:
        raise StartupError(f'{source}: no line is a request: {{"custom_id": …, "method": "POST", "url": …, "body": …}}')
    return found


def url_of(line: bytes) -> str:
    """The endpoint that a line asks for; empty: it is no request."""
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
