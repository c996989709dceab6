"""Sampling parameters in bodies: the fields that an API's schema has for them, from their
declaration."""

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, create_model

from services.requests.bodies.body import Body
from services.requests.bodies.fields import at_most
from shared.model.sampling_params import Api, Parameter, SamplingParams, make_params, parameters_of
from shared.process.errors import Invalid

B = TypeVar("B", bound=Body)

TOKEN_ID = re.compile("0|-?[1-9][0-9]{0,18}")

# The type of a body's field, by that of the parameter
TYPES: dict[Any, Any] = {
    int: int | None,
    int | None: int | None,
    float: float | None,
    bool: bool,
    tuple[str, ...]: list[str] | None,
    tuple[int, ...]: list[int] | None,
    dict[int, float]: dict[str, float] | None,
}
PASSED_ON: tuple[Api, ...] = ("anthropic", "responses")  # whose bodies become chats, which check the values


def takes_parameters(api: Api) -> Callable[[type[B]], type[B]]:
    """A class decorator that adds the API's sampling parameters to a body. A parameter whose form is
    the API's own is a field that the class has already."""

    def add(body: type[B]) -> type[B]:
        parameters = parameters_of(api)
        fields: dict[str, Any] = {name: _field_of(each, api) for name, each in parameters.items()}
        if api == "openai":
            fields |= {each.also: _other_name_of(each) for each in parameters.values() if each.also}
        missing = {name: field for name, field in fields.items() if name not in body.model_fields}
        made = create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **missing)
        made.sampling_parameters = parameters
        return made

    return add


def _field_of(parameter: Parameter, api: Api) -> tuple[Any, Any]:
    """The type and the description of a body's field."""
    if api in PASSED_ON:
        return Any, Field(None, description=parameter.description)
    kind = TYPES[parameter.value_type]
    if parameter.max_items:
        kind = Annotated[kind, BeforeValidator(at_most(parameter.max_items))]
    return kind, Field(parameter.default if kind is bool else None, description=parameter.description)


def _other_name_of(parameter: Parameter) -> tuple[Any, Any]:
    low, high = parameter.bounds or (-math.inf, math.inf)
    return TYPES[parameter.value_type], Field(
        None, ge=low, le=high, description=f"llama.cpp's name of {parameter.name}"
    )


def given_values(body: Body) -> dict[str, Any]:
    """The parameters that a body gives, by their names in OpenAI's API, as the client wrote them."""
    given = {each.name: getattr(body, name) for name, each in body.sampling_parameters.items()}
    return {name: value for name, value in given.items() if value is not None}


def params_of(body: Body, **own: Any) -> SamplingParams:
    """The checked params of a body of OpenAI's API. own: values that are not the body's; None: the
    default. Raises Invalid."""
    values = {
        each.name: _as_param(each, getattr(body, name))
        for name, each in body.sampling_parameters.items()
        if name not in own
    }
    return make_params(values | own)


def _as_param(parameter: Parameter, value: Any) -> Any:
    """A body's value as that of a field of SamplingParams."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, dict):
        for token in value:
            if not TOKEN_ID.fullmatch(token):  # int() takes "1_0" and " 10", too: two keys of one token
                raise Invalid(f"{parameter.name} takes token ids as keys, got {token[:20]!r}", param=parameter.name)
        return {int(token): each for token, each in value.items()}
    is_off = parameter.off is not None and value is not None and parameter.off[0] <= value <= parameter.off[1]
    return None if is_off else value
