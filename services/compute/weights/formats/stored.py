"""Parts that all formats share: a layer's tensors, checked as they are read, and the forms in which
its weight is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from services.compute.backends.matrix import Dense, Grouped, Matrix
from services.compute.weights.source import take_rows
from shared.process.errors import StartupError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
PACKED_GROUPS = (128, 64, 32)  # inputs: what the kernels can read
SIGNED = tuple(range(-8, 8))  # the values of four-bit codes
AS_THEY_ARE = "kept as they are"
ACT_ORDER = "dense, for their groups are not of neighbouring inputs (act-order)"
SLICE = 1 << 22  # weights that are widened at a time: their float32 is 16 MiB


class Reader(Protocol):
    """A checkpoint's tensors by name; a name that is missing raises StartupError."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def file_by_name(self) -> dict[str, Path]: ...

    def tensor(self, name: str) -> Tensor: ...

    def stored_dtype(self, name: str) -> str:
        """The dtype as a safetensors header has it: BF16, I8, F8_E4M3."""
        ...


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A layer's weight, and how it and others like it are kept."""

    matrix: Matrix
    how: str


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The tensors of one linear layer [n, k] in its file. Only `rows` are read."""

    reader: Reader
    name: str  # ends in a dot
    n: int
    k: int
    rows: Sequence[range] | None = None  # None: all

    @property
    def ranges(self) -> Sequence[range]:
        return [range(self.n)] if self.rows is None else self.rows

    @property
    def height(self) -> int:
        """The number of rows that are wanted."""
        return sum(map(len, self.ranges))

    def has(self, part: str) -> bool:
        return self.name + part in self.reader.file_by_name

    def is_plain(self) -> bool:
        """Whether `weight` is there as floats of 16 bits or more, or not at all."""
        return not self.has("weight") or self.reader.stored_dtype(self.name + "weight") in ("F16", "BF16", "F32", "F64")

    def read(
        self,
        part: str,
        shapes: list[tuple[int, ...]],
        dtypes: tuple[torch.dtype, ...],
        *,
        along: int | None = None,
        per: int = 1,
    ) -> Tensor:
        """A tensor of one of these shapes (any, if there are none) and dtypes, as it is in the
        file. along: the dimension that outputs lie along, of which those alone are read that are in a
        place, of `per` outputs, with one that is wanted; None: all are read. Raises StartupError."""
        tensor = self.reader.tensor(self.name + part)
        if shapes and tuple(tensor.shape) not in shapes:
            raise self.refuse(part, f"has the shape {tuple(tensor.shape)}; expected: {' or '.join(map(str, shapes))}")
        if tensor.dtype not in dtypes:
            raise self.refuse(part, f"is {_plain(tensor.dtype)}; expected: {' or '.join(map(_plain, dtypes))}")
        if along is not None and self.rows is not None:
            tensor = take_rows(tensor, [range(each.start // per, -(-each.stop // per)) for each in self.rows], along)
        return tensor.to(self.reader.device)

    def take(self, whole: Tensor) -> Tensor:
        """The wanted of all rows [n, ...]."""
        return take_rows(whole, self.rows)

    def trim(self, read: Tensor, per: int) -> Tensor:
        """The wanted of the rows [m, ...] that `read` has read, with so many in a place."""
        if self.rows is None:
            return read
        places = [-(-each.stop // per) - each.start // per for each in self.rows]
        starts = accumulate((count * per for count in places), initial=0)
        inside = [
            range(start + each.start % per, start + each.start % per + len(each))
            for start, each in zip(starts, self.rows, strict=False)
        ]
        return take_rows(read, inside)

    def within(self, some: slice) -> list[range]:
        """The rows that stand in these places among the wanted."""
        starts = accumulate(map(len, self.ranges), initial=0)
        parts = [
            each[max(some.start - start, 0) : max(some.stop - start, 0)]
            for start, each in zip(starts, self.ranges, strict=False)
        ]
        return [each for each in parts if each]

    def read_scales(self, part: str, shapes: list[tuple[int, ...]], dtypes: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        """Floats that must be finite."""
        scales = self.read(part, shapes, dtypes)
        if not bool(scales.float().isfinite().all()):
            raise self.refuse(part, "holds a number that is not finite")
        return scales

    def refuse(self, part: str, problem: str) -> StartupError:
        name = self.name + part
        return StartupError(f"{self.reader.file_by_name.get(name, 'the checkpoint')}: {name} {problem}")


class WeightFormat(Protocol):
    """How a checkpoint's linear layers are quantized."""

    @property
    def description(self) -> str:
        """`AWQ, 4 bits in groups of 128`."""
        ...

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer is in this format; else it is dense. The file decides: writers' lists
        of what they left out differ in their rules."""
        ...

    def matrix(self, layer: StoredLayer) -> StoredWeight:
        """The wanted rows. Raises StartupError, naming the tensor that is missing or wrong."""
        ...


def unpack(words: Tensor, bits: int) -> Tensor:
    """The codes of 2, 4 or 8 bits in int32 [..., w], the first in the lowest bits. Returns [..., 32
    / bits * w] uint8."""
    each = words.contiguous().view(torch.uint8)
    return torch.stack([(each >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1).flatten(-2)


def signed(codes: Tensor) -> Tensor:
    """uint8 0..255 as int8 -128..127."""
    return (codes ^ 128).view(torch.int8)


def num_groups(k: int, group: int | None) -> int:
    return 1 if group is None else -(-k // group)


def describe(bits: int, group: int | None) -> str:
    return f"{bits} bits by column" if group is None else f"{bits} bits in groups of {group}"


def widen(layer: StoredLayer, rows: Callable[[slice], Tensor]) -> Dense:
    """A dense matrix in the model's dtype of `rows`, which gives some of the wanted rows, [m, k] in any
    dtype: a few at a time, so that temporaries stay small."""
    weight = torch.empty((layer.height, layer.k), dtype=layer.reader.dtype, device=layer.reader.device)
    step = max(SLICE // layer.k, 1)
    for start in range(0, layer.height, step):
        some = slice(start, min(start + step, layer.height))
        weight[some] = rows(some)
    return Dense(weight)


def keep_groups(
    layer: StoredLayer, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int | None
) -> StoredWeight:
    """(value - zero) * scale by groups of inputs, as it is, unless float16 would round a scale of the
    whole layer's.

    codes: of the wanted rows, [height, k] uint8 below 16, whose values are -8..7, or int8; scales: of
    all, [n, groups] float; zeros: [n, groups] int8; group: None is the whole row.
    """
    table = torch.tensor(SIGNED, dtype=torch.int8, device=codes.device) if codes.dtype == torch.uint8 else None
    size = min(group or layer.k, layer.k)
    half = scales.to(torch.float16)
    is_exact = torch.equal(half.float(), scales.float())
    half, scales, zeros = layer.take(half), layer.take(scales), None if zeros is None else layer.take(zeros)
    if not is_exact:

        def rows(some: slice) -> Tensor:
            part = Grouped(codes[some], scales[some], size, table, None if zeros is None else zeros[some])
            return part.dequantize(layer.reader.dtype)

        return StoredWeight(widen(layer, rows), "dense, for float16 would round their scales")
    fitting = next((each for each in PACKED_GROUPS if size % each == 0), 32 if size == layer.k else size)

    def divide(each: Tensor) -> Tensor:
        """The matrix in groups that the kernels read: a larger one is several with the same
        scale."""
        repeats = -(-size // fitting)
        return (each.repeat_interleave(repeats, 1) if repeats > 1 else each)[
            :, : num_groups(layer.k, fitting)
        ].contiguous()

    return StoredWeight(
        Grouped(codes, divide(half), fitting, table, None if zeros is None else divide(zeros)), AS_THEY_ARE
    )


def read_order(layer: StoredLayer, part: str, group: int | None) -> Tensor | None:
    """The group of each input, [k] int64, or None where groups are of neighbours."""
    if not layer.has(part):
        return None
    order = layer.read(part, [(layer.k,)], (torch.int32, torch.int64)).long()
    groups = num_groups(layer.k, group)
    if not 0 <= int(order.min()) <= int(order.max()) < groups:
        raise layer.refuse(part, f"names a group that is not among the {groups}")
    return None if torch.equal(order, torch.arange(layer.k, device=order.device) // (group or layer.k)) else order


def widen_permuted(
    layer: StoredLayer, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor
) -> StoredWeight:
    """(value - zero) * scale with codes, scales and zeros as keep_groups has them, where order [k]
    int64 is the group of each input."""
    scales, zeros = layer.take(scales), None if zeros is None else layer.take(zeros)
    first = SIGNED[0] if codes.dtype == torch.uint8 else 0

    def rows(some: slice) -> Tensor:
        values = codes[some].float() + first
        if zeros is not None:
            values -= zeros[some].float().index_select(1, order)  # ten times as fast as [:, order]
        return values * scales[some].float().index_select(1, order)

    return StoredWeight(widen(layer, rows), ACT_ORDER)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
