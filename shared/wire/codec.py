"""A dataclass to msgpack's values and back, by the types of its fields: messages as arrays of their fields, records of Redis as maps of them.

Arrays of numbers are raw little-endian bytes. A field that is missing, in an array at the end, has its default.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np

from shared.process.errors import Invalid

_Converter = Callable[[Any, str], Any]


@cache
def packer(cls: Any) -> Callable[[Any], list[Any]]:
    """What makes a list of a message of this class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    getters = [(f.name, _field_packer(hints[f.name])) for f in fields(cls)]

    def pack(message: Any) -> list[Any]:
        return [getattr(message, name) if convert is None else convert(getattr(message, name)) for name, convert in getters]

    return pack


def _field_packer(hint: Any) -> Callable[[Any], Any] | None:
    """How a field of this type becomes msgpack; None: as it is."""
    if typing.get_origin(hint) is Annotated:
        dtype = np.dtype(hint.__metadata__[0])
        return lambda array: np.ascontiguousarray(array, dtype).tobytes()
    if is_dataclass(hint):
        return packer(typing.cast(type, hint))
    options = _union(hint)
    if options:
        inner = [p for p in map(_field_packer, options) if p is not None]
        return (lambda value: None if value is None else inner[0](value)) if inner else None
    if typing.get_origin(hint) is tuple and (item := _field_packer(typing.get_args(hint)[0])):
        return lambda values: [item(value) for value in values]
    return None


@cache
def unpacker(cls: Any) -> _Converter:
    """What makes a message of this class of a list, called with the path to it; it raises Invalid, naming the field that is wrong."""
    hints = typing.get_type_hints(cls, include_extras=True)
    plan = [(f.name, _field_unpacker(hints[f.name])) for f in fields(cls)]
    required = sum(f.default is MISSING and f.default_factory is MISSING for f in fields(cls))

    def unpack(values: Any, path: str) -> Any:
        if not isinstance(values, list) or not required <= len(values) <= len(plan):
            raise Invalid(f"{path}: expected {required} to {len(plan)} fields")
        return cls(**{name: convert(value, f"{path}.{name}") for (name, convert), value in zip(plan, values, strict=False)})

    return unpack


@cache
def map_unpacker(cls: Any) -> _Converter:
    """As `unpacker`, of a map: what `asdict` makes of a record."""
    hints = typing.get_type_hints(cls, include_extras=True)
    plan = {f.name: _field_unpacker(hints[f.name], map_unpacker) for f in fields(cls)}
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}

    def unpack(values: Any, path: str) -> Any:
        if not isinstance(values, dict) or not required <= values.keys() <= plan.keys():
            raise Invalid(f"{path}: expected a map of {', '.join(plan)}")
        return cls(**{name: plan[name](value, f"{path}.{name}") for name, value in values.items()})

    return unpack


def _field_unpacker(hint: Any, of_class: Callable[[Any], _Converter] = unpacker) -> _Converter:  # noqa: C901 - one branch a kind of type
    """of_class: what unpacks a field that is a dataclass itself."""
    if typing.get_origin(hint) is Annotated:
        dtype = np.dtype(hint.__metadata__[0])

        def array(value: Any, path: str) -> Any:
            if not isinstance(value, bytes) or len(value) % dtype.itemsize:
                raise Invalid(f"{path}: expected the bytes of an array of {dtype}")
            return np.frombuffer(value, dtype)

        return array
    if is_dataclass(hint):
        return of_class(typing.cast(type, hint))
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        return _checked(lambda value: value in allowed, f"one of {allowed}")
    options = _union(hint)
    if options:
        return _any_of([_field_unpacker(option, of_class) for option in options])
    if typing.get_origin(hint) in (tuple, Sequence):
        item = _field_unpacker(typing.get_args(hint)[0], of_class)

        def items(value: Any, path: str) -> Any:
            if not isinstance(value, list):
                raise Invalid(f"{path}: expected an array")
            return tuple(item(each, path) for each in value)

        return items
    if typing.get_origin(hint) is dict:
        key, entry = (_field_unpacker(each, of_class) for each in typing.get_args(hint))

        def mapping(value: Any, path: str) -> Any:
            if not isinstance(value, dict):
                raise Invalid(f"{path}: expected a map")
            return {key(k, path): entry(v, path) for k, v in value.items()}

        return mapping
    if hint is float:
        return _checked(lambda value: type(value) in (float, int), "float")
    return _checked(lambda value: type(value) is hint, getattr(hint, "__name__", str(hint)))


def _union(hint: Any) -> list[Any]:
    """The options of `A | B | None` without None; empty for any other type."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return []
    return [option for option in typing.get_args(hint) if option is not type(None)]


def _any_of(converters: list[_Converter]) -> _Converter:
    def convert(value: Any, path: str) -> Any:
        if value is None:
            return None
        for attempt in converters[:-1]:
            try:
                return attempt(value, path)
            except Invalid:
                continue
        return converters[-1](value, path)

    return convert


def _checked(holds: Callable[[Any], bool], expected: str) -> _Converter:
    def convert(value: Any, path: str) -> Any:
        if not holds(value):
            raise Invalid(f"{path}: expected {expected}, got {type(value).__name__}")
        return value

    return convert
