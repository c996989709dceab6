"""Values between a process and its helpers: those of msgpack, tuples, arrays of numpy, and objects of
the classes that the reader names.

Reading them runs only the constructors of these classes, so the worst that a compromised helper can
send is a wrong value. Pickle would run any code.
"""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import msgpack
from msgspec import Struct
from msgspec.structs import astuple
from pydantic import BaseModel

TUPLE, ARRAY, OBJECT = 1, 2, 3  # msgpack's extension types
MAX_DEPTH = 16  # of these in each other


class Unreadable(Exception):
    """Bytes that are no such value."""


def pack(value: object) -> bytes:
    """The value as bytes. Raises ValueError for a value that is nested too deeply, TypeError for one
    that has no form."""
    packed: bytes = msgpack.packb(value, default=_packed, strict_types=True, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes, classes: Iterable[type] = ()) -> Any:
    """The value. classes: those of the objects in it. Raises Unreadable."""
    by_name, depth = {name_of(each): each for each in classes}, 0

    def read(code: int, inner: bytes) -> Any:
        nonlocal depth
        if (depth := depth + 1) > MAX_DEPTH:  # each level is a call of msgpack, with a large frame
            raise Unreadable(f"nested deeper than {MAX_DEPTH} levels")
        value = unpackb(inner)
        depth -= 1
        if code == TUPLE:
            return tuple(value)
        if code == ARRAY:
            import numpy as np

            kind, shape, content = value
            return np.frombuffer(content, np.dtype(kind)).reshape(shape)
        name, state = value
        return _object(by_name[name], state)

    unpackb = partial(msgpack.unpackb, ext_hook=read, strict_map_key=False, unicode_errors="surrogatepass")
    try:
        return unpackb(data)
    except Exception as error:  # any kind: the bytes come from a process that may be taken over
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _packed(value: Any) -> msgpack.ExtType:
    if isinstance(value, int):
        raise ValueError("an integer of more than 64 bits")
    if type(value) is tuple:
        return msgpack.ExtType(TUPLE, pack(list(value)))
    if hasattr(value, "dtype"):
        return msgpack.ExtType(ARRAY, pack([value.dtype.str, list(value.shape), value.tobytes()]))
    return msgpack.ExtType(OBJECT, pack([name_of(type(value)), _state(value)]))


def _state(value: Any) -> Any:
    """Return the fields of a pydantic model, or the arguments with which its class makes the object."""
    if isinstance(value, BaseModel):
        return [value.__dict__, list(value.model_fields_set), value.__pydantic_private__]
    if isinstance(value, Struct):
        return list(astuple(value))
    if is_dataclass(value):
        return [getattr(value, each.name) for each in fields(value)]
    if hasattr(value, "__getnewargs__"):
        return list(value.__getnewargs__())
    raise TypeError(f"no form for a {type(value).__name__}")


def _object(kind: Any, state: Any) -> Any:
    if not issubclass(kind, BaseModel):
        return kind(*state)
    values, names, private = state
    if (
        not values.keys() <= kind.model_fields.keys()
        or not (private or {}).keys() <= kind.__private_attributes__.keys()
    ):
        raise ValueError(f"fields that a {kind.__name__} does not have")
    made = kind.__new__(kind)
    whole = {
        "__dict__": values,
        "__pydantic_fields_set__": set(names),
        "__pydantic_extra__": None,
        "__pydantic_private__": private,
    }
    for name, each in whole.items():
        object.__setattr__(made, name, each)
    return made
