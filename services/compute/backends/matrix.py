"""A weight matrix [n, k] before a backend packs it: dense, in int8 or four bits by output column, in
groups of inputs, or in FP8.

It is the form in which a file holds it. A backend packs that form as it is where it can; else the
matrix is dequantized, and perhaps quantized again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

SLICE = 1 << 20  # weights of a matrix that are widened at once
BLOCK = 256  # inputs whose groups' scales are whole multiples of one number
# what float16 may change of scales: half of what bfloat16 would of the weights
ROUNDING = 2.0**-10
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Dense:
    weight: Tensor  # [n, k] in the model's dtype

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __str__(self) -> str:
        return "dense"

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [n, k]."""
        return self.weight.to(dtype)


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix that holds codes in the place of weights."""

    codes: Tensor  # [n, k]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device


@dataclass(frozen=True, slots=True)
class Int8Columns(Coded):
    """codes * scale of the column."""

    codes: Tensor  # [n, k] int8
    scales: Tensor  # [n] float32

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.int8 or self.scales.shape != self.codes.shape[:1]:
            raise ValueError(f"codes {describe(self.codes)}, scales {describe(self.scales)}: not int8 by column")

    def __str__(self) -> str:
        return "8 bits by column"

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [n, k], computed in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.codes.to(wide) * self.scales.to(wide)[:, None]).to(dtype)


MAX_STEPS = 16  # so that step - 1 and the zero fill a byte


@dataclass(frozen=True, slots=True)
class Int4Columns(Coded):
    """int8 by column, (code - zero) * step, times the column's scale: four-bit codes with a zero and a
    step for each group of inputs."""

    codes: Tensor  # [n, k] uint8, below 16
    scales: Tensor  # [n] float32
    zeros: Tensor  # [n, ceil(k / group)] int8, from 0 to 15
    steps: Tensor  # the same, from 1 to MAX_STEPS
    group: int

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        of_groups = (n, -(-k // self.group))
        if (
            self.codes.dtype != torch.uint8
            or self.scales.shape != (n,)
            or (self.zeros.shape, self.steps.shape) != (of_groups, of_groups)
        ):
            raise ValueError(
                ", ".join(map(describe, (self.codes, self.scales, self.zeros, self.steps))) + f": not {self}"
            )

    def __str__(self) -> str:
        return f"4 bits by column in groups of {self.group}"

    def widened(self) -> Int8Columns:
        """The same values, in 8 bits by column."""
        zeros, steps = (each.repeat_interleave(self.group, 1)[:, : self.shape[1]] for each in (self.zeros, self.steps))
        return Int8Columns((self.codes.to(torch.int8) - zeros) * steps, self.scales)

    def grouped(self) -> "Grouped":
        """The same with a scale for each group, which float16 rounds."""
        table = torch.arange(16, dtype=torch.int8, device=self.device)
        return Grouped(self.codes, (self.steps * self.scales[:, None]).half(), self.group, table, self.zeros)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [n, k], computed in float32 at least."""
        return self.widened().dequantize(dtype)


