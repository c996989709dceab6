"""A batch's output: a part for each block of lines, written once that is answered, and at the end
the two files of the API.

A part is there whole or not at all, and its name says what it counts: so the names say how far the
batch is after any worker's death. Synchronous: it runs outside the event loop.
"""

import itertools
from dataclasses import astuple, dataclass, replace
from typing import Any

import orjson

from services.jobs.input import folder_of
from services.requests.errors import error_body
from services.requests.store.batches.store import Totals
from services.requests.store.files.storage import Storage
from shared.wire.messages import RequestError

# What JSON leaves raw in its texts, and Unicode calls the end of a line: Python's splitlines() and
# others would cut a line there
LINE_ENDS = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029"]
COMPLETED, FAILED = b"+", b"-"  # what a line of a part begins with: the file that it goes to


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """A line of the output."""

    line: bytes  # empty if it is in the spool
    totals: Totals
    spooled: tuple[str, int, int] | None = None  # path, first byte, end

    @property
    def is_completed(self) -> bool:
        return bool(self.totals.completed)


def answered(key: str, custom_id: str, status: int, body: Any, totals: Totals) -> AnsweredLine:
    """An answer of the API, good or bad, to the request with this key."""
    response = {"status_code": status, "request_id": key, "body": body}
    return _answer(key, custom_id, response, None, totals)


def refused(key: str, custom_id: str, error: RequestError) -> AnsweredLine:
    """A request that failed, with the body that the API would have answered."""
    body = error_body(error.status, error.message, error.param, error.code)
    return answered(key, custom_id, error.status, body, Totals(failed=1))


def not_answered(key: str, custom_id: str, code: str, message: str) -> AnsweredLine:
    """A request that was not executed."""
    return _answer(key, custom_id, None, {"code": code, "message": message}, Totals(not_executed=1))


def _answer(key: str, custom_id: str, response: Any, error: Any, totals: Totals) -> AnsweredLine:
    made = {"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": error}
    line = orjson.dumps(made, option=orjson.OPT_SERIALIZE_NUMPY)
    for raw, escaped in LINE_ENDS:
        line = line.replace(raw, escaped)
    return AnsweredLine(line, totals)


def spool_folder(batch_id: str) -> str:
    return f"{folder_of(batch_id)}/laid-by"


def spool(storage: Storage, path: str, answers: list[AnsweredLine]) -> list[AnsweredLine]:
    """Write what a block has so far into a file that is for this run only. Returns the same
    answers, without their lines."""
    storage.write(path, b"".join(answer.line for answer in answers))
    ends = itertools.accumulate(len(answer.line) for answer in answers)
    return [
        replace(answer, line=b"", spooled=(path, end - len(answer.line), end))
        for answer, end in zip(answers, ends, strict=True)
    ]


def write_part(storage: Storage, batch_id: str, number: int, answers: list[AnsweredLine]) -> Totals:
    """Keep the answers to a block. Returns what they count. Raises FileNotFoundError if what was
    laid by is gone."""
    totals = sum((answer.totals for answer in answers), Totals())
    name = ".".join(map(str, (f"{number:06}", *astuple(totals))))
    with storage.writing(f"{folder_of(batch_id)}/parts/{name}") as file:
        for answer in answers:
            line = storage.read(*answer.spooled) if answer.spooled is not None else answer.line
            file.writelines((COMPLETED if answer.is_completed else FAILED, line, b"\n"))
    for path in {answer.spooled[0] for answer in answers if answer.spooled is not None}:
        storage.remove(path)
    return totals


def find_parts(storage: Storage, batch_id: str) -> dict[int, str]:
    """The names of the parts by their numbers. Two workers may have written one, the first unaware
    of losing its lease: one of them counts."""
    return {int(name.partition(".")[0]): name for name in reversed(storage.names(f"{folder_of(batch_id)}/parts"))}


def totals_of(name: str) -> Totals:
    """The totals of a part, from its name."""
    return Totals(*map(int, name.split(".")[1:]))


def assemble(storage: Storage, batch_id: str, names: list[str], path: str, mark: bytes) -> int:
    """Write one of the two files from the parts in order. Returns its size in bytes; an empty one
    is not kept. Raises FileNotFoundError if a part is gone."""
    num_bytes = 0
    with storage.writing(path) as file:
        for name in names:
            with storage.open(f"{folder_of(batch_id)}/parts/{name}") as part:
                for line in part:
                    if line.startswith(mark):
                        num_bytes += file.write(memoryview(line)[1:])
    if not num_bytes:
        storage.remove(path)
    return num_bytes
