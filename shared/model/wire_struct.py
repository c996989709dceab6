"""WireStruct: the base of messages, and of the values in their fields."""

from typing import Any

from msgspec import Struct


class WireStruct(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record that travels as the array of its fields. shared/wire/messages.py encodes and decodes it."""


def as_dict(value: Any) -> Any:
    """The fields of a WireStruct by name, and so those of the ones in it; any other value as it is."""
    if isinstance(value, WireStruct):
        return {name: as_dict(getattr(value, name)) for name in value.__struct_fields__}
    return [as_dict(item) for item in value] if isinstance(value, tuple) else value
