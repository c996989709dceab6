"""The lines of a batch's input: each line is a request."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from services.requests.bodies.fields import kind_of, shortened
from services.requests.bodies.parse import read_object
from shared.process.errors import Invalid

MAX_LINES = 50_000
MAX_CUSTOM_ID = 512
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch."""

    custom_id: str
    body: dict[str, Any]


def lines_of(file: IO[bytes], longest: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers, each as far as `longest` bytes."""
    number = 0
    while line := file.readline(longest):
        number, rest = number + 1, line
        while not rest.endswith(b"\n") and (rest := file.readline(longest)):
            pass
        text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
        if text:
            yield number, text


def read_line(text: bytes, endpoint: str, max_bytes: int) -> BatchLine:
    """Raises Invalid for what is no request, but for what the endpoint itself makes of the body."""
    if len(text) > max_bytes:
        raise Invalid(f"the line has {len(text)} bytes, at most {max_bytes} are taken", code="line_too_long")
    value = read_object(text, "line", "invalid_json_line")
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise Invalid(
            f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters", param="custom_id", code="invalid_custom_id"
        )
    if unknown := next((name for name in value if name not in FIELDS), None):
        raise Invalid(
            f"unknown or unsupported field: {shortened(unknown)}", param=shortened(unknown), code="unknown_parameter"
        )
    if value.get("method") != "POST":
        raise Invalid("method must be POST", param="method", code="invalid_method")
    if value.get("url") != endpoint:
        raise Invalid(f"url must be the batch's endpoint, {endpoint}", param="url", code="mismatched_endpoint")
    if not isinstance(body, dict):
        raise Invalid(f"body must be an object, got {kind_of(body)}", param="body", code="invalid_body")
    if not isinstance(body.get("model"), str):
        raise Invalid("body.model must name a model", param="body.model", code="missing_required_parameter")
    return BatchLine(custom_id, body)
