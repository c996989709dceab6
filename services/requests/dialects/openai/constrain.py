"""The fields by which clients say what an answer must match, as one Constraint: OpenAI's
response_format, vLLM's structured_outputs, and its older guided_*."""

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.requests.bodies.fields import kind_of, refuse_unknown, shortened
from shared.model.constraint import Constraint, Kind
from shared.model.json_text import check_depth, check_text
from shared.process.errors import Invalid

FORMATS = ("text", "json_object", "json_schema", "structural_tag")


class StructuredOutputs(BaseModel):
    """vLLM's object."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: str | bool | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = Field(
        None, description="a regular expression of what may stand between two parts of a JSON text"
    )
    disable_any_whitespace: bool = False
    disable_fallback: bool | None = None  # there is one engine

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        if isinstance(value, dict):
            refuse_unknown({field.alias or name for name, field in cls.model_fields.items()}, value)
        return value


def constraint_of(
    response_format: dict[str, Any] | None, structured_outputs: StructuredOutputs | None, guided: Mapping[str, Any]
) -> Constraint | None:
    """The constraint on the answer, by whichever of the fields is there; None: there is none.
    guided: the guided_* fields by name.

    Raises Invalid for what is malformed, and for more than one.
    """
    found = [
        _of_response_format(response_format) if response_format is not None else None,
        *(_of_structured_outputs(structured_outputs) if structured_outputs is not None else ()),
        *(_of_guided(name, value) for name, value in guided.items() if value is not None),
    ]
    given = [constraint for constraint in found if constraint is not None]
    for other in given[1:]:
        if (other.kind, other.text) != (
            given[0].kind,
            given[0].text,
        ):  # some clients say one thing under two names, for servers of either kind
            raise Invalid(
                f"{given[0].param} and {other.param} say different things of what the answer must match: give one",
                param=other.param,
            )
    return given[0] if given else None


def _of_response_format(value: dict[str, Any]) -> Constraint | None:
    kind = value.get("type")
    if kind not in FORMATS:
        got = kind_of(kind) if not isinstance(kind, str) else repr(shortened(kind))
        raise Invalid(
            f"response_format.type must be one of {', '.join(FORMATS)}, got {got}", param="response_format.type"
        )
    if kind == "structural_tag":
        return Constraint("structural_tag", to_json(value, "response_format"), "response_format")
    own = {"json_schema": "json_schema", "json_object": "schema"}.get(kind, "type")
    _refuse_others(value, ("type", own), "response_format")
    if kind == "text":
        return None
    if kind == "json_schema":
        return _of_json_schema(value.get("json_schema"))
    if value.get("schema") is not None:  # llama.cpp's way to say it
        return Constraint(
            "json_schema", to_json(value["schema"], "response_format.schema"), "response_format.schema", is_lenient=True
        )
    return Constraint("json_object", "", "response_format")


def _of_json_schema(value: Any) -> Constraint:
    """OpenAI's object. With strict, what can't be enforced is an error; without, it is passed over
    and named."""
    param = "response_format.json_schema"
    if not isinstance(value, dict):
        raise Invalid(f"{param} must be an object with a schema, got {kind_of(value)}", param=param)
    _refuse_others(value, ("name", "description", "schema", "strict"), param)
    for name, kinds in (("name", (str,)), ("description", (str, type(None))), ("strict", (bool, type(None)))):
        if name in value and not isinstance(value[name], kinds):
            raise Invalid(f"{param}.{name} can't be {kind_of(value[name])}", param=f"{param}.{name}")
    if "schema" not in value:
        return Constraint("json_object", "", param)
    schema = value["schema"]
    return Constraint(
        "json_schema", to_json(schema, f"{param}.schema"), f"{param}.schema", is_lenient=value.get("strict") is not True
    )


def _of_structured_outputs(value: StructuredOutputs) -> list[Constraint | None]:
    whitespace: dict[str, Any] = {"whitespace_flexible": False} if value.disable_any_whitespace else {}
    if value.whitespace_pattern is not None:
        whitespace["whitespace_pattern"] = value.whitespace_pattern
    found = []
    for name, given in (
        ("json", value.json_),
        ("regex", value.regex),
        ("choice", value.choice),
        ("grammar", value.grammar),
        ("structural_tag", value.structural_tag),
    ):
        found.append(None if given is None else _of_vllm(name, given, f"structured_outputs.{name}", whitespace))
    if value.json_object:
        found.append(
            _of_vllm("json", {"type": "object"}, "structured_outputs.json_object", whitespace)
            if whitespace
            else Constraint("json_object", "", "structured_outputs.json_object")
        )
    return found


def _of_guided(name: str, value: Any) -> Constraint:
    return _of_vllm("json" if name == "json_schema" else name.removeprefix("guided_"), value, name, {})


def _of_vllm(name: str, value: Any, param: str, whitespace: dict[str, Any]) -> Constraint:
    """vLLM's five ways. whitespace: the engine's options of a JSON schema."""
    if name == "json":
        schema = _read_json(value, param) if isinstance(value, str) else value
        if whitespace:
            schema = {} if schema is True else schema
            if not isinstance(schema, dict):
                raise Invalid(f"{param}: a JSON schema is an object", param=param)
            own = schema.get("x-guidance")
            schema = {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **whitespace}}
        return Constraint("json_schema", to_json(schema, param), param, is_lenient=True)
    if name == "choice":
        return Constraint("choice", to_json(value, param), param)
    if name == "structural_tag":
        return Constraint(
            "structural_tag", _checked(value, param) if isinstance(value, str) else to_json(value, param), param
        )
    kind: Kind = "regex" if name == "regex" else "gbnf" if "::=" in value else "lark"
    return Constraint(kind, value, param)


def to_json(value: Any, param: str) -> str:
    """The value as the text of a constraint. Raises Invalid, naming the field."""
    try:
        check_depth(value)
        return orjson.dumps(value).decode()
    except (TypeError, ValueError) as error:
        raise Invalid(f"{param}: {error}", param=param) from None


def _checked(text: str, param: str) -> str:
    try:
        check_text(text)
    except ValueError as error:
        raise Invalid(f"{param}: {error}", param=param) from None
    return text


def _read_json(text: str, param: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Invalid(f"{param} is not JSON: {error}", param=param, code="invalid_json_schema") from None


def _refuse_others(value: dict[str, Any], allowed: tuple[str, ...], param: str) -> None:
    for key in value:
        if key not in allowed and value[key] is not None:
            raise Invalid(f"unknown or unsupported field: {param}.{shortened(key)}", param=f"{param}.{shortened(key)}")
