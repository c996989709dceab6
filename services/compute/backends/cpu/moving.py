"""Packed layers as a run of bytes and an outline, and layers over such bytes."""

import math
from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from services.compute.backends.backend import Linear
from services.compute.backends.cpu.library import NativeContext
from services.compute.backends.cpu.linear import NativeLinear, PackedForm, join, padded, part_shapes
from services.compute.ranks.parallel.distributed import as_bytes
from services.compute.ranks.parallel.outline import LayerOutline, MatrixOutline

ALIGNMENT = 64  # bytes: kernels read whole lines of the cache
NUMBERS = ("activation", "is_gate", "lowest", "highest", "is_widened")  # of kernels.h's Weight, which no form says


def move_out(linears: Sequence[Linear | None]) -> tuple[LayerOutline, Tensor]:
    """The outline of a layer's qkv, output, gate_up and down, and their bytes, [num_bytes] uint8."""
    outlines, pieces = [], [torch.empty(0, dtype=torch.uint8)]
    for linear in linears:
        assert linear is None or isinstance(linear, NativeLinear)
        matrices = () if linear is None else (linear, *linear.following)
        outlines.append(tuple(_outline(each) for each in matrices))
        for part in (part for matrix in matrices for part in matrix.parts.values()):
            pieces += [as_bytes(part), torch.zeros(-part.nbytes % ALIGNMENT, dtype=torch.uint8)]
    memory = torch.cat(pieces)
    return LayerOutline(len(memory), *outlines), memory


def move_in(context: NativeContext, outline: LayerOutline, memory: Tensor) -> list[NativeLinear | None]:
    """The layer's qkv, output, gate_up and down. Whenever they are called, memory [num_bytes] uint8 has
    their bytes."""
    at, linears = 0, list[NativeLinear | None]()
    for linear in (outline.qkv, outline.output, outline.gate_up, outline.down):
        matrices = []
        for of in linear:
            parts, form = {}, PackedForm(*of.form)
            for name, (shape, dtype) in part_shapes(form, *padded(of.n, of.k, form, of.is_gated), has_bias=of.has_bias).items():
                size = math.prod(shape) * dtype.itemsize
                parts[name] = memory[at : at + size].view(dtype).view(shape)
                at += size + -size % ALIGNMENT
            matrix = NativeLinear(context, of.n, of.k, form, is_gated=of.is_gated, has_bias=of.has_bias, parts=parts)
            for name, number in zip(NUMBERS, of.numbers, strict=True):
                setattr(matrix.struct, name, number)
            matrices.append(matrix)
        linears.append(join(matrices, is_gated=bool(matrices[0].struct.is_gate)) if matrices else None)
    return linears


def _outline(matrix: NativeLinear) -> MatrixOutline:
    struct = matrix.struct
    numbers = tuple(getattr(struct, name) for name in NUMBERS)
    return MatrixOutline(struct.n, struct.k, bool(struct.is_gated), "bias" in matrix.parts, astuple(matrix.form), numbers)
