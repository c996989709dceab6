"""A body's bytes to a body, checked. Pure, and in time linear in its size: it runs in the gateway
or, for long bodies, in its helper process."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from services.requests.bodies.body import Body
from services.requests.bodies.fields import kind_of, shortened
from services.requests.bodies.ignored import pass_over
from shared.model.json_text import MAX_DEPTH, TooDeep, check_depth
from shared.process.errors import Invalid

MAX_NAMED = 16  # of the wrong fields of a body
MAX_BODY_DEPTH = MAX_DEPTH + 16  # levels: so deep stands no value that may have MAX_DEPTH levels of its own
BRANCHES = (
    "str",
    "int",
    "float",
    "bool",
    "word",
    "named",
    "allowed",
    "own",
    "free",
    "hosted",
)  # of a union, which pydantic puts between the parts of a path
B = TypeVar("B", bound=Body)


def parse(model: type[B] | Mapping[str, type[B]], data: bytes) -> B:
    """The body, as a model or as that of the first field that it has. Raises Invalid (400), naming
    the fields that are wrong.
    """
    value = read_object(data.removeprefix(codecs.BOM_UTF8), "body", "invalid_json")
    return check(model if isinstance(model, type) else invoked(model, value), value)


def read_object(data: bytes, what: str, code: str) -> dict[str, Any]:
    """The JSON object that a client sent, nested no deeper than what handles it can go. what: its
    name in errors; code: of the error for what is no JSON object. Raises Invalid (400)."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if "depth limit" in error.msg:
            raise too_deep("", what) from None
        raise Invalid(f"the {what} is not JSON: {error}", code=code) from None
    if not isinstance(value, dict):
        raise Invalid(f"the {what} must be a JSON object, got {kind_of(value)}", code=code)
    if data.count(b"[") + data.count(b"{") <= MAX_BODY_DEPTH:  # as in a list of a million token ids
        return value
    for field, each in value.items():
        try:
            check_depth(each, MAX_BODY_DEPTH - 1)
        except TooDeep:
            raise too_deep(shortened(field), what) from None
    return value


def too_deep(field: str, what: str) -> Invalid:
    """field: where; empty: not known."""
    reason = f"the {what} is nested deeper than {MAX_BODY_DEPTH} levels"
    return Invalid(f"{field}: {reason}" if field else reason, param=field or None, code="invalid_value")


def invoked(kinds: Mapping[str, type[B]], value: dict[str, Any]) -> type[B]:
    """The kind of a body that came without one: one of its fields says it. Raises Invalid for one
    that could be none.
    """
    for field, kind in kinds.items():
        if field in value:
            return kind
    *fields, last = kinds
    raise Invalid(
        f"missing required parameter: {', '.join(fields)} or {last}",
        param=next(iter(kinds)),
        code="missing_required_parameter",
    )


def check(model: type[B], value: dict[str, Any], rename: Callable[[str], str] = str) -> B:
    """The body that a JSON object is. Raises Invalid (400), naming the fields that are wrong, as
    `rename` calls them."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise describe(error.errors(include_url=False, include_input=False), rename) from None


def take(model: type[B], value: dict[str, Any], rename: Callable[[str], str] = str) -> B:
    """Check a body, and report what it passes over to the innermost `collecting`."""
    body = check(model, value, rename)
    pass_over(*map(rename, body.passed_over))
    return body


def describe(errors: Sequence[Any], rename: Callable[[str], str] = str) -> Invalid:
    """Pydantic's errors in one line; `param` and `code` are of the first."""
    told: dict[str, str] = {}
    for error in errors:
        name = rename(path_of(error))
        told.setdefault(name, sentence(name, error))
    first, *_ = told
    more = f"; and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
    return Invalid("; ".join([*told.values()][:MAX_NAMED]) + more, param=first or None, code=code_of(errors[0]["type"]))


def sentence(name: str, error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown or unsupported field: {name}"
    if error["type"] == "missing":
        return f"missing required parameter: {name}"
    return f"{name or 'the body'}: {error['msg']}"


def path_of(error: Any) -> str:
    """The field as a client would write it: messages[0].content. A union puts type names between
    the parts of the path."""
    path = [part for part in error["loc"] if not (isinstance(part, str) and ("[" in part or part in BRANCHES))]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path) + str(
        error.get("ctx", {}).get("at", "")
    )
    return name.lstrip(".")


def code_of(kind: str) -> str:
    """OpenAI's word for one of pydantic's kinds of errors."""
    if kind == "extra_forbidden":
        return "unknown_parameter"
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"
