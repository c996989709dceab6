"""Messages and records to msgpack and back: a WireStruct is the array of its fields, a record of
Redis a map of them.

Arrays of numbers are raw little-endian bytes. A field that is missing, in an array at the end, has
its default; so defaults at the end are not written, and most of a token's fields are. msgspec
checks and decodes. It would write all defaults, so `packer` makes the lists that it encodes.
"""

import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import NODEFAULT, Struct
from msgspec.structs import astuple

from shared.process.errors import Invalid

T = TypeVar("T")

DTYPES = {kind: np.dtype(kind).newbyteorder("<") for kind in (np.int32, np.float32, np.float64, np.uint8)}


def _builtin(value: Any) -> Any:
    """Return an instance of a subclass of float or str, such as numpy's, as Python's own."""
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} has no form in a message")


to_bytes = msgspec.msgpack.Encoder(enc_hook=_builtin).encode


@cache
def packer(cls: Any) -> Callable[[Any], list[Any]]:
    """The function that makes a list of a message of this class."""
    infos = msgspec.structs.fields(cls)
    forms = [(at, form) for at, info in enumerate(infos) if (form := _form_of(info.type)) is not None]
    defaults = list(takewhile(lambda default: default is not NODEFAULT, map(_default_of, reversed(infos))))

    def pack(message: Any) -> list[Any]:
        values = list(astuple(message))
        for default in defaults:
            value = values[-1]
            if value is not default and (default is None or value != default):
                break
            values.pop()
        for at, form in forms:
            if at >= len(values):
                break
            values[at] = form(values[at])
        return values

    return pack


def _default_of(info: Any) -> Any:
    """The default of a field, whose value may be left out if it is equal; arrays and objects have none."""
    return {} if info.default_factory is dict else info.default


def _form_of(hint: Any) -> Callable[[Any], Any] | None:
    """The function that makes msgpack's values of a field's value; None if these are such already."""
    options = _options(hint)
    if len(options) > 1 or options[0] is not hint:
        form = next(filter(None, map(_form_of, options)), None)
        return form and (lambda value: None if value is None else form(value))
    if typing.get_origin(hint) is np.ndarray:
        dtype = _dtype(hint)
        return lambda array: np.ascontiguousarray(array, dtype).tobytes()
    if typing.get_origin(hint) is tuple and (item := _form_of(typing.get_args(hint)[0])):
        return lambda values: [item(value) for value in values]
    if isinstance(hint, type) and issubclass(hint, Struct):
        return packer(hint)
    return getattr(hint, "packed", None)


def _options(hint: Any) -> list[Any]:
    """The types of the union `A | B | None` without None; a list of the type itself if it is none."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return [hint]
    return [option for option in typing.get_args(hint) if option is not types.NoneType]


def _dtype(hint: Any) -> Any:
    """The dtype of an array on the wire."""
    return DTYPES[hint.__args__[1].__args__[0]]


def _array(hint: Any, value: Any) -> Any:
    """Return the array with these bytes. Raises ValueError, to which msgspec adds the path."""
    dtype = _dtype(hint)
    if type(value) is not bytes or len(value) % dtype.itemsize:
        raise ValueError(f"Expected the bytes of an array of {dtype}")
    return np.frombuffer(value, dtype)


@cache
def _decoder(cls: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(cls, dec_hook=_array)


def from_bytes(cls: type[T], data: bytes, name: str) -> T:
    """The object of that class in `data`, which errors call `name`. Raises Invalid, with the path to
    the value that is wrong."""
    try:
        decoded: T = _decoder(typing.cast(typing.Hashable, cls)).decode(data)
        return decoded
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at ")
        path = ".".join([name, *_names(cls, re.findall(r"[\[.](\w+|\.{3})", place))])
        raise Invalid(f"{path}: {expected[:1].lower()}{expected[1:]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"{name}: not msgpack: {error}") from None


def _names(hint: Any, steps: list[str]) -> Iterator[str]:
    """The names of the fields on a path of msgspec's, which gives their places in arrays."""
    for step in steps:
        hint = _options(hint)[0]
        if isinstance(hint, type) and issubclass(hint, Struct):
            info = msgspec.structs.fields(hint)[int(step)]
            yield info.name
            hint = info.type
        elif not isinstance(hint, type):
            hint = typing.get_args(hint)[-1 if typing.get_origin(hint) is dict else 0]
        else:
            yield step
