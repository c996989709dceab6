"""What a weight matrix [n, k] is before a backend packs it: dense, in int8 by output column, or in groups of inputs.

It is the form in which a file holds it. A backend packs that form as it is where it can; else the matrix is dequantized, and perhaps quantized anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    weight: Tensor  # [n, k] in the model's dtype

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [n, k]."""
        return self.weight.to(dtype)


@dataclass(frozen=True, slots=True)
class Int8Columns:
    """codes * scale of the column."""

    codes: Tensor  # [n, k] int8
    scales: Tensor  # [n] float32

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [n, k], computed in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.codes.to(wide) * self.scales.to(wide)[:, None]).to(dtype)


@dataclass(frozen=True, slots=True)
class Grouped:
    """(value - zero) * scale + minimum, with one scale, and one zero or minimum if there is any, for each group of inputs of a column.

    The value is the code itself (eight bits), or what stands in `table` at the code (four bits).
    """

    codes: Tensor  # [n, k] int8; with a table: uint8, below 16
    scales: Tensor  # [n, ceil(k / group)] float16
    group: int
    table: Tensor | None = None  # [16] int8
    zeros: Tensor | None = None  # [n, ceil(k / group)] int8
    minima: Tensor | None = None  # [n, ceil(k / group)] float16

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [n, k], computed in float32 at least."""
        wide, k = torch.promote_types(dtype, torch.float32), self.codes.shape[1]
        values = self.codes.to(wide) if self.table is None else self.table.to(wide)[self.codes.long()]

        def spread(each: Tensor) -> Tensor:
            return each.to(wide).repeat_interleave(self.group, 1)[:, :k]

        if self.zeros is not None:
            values = values - spread(self.zeros)
        values = values * spread(self.scales)
        return (values if self.minima is None else values + spread(self.minima)).to(dtype)


Matrix = Dense | Int8Columns | Grouped


def concatenate(parts: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Matrices with the same inputs as one, along the outputs; dense, in `dtype`, unless all have the same form."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Int8Columns) and all(isinstance(each, Int8Columns) for each in parts):
        return Int8Columns(*(torch.cat([getattr(each, name) for each in parts]) for name in ("codes", "scales")))
    if isinstance(first, Grouped) and all(isinstance(each, Grouped) and _are_alike(first, each) for each in parts):
        joined = {
            name: torch.cat([getattr(each, name) for each in parts]) for name in ("codes", "scales", "zeros", "minima") if getattr(first, name) is not None
        }
        return Grouped(group=first.group, table=first.table, **joined)
    return Dense(torch.cat([each.dequantize(dtype) for each in parts]))


def _are_alike(one: Grouped, other: Grouped) -> bool:
    def describe(each: Grouped) -> tuple[object, ...]:
        return each.group, None if each.table is None else each.table.tolist(), each.zeros is None, each.minima is None

    return describe(one) == describe(other)
