"""A dataclass to msgpack's values and back, by the types of its fields: messages as arrays of their
fields, records of Redis as maps of them.

Arrays of numbers are raw little-endian bytes. A field that is missing, in an array at the end, has
its default; so defaults at the end are not written, and most of a token's fields are.
"""

from __future__ import annotations

import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import takewhile
from typing import Annotated, Any, Literal, Self

import numpy as np

from shared.process.errors import Invalid

_Converter = Callable[[Any], Any]


class Wrong(Exception):
    """A value that does not fit its type; the fields around it say where it stands."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected
        self.path: list[str] = []  # names of fields, from the inmost one


def converted(converter: _Converter, values: Any, name: str) -> Any:
    """The values, which errors call `name`, as what the converter makes of them. Raises Invalid,
    with the path to the value that is wrong."""
    try:
        return converter(values)
    except Wrong as wrong:
        raise Invalid(f"{'.'.join([name, *reversed(wrong.path)])}: {wrong.expected}") from None


class OwnForm(ABC):
    """A dataclass that knows its own form as msgpack's values, other than an array of its
    fields."""

    __slots__ = ()

    @abstractmethod
    def packed(self) -> Any:
        """It, as msgpack's values."""

    @classmethod
    @abstractmethod
    def unpacked(cls, value: Any) -> Self:
        """The one that was packed so. Raises Wrong for what does not fit."""


@cache
def packer(cls: Any) -> Callable[[Any], list[Any]]:
    """The function that makes a list of a message of this class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    getters = [(f.name, _field_packer(hints[f.name])) for f in fields(cls)]
    defaults = _last_defaults(cls)

    def pack(message: Any) -> list[Any]:
        count = len(getters)
        for name, default in defaults:
            value = getattr(message, name)
            if value is not default and (default is None or value != default):
                break
            count -= 1
        return [getattr(message, name) if convert is None else convert(getattr(message, name)) for name, convert in getters[:count]]

    return pack


def _last_defaults(cls: Any) -> list[tuple[str, Any]]:
    """The names and defaults of the last fields, from the end on, up to the first that has none, or
    has an array or a map."""
    backwards = [(each.name, each.default) for each in reversed(fields(cls))]
    return list(takewhile(lambda each: each[1] is not MISSING, backwards))


def _field_packer(hint: Any) -> Callable[[Any], Any] | None:
    """How a field of this type becomes msgpack; None: as it is."""
    if typing.get_origin(hint) is Annotated:
        dtype = np.dtype(hint.__metadata__[0])
        return lambda array: np.ascontiguousarray(array, dtype).tobytes()
    if isinstance(hint, type) and issubclass(hint, OwnForm):
        return hint.packed
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
    """The function that makes a message of this class of a list. It raises Wrong for a value that
    does not fit."""
    hints = typing.get_type_hints(cls, include_extras=True)
    plan = [(_as_they_are(hints[f.name]), _field_unpacker(hints[f.name], unpacker)) for f in fields(cls)]
    required = len(_required(cls))

    def unpack(values: Any) -> Any:
        if not isinstance(values, list) or not required <= len(values) <= len(plan):
            raise Wrong(f"expected {required} to {len(plan)} fields")
        found = []
        try:
            for (taken, convert), value in zip(plan, values, strict=False):
                found.append(value if type(value) in taken else convert(value))
        except Wrong as wrong:
            wrong.path.append(fields(cls)[len(found)].name)
            raise
        return cls(*found)

    return unpack


@cache
def map_unpacker(cls: Any) -> _Converter:
    """The same as `unpacker`, of a map: what `asdict` makes of a record."""
    hints = typing.get_type_hints(cls, include_extras=True)
    plan = {f.name: _field_unpacker(hints[f.name], map_unpacker) for f in fields(cls)}
    required = _required(cls)

    def unpack(values: Any) -> Any:
        if not isinstance(values, dict) or not required <= values.keys() <= plan.keys():
            raise Wrong(f"expected a map of {', '.join(plan)}")
        found = {}
        for name, value in values.items():
            try:
                found[name] = plan[name](value)
            except Wrong as wrong:
                wrong.path.append(name)
                raise
        return cls(**found)

    return unpack


def _required(cls: Any) -> set[str]:
    """The fields that have no default."""
    return {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}


def _field_unpacker(hint: Any, of_class: Callable[[Any], _Converter]) -> _Converter:
    """of_class: what unpacks a field that is a dataclass itself."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _array_of(np.dtype(hint.__metadata__[0]))
    if isinstance(hint, type) and issubclass(hint, OwnForm):
        return hint.unpacked
    if is_dataclass(hint):
        return of_class(typing.cast(type, hint))
    if origin is Literal:
        return _checked(lambda value: value in arguments, f"one of {arguments}")
    if options := _union(hint):
        return _any_of([_field_unpacker(option, of_class) for option in options])
    if origin in (tuple, Sequence):
        return _items_of(_field_unpacker(arguments[0], of_class))
    if origin is dict:
        return _map_of(*(_field_unpacker(each, of_class) for each in arguments))
    if hint is float:
        return _checked(lambda value: type(value) in (float, int), "float")
    return _checked(lambda value: type(value) is hint, getattr(hint, "__name__", str(hint)))


def _as_they_are(hint: Any) -> frozenset[type]:
    """The types of msgpack's values that need no look for a field of this type: most are such, and
    a call for each would cost as much as all the rest."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return frozenset().union(*map(_as_they_are, typing.get_args(hint)))
    if hint is float:
        return frozenset((float, int))
    return frozenset((hint,)) if hint in (str, int, bool, bytes, types.NoneType) else frozenset()


def _union(hint: Any) -> list[Any]:
    """The options of `A | B | None` without None; empty for any other type."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return []
    return [option for option in typing.get_args(hint) if option is not type(None)]


def _array_of(dtype: Any) -> _Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, bytes) or len(value) % dtype.itemsize:
            raise Wrong(f"expected the bytes of an array of {dtype}")
        return np.frombuffer(value, dtype)

    return convert


def _items_of(item: _Converter) -> _Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, list):
            raise Wrong("expected an array")
        return tuple([item(each) for each in value])

    return convert


def _map_of(key: _Converter, entry: _Converter) -> _Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Wrong("expected a map")
        return {key(k): entry(v) for k, v in value.items()}

    return convert


def _any_of(converters: list[_Converter]) -> _Converter:
    def convert(value: Any) -> Any:
        if value is None:
            return None
        for attempt in converters[:-1]:
            try:
                return attempt(value)
            except (Wrong, Invalid):
                continue
        return converters[-1](value)

    return convert


def _checked(holds: Callable[[Any], bool], expected: str) -> _Converter:
    def convert(value: Any) -> Any:
        if not holds(value):
            raise Wrong(f"expected {expected}, got {type(value).__name__}")
        return value

    return convert