@dataclass(frozen=True, slots=True)
class Grouped(Coded):
    """(value - zero) * scale + minimum, with one scale, and one zero or minimum if there is any,
    for each group of inputs of a column.

    The value is the code itself, or what stands in `table` at the code (four bits). With `steps`,
    scales and minima are of blocks of BLOCK inputs, and a group's are so many of its block's.
    """

    codes: Tensor  # [n, k] int8; with a table: uint8, below 16
    scales: Tensor  # [n, ceil(k / group)] float16; with steps: [n, ceil(k / BLOCK)]
    group: int
    table: Tensor | None = None  # [16] int8
    zeros: Tensor | None = None  # [n, ceil(k / group)] int8
    minima: Tensor | None = None  # like scales
    bits: int = 8  # without a table: codes lie from `lowest` to lowest + 2^bits - 1
    lowest: int = -128
    steps: Tensor | None = None  # [n, ceil(k / group)] int8
    minimum_steps: Tensor | None = None  # the same; there with steps and minima

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        in_blocks = ("scales", "minima") if self.steps is not None else ()
        width = {name: -(-k // (BLOCK if name in in_blocks else self.group)) for name in self.by_group()}
        wrong = {name: each for name, each in self.by_group().items() if each.shape != (n, width[name])}
        if self.table is not None and self.table.shape != (16,):
            wrong["table"] = self.table
        if (self.minimum_steps is not None) != (self.steps is not None and self.minima is not None):
            wrong["minimum_steps"] = self.scales
        if wrong or self.codes.dtype != (torch.int8 if self.table is None else torch.uint8):
            named = ", ".join(f"{name} {describe(each)}" for name, each in (wrong or {"scales": self.scales}).items())
            raise ValueError(f"codes {describe(self.codes)}, {named}: not {self}")

    def __str__(self) -> str:
        more = [name for name in ("zeros", "minima") if getattr(self, name) is not None]
        return f"{self.bits if self.table is None else 4} bits in groups of {self.group}" + (
            f" with {' and '.join(more)}" if more else ""
        )

    def by_group(self) -> dict[str, Tensor]:
        """Scales, and zeros, minima and steps where there are any."""
        return {
            name: each
            for name in ("scales", "zeros", "minima", "steps", "minimum_steps")
            if (each := getattr(self, name)) is not None
        }

    def without_steps(self) -> "Grouped":
        """The same matrix with each group's own scale and minimum, which are exact in float32."""
        if self.steps is None:
            return self

        def of_groups(of_blocks: Tensor, steps: Tensor) -> Tensor:
            return of_blocks.float().repeat_interleave(BLOCK // self.group, 1)[:, : steps.shape[1]] * steps

        minima = (
            None if self.minima is None or self.minimum_steps is None else of_groups(self.minima, self.minimum_steps)
        )
        return replace(self, scales=of_groups(self.scales, self.steps), minima=minima, steps=None, minimum_steps=None)

    def with_half_scales(self) -> "Grouped":
        """The same with scales and minima rounded to float16, if that changes those of no column by
        more than ROUNDING, root mean square."""
        plain = self.without_steps()
        parts = [(each, each.half()) for each in (plain.scales, plain.minima) if each is not None]
        if any(
            bool(((half.float() - each).norm(dim=1) > ROUNDING * each.norm(dim=1)).any())
            for each, half in parts
            if each.dtype != torch.float16
        ):
            return plain
        return replace(plain, scales=plain.scales.half(), minima=None if plain.minima is None else plain.minima.half())

    def with_table(self) -> "Grouped":
        """The same values in four bits with a table, where codes of so many or fewer have none; bits and
        lowest then say nothing."""
        if self.table is not None or self.bits > 4:
            return self
        table = torch.arange(self.lowest, self.lowest + 16, dtype=torch.int8, device=self.device)
        return replace(self, codes=(self.codes - self.lowest).view(torch.uint8), table=table, bits=8, lowest=-128)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [n, k], computed in float32 at least."""
        if self.steps is not None:
            return self.without_steps().dequantize(dtype)
        wide, (n, k) = torch.promote_types(dtype, torch.float32), self.codes.shape
        out = torch.empty(n, k, dtype=dtype, device=self.device)
        step = max(1, SLICE // k)
        for rows in (slice(start, start + step) for start in range(0, n, step)):
            values = self.codes[rows].to(wide) if self.table is None else self.table.to(wide)[self.codes[rows].long()]
            spread = {
                name: each[rows].to(wide).repeat_interleave(self.group, 1)[:, :k]
                for name, each in self.by_group().items()
            }
            if "zeros" in spread:
                values = values - spread["zeros"]
            values = values * spread["scales"]
            out[rows] = values + spread["minima"] if "minima" in spread else values
        return out


@dataclass(frozen=True, slots=True)
class Float8(Coded):
    """code * scale, with one scale for each block of `height` outputs and `group` inputs."""

    codes: Tensor  # [n, k] float8_e4m3fn or float8_e5m2
    scales: Tensor  # [ceil(n / height), ceil(k / group)] float32
    group: int  # k: a scale is a whole column's
    height: int = 1

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        if self.codes.dtype not in FLOAT8 or self.scales.shape != (-(-n // self.height), -(-k // self.group)):
            raise ValueError(f"codes {describe(self.codes)}, scales {describe(self.scales)}: not {self}")

    @property
    def is_by_column(self) -> bool:
        return self.scales.shape[1] == 1

    def __str__(self) -> str:
        kind = "FP8" if self.codes.dtype == torch.float8_e4m3fn else "FP8 (e5m2)"
        return (
            f"{kind} by column"
            if self.is_by_column and self.height == 1
            else f"{kind} in blocks of {self.height} x {self.group}"
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [n, k], computed in float32 at least."""
        wide, (n, k) = torch.promote_types(dtype, torch.float32), self.codes.shape
        out = torch.empty(n, k, dtype=dtype, device=self.device)
        step = max(1, SLICE // k)
        for start in range(0, n, step):
            rows = torch.arange(start, min(start + step, n), device=self.device)
            scales = self.scales.to(wide)[rows // self.height]
            spread = scales if self.is_by_column else scales.repeat_interleave(self.group, 1)[:, :k]
            out[start : start + step] = self.codes[start : start + step].to(wide) * spread
        return out

    def by_output(self) -> "Float8":
        """The matrix with a scale for each output."""
        scales = self.scales.repeat_interleave(self.height, 0)[: self.shape[0]]
        return Float8(self.codes, scales, self.group)


OneForm = Dense | Int8Columns | Int4Columns | Grouped | Float8


@dataclass(frozen=True, slots=True)
class Joined:
    """Matrices of different forms with the same inputs, one after the other along the outputs."""

    parts: tuple[OneForm, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def __str__(self) -> str:
        return " and ".join(map(str, self.parts))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [n, k]."""
        return torch.cat([part.dequantize(dtype) for part in self.parts])


Matrix = OneForm | Joined


def concatenate(parts: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Matrices with the same inputs as one, along the outputs. Those next to each other that have
    the same form become one of that form."""
    runs: list[list[OneForm]] = []
    for part in parts:
        for one in part.parts if isinstance(part, Joined) else (part,):
            if runs and _are_alike(runs[-1][0], one):
                runs[-1].append(one)
            else:
                runs.append([one])
    joined = [_join(run, dtype) for run in runs]
    return joined[0] if len(joined) == 1 else Joined(tuple(joined))


def _join(parts: Sequence[OneForm], dtype: torch.dtype) -> OneForm:
    """Join matrices that are alike."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Float8):
        return _join_float8([part for part in parts if isinstance(part, Float8)])
    if isinstance(first, Dense):
        return Dense(torch.cat([part.dequantize(dtype) for part in parts]))
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in _by_output(first)}
    return replace(first, **joined)


def _by_output(matrix: Int8Columns | Int4Columns | Grouped) -> set[str]:
    """The parts that have a row for each output."""
    names = ("zeros", "steps") if isinstance(matrix, Int4Columns) else ()
    return {"codes", "scales", *(matrix.by_group() if isinstance(matrix, Grouped) else names)}


def reordered(matrix: OneForm, order: Tensor) -> OneForm:
    """The matrix with its outputs in another order. order: [n] int64, the place of each in `matrix`. A block of
    FP8 whose outputs do not stay together gets a scale for each output."""
    if isinstance(matrix, Dense):
        return Dense(matrix.weight[order])
    if isinstance(matrix, Float8):
        codes = matrix.codes.view(torch.uint8)[order].view(matrix.codes.dtype)
        if torch.equal(order // matrix.height, torch.arange(len(order)) // matrix.height):
            return replace(matrix, codes=codes)
        return Float8(codes, matrix.by_output().scales[order], matrix.group)
    moved: dict[str, Any] = {name: getattr(matrix, name)[order] for name in _by_output(matrix)}
    return replace(matrix, **moved)


def _join_float8(parts: Sequence[Float8]) -> Float8:
    """Join matrices of the same dtype and groups. A block that would reach from one matrix into the
    next gets a scale for each output."""
    height = parts[0].height
    if any(part.height != height for part in parts) or any(part.shape[0] % height for part in parts[:-1]):
        parts = [part.by_output() for part in parts]
    return Float8(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        parts[0].group,
        parts[0].height,
    )


def describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _are_alike(one: OneForm, other: OneForm) -> bool:
    if isinstance(one, Grouped) and isinstance(other, Grouped):
        return _form(one) == _form(other)
    if isinstance(one, Int4Columns) and isinstance(other, Int4Columns):
        return one.group == other.group
    if isinstance(one, Float8) and isinstance(other, Float8):
        return (one.codes.dtype, one.group) == (other.codes.dtype, other.group)
    return type(one) is type(other)


def _form(matrix: Grouped) -> tuple[object, ...]:
    return (
        matrix.group,
        matrix.bits,
        matrix.lowest,
        None if matrix.table is None else matrix.table.tolist(),
        list(matrix.by_group()),
    )
