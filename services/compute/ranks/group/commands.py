"""The commands of rank 0 to the other ranks, and their answers: frozen dataclasses, as msgpack.

Both ends are of one version (`PROTOCOL`), so nothing is checked twice. A batch of 64 rows goes out in
every step, so its integers stay msgpack's own.
"""

import hashlib
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import msgpack

from services.compute.ranks.parallel.outline import LayerOutline
from services.compute.sequence.batch import ScheduledBatch
from shared.process.errors import Invalid


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one step of a model up to the LM head. model: its number among the replica's."""

    model: int
    batch: ScheduledBatch


@dataclass(frozen=True, slots=True)
class RunHead:
    """Compute logits of rows that rank 0 hands over; is_normed: behind the model's last norm."""

    model: int
    num_rows: int
    is_normed: bool


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where torch.distributed meets: a port of rank 0's host. device: rank 0's, by its type."""

    port: int
    device: str


@dataclass(frozen=True, slots=True)
class RoomFor:
    """How many blocks of the KV cache fit into a rank's memory."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockCount:
    """How many blocks the KV cache has on all ranks."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """The parts of layers that a rank keeps for rank 0."""

    layers: tuple[LayerOutline, ...]


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Save blocks of the KV cache on disk, under these names."""

    names: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FindBlocks:
    """Read the blocks of these names from the disk, up to the first that is not there."""

    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """How many blocks a rank has found, and how long it read (s); is_broken: it does not use its disk any
    longer."""

    count: int
    read_s: float
    is_broken: bool


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Copy the first blocks that were found last into these of the KV cache."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """The group ends, and its work is done."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank has its part of the model. fingerprint: of the contents of the weights; arithmetic: how
    its processor computes; taps: the layers of stages that an EAGLE head reads; has_disk: whether
    it keeps blocks of the KV cache on disk."""

    fingerprint: str
    arithmetic: str
    taps: tuple[int, ...] = ()
    has_disk: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """All ranks have loaded, and compute the same."""


# all that may be sent. Fields may be msgpack's own values, ranges, named tuples, dataclasses, and
# tuples of any length or optional ones of these
COMMANDS: tuple[type, ...] = (
    RunStep,
    RunHead,
    SaveBlocks,
    FindBlocks,
    FoundBlocks,
    LoadBlocks,
    Close,
    Rendezvous,
    Loaded,
    Accepted,
    RoomFor,
    BlockCount,
    KeptLayers,
)


def encode(message: Any) -> bytes:
    """A message of one of COMMANDS, as bytes."""
    cls: type = type(message)
    packed: bytes = msgpack.packb((COMMANDS.index(cls), _form_of(cls).pack(message)))
    return packed


def decode(data: bytes) -> Any:
    """The message that was encoded. Raises Invalid for bytes that are none."""
    try:
        number, values = msgpack.unpackb(data, use_list=False)
        return _form_of(COMMANDS[number]).build(values)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise Invalid(f"this is not a message of a group: {error}") from None


@dataclass(frozen=True, slots=True)
class ValueCodec:
    """How values of a type become msgpack's, and are made of them again."""

    pack: Callable[[Any], Any]
    build: Callable[[Any], Any]


def _form(hint: Any) -> ValueCodec | None:
    """None: its values are msgpack's own."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return _form_of(typing.cast(type, hint))
    if hint is range:  # of step 1
        return ValueCodec(lambda value: (value.start, value.stop), lambda values: range(*values))
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return ValueCodec(tuple, lambda values: hint(*values))
    if origin is tuple and arguments[1:] == (...,) and (item := _form(arguments[0])) is not None:
        pack, build = item.pack, item.build
        return ValueCodec(lambda values: tuple(map(pack, values)), lambda values: tuple(map(build, values)))
    if (
        types.NoneType in arguments
        and len(arguments) == 2
        and (some := _form(next(argument for argument in arguments if argument is not types.NoneType))) is not None
    ):
        return ValueCodec(
            lambda value: None if value is None else some.pack(value),
            lambda value: None if value is None else some.build(value),
        )
    return None


@cache
def _form_of(cls: type) -> ValueCodec:
    """A dataclass, as the array of its fields."""
    hints = typing.get_type_hints(cls)
    names = [each.name for each in fields(cls)]
    forms = [(at, form.pack, form.build) for at, name in enumerate(names) if (form := _form(hints[name])) is not None]
    get = (
        attrgetter(*names) if len(names) > 1 else lambda message: [getattr(message, name) for name in names]
    )  # attrgetter makes no tuple of one

    def pack(message: Any) -> list[Any]:
        values = list(get(message))
        for at, convert, _ in forms:
            values[at] = convert(values[at])
        return values

    def build(packed: Sequence[Any]) -> Any:
        values = list(packed)
        for at, _, convert in forms:
            values[at] = convert(values[at])
        return cls(*values)

    return ValueCodec(pack, build)


def _layout(hint: Any) -> str:
    """A type as a text that changes with any of its fields."""
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        fields_text = ", ".join(f"{name}: {_layout(each)}" for name, each in typing.get_type_hints(hint).items())
        return f"{hint.__name__}({fields_text})"
    if arguments := typing.get_args(hint):
        return f"{typing.get_origin(hint)}[{', '.join(map(_layout, arguments))}]"
    return str(hint)


# equal where both ends read each other's messages
PROTOCOL = hashlib.blake2b(" ".join(map(_layout, COMMANDS)).encode(), digest_size=6).hexdigest()
