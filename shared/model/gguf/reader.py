"""The head of a GGUF file: its metadata, and where each tensor lies. No tensor is read here, and no
torch is needed.

The format is the one that ggml's docs/gguf.md describes, versions 2 and 3, little-endian: counts,
then keys with typed values, then tensors with name, shape, type and offset, then the data. Every
length is checked against the file before it is believed.
"""

import math
import mmap
import struct
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from shared.process.errors import StartupError, words_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ITEMS = 1 << 22  # of a list; the largest vocabularies have some 300,000
# bytes of the shortest entries: what a count may claim at most follows
LEAST_KEY, LEAST_TENSOR = 13, 24

STRING, ARRAY = 8, 9
# numpy's names of the types
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

# ggml's types by their numbers: weights in a block, and its bytes. What is not here has no size
# that is known, and is compute's to refuse.
BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 40),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
    40: (64, 36),
    41: (128, 18),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place."""

    path: Path  # the file that it lies in, which is one of several where a model is cut into parts
    name: str
    shape: tuple[int, ...]  # as torch has it: the dimension that changes fastest is last
    type_id: int  # ggml's number of the type
    offset: int  # from the beginning of the file, in bytes

    @property
    def size_bytes(self) -> int:
        """At least; Python's integers, so that a shape that lies can't overflow."""
        block, size = BLOCKS.get(self.type_id, (1, 0))
        return math.prod(self.shape) // block * size


@dataclass(frozen=True, slots=True)
class GgufHead:
    path: Path
    metadata: dict[str, Any]  # numbers, strings, booleans, and lists of these
    tensors: dict[str, TensorInfo]

    def require(self, key: str) -> Any:
        """The value of a key that must be there. Raises StartupError."""
        if key not in self.metadata:
            raise StartupError(f"{self.path}: the metadata has no {key}")
        return self.metadata[key]

    def number(self, key: str, default: int | None = None) -> int:
        """A positive integer, of a list (one for each layer) the first. Raises StartupError.

        Zero in a list means that a layer has none. A family whose layers differ reads the list; of
        another's file, a tensor has another shape than the configuration says, and is refused.
        """
        value = self.require(key) if default is None else self.metadata.get(key, default)
        if isinstance(value, list):
            value = next((each for each in value if each), None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StartupError(f"{self.path}: {key} is {_short(value)}, not a positive number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises StartupError."""
        value = self.require(key) if default is None else self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise StartupError(f"{self.path}: {key} is {_short(value)}, not a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises StartupError."""
        value = self.require(key) if default is None else self.metadata.get(key, default)
        if not isinstance(value, str):
            raise StartupError(f"{self.path}: {key} is {_short(value)}, not a text")
        return value

    def items(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """A list, of which every item is of that kind. Raises StartupError."""
        value = self.require(key)
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise StartupError(f"{self.path}: {key} is not the list that it should be")
        return value


def read_head(path: Path) -> GgufHead:
    """The file's metadata and tensors. Raises StartupError, in one line, for whatever is wrong with
    it."""
    try:
        if path.stat().st_size == 0:
            raise StartupError(f"{path}: the file is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).head()
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: {words_of(error)}") from None


class _Cursor:
    """A place in a mapped file that moves on as values are read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def head(self) -> GgufHead:
        if self.take(4) != MAGIC:
            raise StartupError(f"{self.path} is not a GGUF file")
        (version,) = self.unpack("<I")
        if version not in VERSIONS:
            kind = "big-endian" if version and version & 0xFFFF == 0 else f"of version {version}"
            raise StartupError(
                f"{self.path} is {kind}; GGUF is read little-endian, in the versions {' and '.join(map(str, VERSIONS))}"
            )
        num_tensors, num_keys = self.unpack("<QQ")
        if num_keys * LEAST_KEY + num_tensors * LEAST_TENSOR > self.size:
            raise StartupError(
                f"{self.path} claims {num_keys} keys and {num_tensors} tensors, more than it has room for"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise StartupError(f"{self.path}: the key {_short(key)} is there twice")
            metadata[key] = self.value(*self.unpack("<I"))
        infos = [self.tensor() for _ in range(num_tensors)]
        alignment = self._alignment(metadata)
        data_offset = -(-self.at // alignment) * alignment
        tensors = {info.name: replace(info, offset=data_offset + info.offset) for info in infos}
        if len(tensors) < len(infos):
            raise StartupError(f"{self.path}: a tensor is there twice")
        self._check_places(sorted(tensors.values(), key=lambda info: info.offset), alignment)
        return GgufHead(self.path, metadata, tensors)

    def _check_places(self, tensors: list[TensorInfo], alignment: int) -> None:
        """Check that each tensor, in the order of the file, is in the file, begins where one may
        begin, and has its bytes for itself."""
        for info, following in zip_longest(tensors, tensors[1:]):
            if info.offset > self.size:
                raise StartupError(f"{self.path}: {_short(info.name)} lies beyond the end of the file: is it complete?")
            if info.offset + info.size_bytes > self.size:
                raise StartupError(f"{self.path} ends in the middle of {_short(info.name)}: is it complete?")
            if info.offset % alignment:
                raise StartupError(
                    f"{self.path}: {_short(info.name)} does not begin at a multiple of {alignment} bytes: the file is "
                    "broken"
                )
            if following is not None and following.offset < info.offset + max(1, info.size_bytes):
                raise StartupError(
                    f"{self.path}: {_short(info.name)} and {_short(following.name)} overlap: the file is broken"
                )

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise StartupError(f"{self.path}: general.alignment is {_short(alignment)}, not a power of two")
        return alignment

    def take(self, length: int) -> bytes:
        if length > self.size - self.at:
            raise StartupError(f"{self.path} ends in the middle of its metadata: is it complete?")
        self.at += length
        return self.data[self.at - length : self.at]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        data = self.take(*self.unpack("<Q"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise StartupError(f"{self.path}: {_short(data)} in the metadata is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(*self.unpack("<IQ"))
        return self.numbers(kind, 1)[0]

    def array(self, kind: int, count: int) -> list[Any]:
        if count > MAX_ITEMS:
            raise StartupError(f"{self.path}: the metadata has a list of {count} items; at most {MAX_ITEMS} are read")
        if kind != STRING:
            return self.numbers(kind, count)
        return self.strings(count)

    def strings(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands: this is string(), in one loop."""
        data, size, at = self.data, self.size, self.at
        strings = []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + int.from_bytes(data[at:begin], "little")
                if at > size:
                    raise StartupError(f"{self.path} ends in the middle of its metadata: is it complete?")
                strings.append(data[begin:at].decode())
        except UnicodeDecodeError:
            raise StartupError(f"{self.path}: {_short(data[begin:at])} in the metadata is not UTF-8") from None
        self.at = at
        return strings

    def numbers(self, kind: int, count: int) -> list[Any]:
        """Floats in 32 bits become the shortest decimal that is the same in 32 bits: 1e-05, not
        9.99999974737875e-06."""
        if kind not in NUMBERS:
            raise StartupError(f"{self.path}: the metadata has a value of an unknown type, {kind}")
        dtype = np.dtype(NUMBERS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if dtype.char == "f" and count == 1:
            return [float(str(values[0]))]
        items: list[Any] = values.tolist()
        return items

    def tensor(self) -> TensorInfo:
        """Read a tensor's entry. The offset still counts from the beginning of the data."""
        name = self.string()
        (num_dims,) = self.unpack("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise StartupError(f"{self.path}: {_short(name)} has {num_dims} dimensions")
        dims = self.unpack(f"<{num_dims}Q")
        if 0 in dims:
            raise StartupError(f"{self.path}: {_short(name)} has no elements")
        type_id, offset = self.unpack("<IQ")
        return TensorInfo(self.path, name, tuple(reversed(dims)), type_id, offset)


def _short(value: object) -> str:
    """Shorten text for a message: what is in a file may be megabytes."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
