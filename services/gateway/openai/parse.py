"""A body's bytes to a body, checked. Pure, and in time linear in its size: it runs in the gateway or, for long bodies, in its helper process."""

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import ValidationError

from services.gateway.openai.fields import kind_of
from services.gateway.openai.schemas import Body, ChatCompletionBody, CompletionBody
from services.gateway.openai.tokenize import DetokenizeBody, TokenizeBody
from shared.errors import Invalid

BODIES: dict[str, type[Body]] = {
    "chat": ChatCompletionBody, "completion": CompletionBody, "tokenize": TokenizeBody, "detokenize": DetokenizeBody,
}  # fmt: skip


def parse(kind: str, data: bytes) -> Body:
    """Raises Invalid (400), naming the first field that is wrong."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Invalid(f"the body must be a JSON object, got {kind_of(value)}", code="invalid_json")
    try:
        return BODIES[kind].model_validate(value)
    except ValidationError as error:
        message, param = describe(error.errors(include_url=False, include_input=False))
        raise Invalid(message, param=param) from None


def describe(errors: Sequence[Any]) -> tuple[str, str | None]:
    """The first of pydantic's errors in one sentence, and the field it is about."""
    first = errors[0]
    # ("messages", 0, "content"): a union puts type names between the parts of the path
    path = [part for part in first["loc"] if not (isinstance(part, str) and ("[" in part or part in ("str", "int", "float", "bool")))]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path) + str(first.get("ctx", {}).get("at", ""))
    name = name.lstrip(".")
    if first["type"] == "extra_forbidden":
        return f"unknown or unsupported field: {name}", name
    return f"{name or 'the body'}: {first['msg']}", name or None
