"""GGUF's block formats as a Grouped matrix: the file's own codes, scales and minima, not rounded
again.

A block holds the codes of 32 (or, in eight parts, 256) inputs of one output column beside their
scales. Layouts: ggml-common.h of ggml; the values are those of the `gguf` package's dequantize,
which is the reference in the tests. Formats that are not here have groups of 16, grids of vectors
or scales that float16 can't hold: they are dequantized.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from services.compute.backends.matrix import Grouped

GROUP = 32
SUPER_BLOCK = 256  # inputs of the K formats' blocks
# what float16 may change of scales that are products: half of what bfloat16 would of the weights
ROUNDING = 2.0**-10
OFFSET_8 = tuple(range(-8, 8))
PLAIN = tuple(range(16))
# IQ4_NL's and IQ4_XS's values
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks taken apart."""

    codes: Tensor  # [blocks, inputs] uint8 or int8
    scales: Tensor  # [blocks, groups] float16, or float32 where they are products
    minima: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    split: Callable[[Tensor], Parts]  # of blocks [blocks, bytes] uint8
    table: tuple[int, ...] | None  # what the codes mean; None: themselves


def to_grouped(rows: Tensor, kind: GGMLQuantizationType, block_bytes: int) -> Grouped | None:
    """Rows [n, bytes] uint8 of that format as a matrix. None if the format has no such form, or
    float16 would round the scales more than bfloat16 rounds weights."""
    form = FORMATS.get(kind)
    if form is None:
        return None
    n = rows.shape[0]
    parts = form.split(rows.reshape(-1, block_bytes))
    scales = _as_half(parts.scales.reshape(n, -1))
    minima = None if parts.minima is None else _as_half(parts.minima.reshape(n, -1))
    if scales is None or (parts.minima is not None and minima is None):
        return None
    table = None if form.table is None else torch.tensor(form.table, dtype=torch.int8)
    return Grouped(codes=parts.codes.reshape(n, -1), scales=scales, group=GROUP, table=table, minima=minima)


def _as_half(values: Tensor) -> Tensor | None:
    """[n, groups] in float16, unless that would change a column's by more than ROUNDING, root mean
    square."""
    if values.dtype == torch.float16:
        return values
    half = values.half()
    return half if bool(((half.float() - values).norm(dim=1) <= ROUNDING * values.norm(dim=1)).all()) else None


def _half(data: Tensor) -> Tensor:
    """Bytes as float16."""
    return data.contiguous().view(torch.float16)


def _nibbles(data: Tensor) -> Tensor:
    """[..., m] bytes to [..., 2 m] codes: all low halves, then all high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def _fifth_bits(data: Tensor) -> Tensor:
    """The 32 bits of 4 bytes as [blocks, 32] uint8, each in the place of the fifth bit."""
    return ((data[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).reshape(-1, GROUP) << 4


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[:, 2:]), _half(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q5_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Parts(codes.view(torch.int8) - 16, _half(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Parts(codes.view(torch.int8), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks[:, :2]))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of eight groups, [blocks, 8] float32: six bits each in 12 bytes, times the
    block's two float16."""
    of_block, packed = _half(blocks[:, :4]).float(), blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return of_block[:, :1] * scales, -of_block[:, 1:] * minima


def _q4_k(blocks: Tensor) -> Parts:
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, GROUP))
    return Parts(codes.reshape(-1, SUPER_BLOCK), scales, minima)


def _q5_k(blocks: Tensor) -> Parts:
    """Bit g of the i-th byte of 32 is the fifth bit of input i of group g."""
    scales, minima = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, GROUP)).reshape(-1, 8, GROUP)
    fifth = (blocks[:, 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1).transpose(1, 2) << 4
    return Parts((low | fifth).reshape(-1, SUPER_BLOCK).view(torch.int8), scales, minima)


def _iq4_xs(blocks: Tensor) -> Parts:
    """A group's scale has four bits in one place and two in another, and 32 is taken off."""
    of_block = _half(blocks[:, :2]).float()
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).reshape(-1, 8)
    high = ((blocks[:, 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)) & 3).reshape(-1, 8)
    scales = (low | (high << 4)).view(torch.int8) - 32
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, GROUP // 2))
    return Parts(codes.reshape(-1, SUPER_BLOCK), of_block * scales)


FORMATS = {
    GGMLQuantizationType.Q4_0: BlockFormat(_q4_0, OFFSET_8),
    GGMLQuantizationType.Q4_1: BlockFormat(_q4_1, PLAIN),
    GGMLQuantizationType.Q5_0: BlockFormat(_q5_0, None),
    GGMLQuantizationType.Q5_1: BlockFormat(_q5_1, None),
    GGMLQuantizationType.Q8_0: BlockFormat(_q8_0, None),
    GGMLQuantizationType.Q4_K: BlockFormat(_q4_k, PLAIN),
    GGMLQuantizationType.Q5_K: BlockFormat(_q5_k, None),
    GGMLQuantizationType.IQ4_NL: BlockFormat(_q4_0, IQ4),
    GGMLQuantizationType.IQ4_XS: BlockFormat(_iq4_xs, IQ4),
}
