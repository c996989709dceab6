"""A batch's input: checked line by line, and then kept in the order of the custom ids, in blocks of
lines that are read one after the other.

Synchronous: it runs outside the event loop.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import msgpack

from services.requests.bodies.fields import shortened, whole
from services.requests.store.batches.lines import MAX_LINES, BatchLine, lines_of, read_line
from services.requests.store.files.storage import Storage
from shared.process.errors import Invalid

BLOCK_LINES = 100
BLOCK_WEIGHT = 512  # of its lines together: their answers are held until all are there
MAX_ERRORS = 50  # reported for one file
FOLDERS = "batches"


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a check. With errors, nothing was kept."""

    total: int
    model: str  # that all lines name; empty: several
    errors: list[dict[str, Any]]


def folder_of(batch_id: str) -> str:
    """The folder of a batch's working files, until it has ended."""
    return f"{FOLDERS}/{batch_id}"


def check_input(storage: Storage, path: str, batch_id: str, endpoint: str, max_line_bytes: int) -> Checked:
    """Check a file of requests, and keep it in order, should it be right. Raises
    FileNotFoundError."""
    lines: dict[str, tuple[bytes, int]] = {}
    models: set[str] = set()
    errors: list[dict[str, Any]] = []
    with storage.open(path) as file:
        for number, text in lines_of(file, 2 * max_line_bytes):  # far enough to say that one is too long
            try:
                line = read_line(text, endpoint, max_line_bytes)
                if line.custom_id in lines:
                    raise Invalid(
                        f"the custom_id {shortened(line.custom_id)!r} has been there before",
                        param="custom_id",
                        code="duplicate_custom_id",
                    )
                if len(lines) >= MAX_LINES:
                    raise Invalid(f"at most {MAX_LINES} requests in one batch", code="too_many_requests")
            except Invalid as error:
                errors.append({"code": error.code, "line": number, "message": str(error), "param": error.param})
                if len(errors) >= MAX_ERRORS or error.code == "too_many_requests":
                    break
                continue
            lines[line.custom_id] = text, weight_of(line.body)
            models.add(line.body["model"])
    if not lines and not errors:
        errors.append(
            {"code": "empty_file", "line": None, "message": "the file has no requests", "param": "input_file_id"}
        )
    if not errors:
        keep(storage, batch_id, [lines[custom_id] for custom_id in sorted(lines)])
    return Checked(len(lines), next(iter(models)) if len(models) == 1 else "", errors)


def weight_of(body: dict[str, Any]) -> int:
    """How long its answer may be: the sequences that it asks for, and the alternatives of their
    tokens. By a body that is not checked yet."""
    asked = body.get("prompt", body.get("input"))
    num_prompts = sum(isinstance(each, str | list) for each in asked) if isinstance(asked, list) else 1
    numbers = {
        name: value
        for name in ("n", "best_of", "top_logprobs", "logprobs")
        if isinstance(value := whole(body.get(name)), int)
    }
    num_choices = max(1, numbers.get("n", 1), numbers.get("best_of", 1))
    return max(1, num_prompts) * num_choices * (1 + max(0, numbers.get("top_logprobs", 0), numbers.get("logprobs", 0)))


def keep(storage: Storage, batch_id: str, lines: list[tuple[bytes, int]]) -> None:
    """Write the lines, and where each block of them begins. lines: with their weights."""
    sizes: list[int] = []  # of blocks, in bytes
    num_lines = weight = 0  # of the last of them
    with storage.writing(f"{folder_of(batch_id)}/input") as file:
        for line, own in lines:
            if not sizes or num_lines == BLOCK_LINES or weight + own > BLOCK_WEIGHT:
                sizes.append(0)
                num_lines = weight = 0
            sizes[-1] += file.write(line + b"\n")
            num_lines, weight = num_lines + 1, weight + own
    storage.write(f"{folder_of(batch_id)}/index", msgpack.packb(list(itertools.accumulate(sizes, initial=0))))


def read_index(storage: Storage, batch_id: str) -> list[int]:
    """The offsets at which each block begins, and the last one ends. Raises FileNotFoundError."""
    index: list[int] = msgpack.unpackb(storage.read(f"{folder_of(batch_id)}/index"))
    return index


def read_block(storage: Storage, batch_id: str, endpoint: str, start: int, end: int) -> list[BatchLine]:
    """The lines between two places of the index."""
    # not splitlines: JSON may have a bare \r between two values
    texts = storage.read(f"{folder_of(batch_id)}/input", start, end).split(b"\n")
    return [read_line(text, endpoint, end - start) for text in texts if text]
