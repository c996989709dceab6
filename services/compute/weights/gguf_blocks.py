"""GGUF's block formats as a Grouped matrix: the file's own codes, scales and minima, not rounded
again.

A block holds the codes of 32 (or, in eight or sixteen parts, 256) inputs of one output column
next to their scales. Layouts: ggml-common.h of ggml; the values are those of the `gguf` package's
dequantize, which is the reference in the tests. Formats that are not here have grids of vectors:
they are dequantized. So is an MXFP4 matrix with a scale that float16 can't hold.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from services.compute.backends.matrix import Grouped
from services.compute.weights import mxfp4

GROUP = 32
SUPER_BLOCK = 256  # inputs of the K formats' blocks
# IQ4_NL's and IQ4_XS's values
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks taken apart."""

    codes: Tensor  # [blocks, inputs] uint8 or int8
    scales: Tensor  # [blocks, 1] float16
    minima: Tensor | None = None  # the same
    steps: Tensor | None = None  # [blocks, groups] int8, where a block has several groups
    minimum_steps: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    split: Callable[[Tensor], Parts]  # of blocks [blocks, bytes] uint8
    table: tuple[int, ...] | None = None  # what the codes mean; None: themselves
    bits: int = 8  # of codes without a table; the smallest is `lowest`
    lowest: int = -128
    group: int = GROUP


def to_grouped(rows: Tensor, kind: GGMLQuantizationType, block_bytes: int) -> Grouped:
    """Rows [n, bytes] uint8 of that format, one of FORMATS, as a matrix."""
    form = FORMATS[kind]
    n, parts = rows.shape[0], form.split(rows.reshape(-1, block_bytes))
    scales, minima, steps, minimum_steps = (
        None if each is None else each.reshape(n, -1)
        for each in (parts.scales, parts.minima, parts.steps, parts.minimum_steps)
    )
    assert scales is not None
    table = None if form.table is None else torch.tensor(form.table, dtype=torch.int8)
    return Grouped(
        parts.codes.reshape(n, -1),
        scales,
        form.group,
        table,
        None,
        minima,
        form.bits,
        form.lowest,
        steps,
        minimum_steps,
    )


def has_wide_scales(rows: Tensor, kind: GGMLQuantizationType, block_bytes: int) -> bool:
    """Whether float16 can't hold the scales of rows [n, bytes] uint8, which only MXFP4's may be."""
    blocks = rows.reshape(-1, block_bytes)
    return kind == GGMLQuantizationType.MXFP4 and mxfp4.has_wide_scales(blocks[:, 1:], blocks[:, 0])


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
    return Parts(_nibbles(blocks[:, 2:]).view(torch.int8) - 8, _half(blocks[:, :2]))


def _iq4_nl(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[:, 2:]), _half(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[:, 4:]).view(torch.int8), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q5_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Parts(codes.view(torch.int8) - 16, _half(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Parts(codes.view(torch.int8), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks[:, :2]))


def _k_parts(blocks: Tensor, codes: Tensor) -> Parts:
    """Q4_K and Q5_K: steps of eight groups have six bits each in 12 bytes, behind the block's two
    float16."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    steps = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    minimum_steps = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return Parts(
        codes.reshape(-1, SUPER_BLOCK).view(torch.int8),
        _half(blocks[:, :2]),
        -_half(blocks[:, 2:4]),
        *(each.view(torch.int8) for each in (steps, minimum_steps)),
    )


def _q4_k(blocks: Tensor) -> Parts:
    return _k_parts(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, GROUP)))


def _q5_k(blocks: Tensor) -> Parts:
    """Bit g of the i-th byte of 32 is the fifth bit of input i of group g."""
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, GROUP)).reshape(-1, 8, GROUP)
    return _k_parts(blocks, low | (_bits(blocks[:, 16:48], 1) << 4))


def _bits(data: Tensor, count: int) -> Tensor:
    """[blocks, m] bytes to [blocks, 8 / count, m]: their lowest bits first, so many of each."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8)
    return data[:, None] >> shifts[:, None] & ((1 << count) - 1)


def _q2_k(blocks: Tensor) -> Parts:
    """Each 32 bytes have the codes of 128 inputs; a byte of the first 16 a group's two steps."""
    codes = _bits(blocks[:, 16:80].reshape(-1, 32), 2)
    steps, minimum_steps = (blocks[:, :16] & 15).view(torch.int8), (blocks[:, :16] >> 4).view(torch.int8)
    return Parts(
        codes.reshape(-1, SUPER_BLOCK).view(torch.int8),
        _half(blocks[:, 80:82]),
        -_half(blocks[:, 82:84]),
        steps,
        minimum_steps,
    )


def _q3_k(blocks: Tensor) -> Parts:
    """Bit g of the i-th byte of 32 is the third bit of input i of the g-th 32 inputs. Steps have
    four bits in one place and two in another, and 32 is taken off."""
    low = _bits(blocks[:, 32:96].reshape(-1, 32), 2).reshape(-1, 8, 32)
    codes = (low | (_bits(blocks[:, :32], 1) << 2)).reshape(-1, SUPER_BLOCK).view(torch.int8) - 4
    packed = blocks[:, 96:108]
    steps = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], 1) | (_bits(packed[:, 8:], 2).reshape(-1, 16) << 4)
    return Parts(codes, _half(blocks[:, 108:110]), steps=steps.view(torch.int8) - 32)


def _q6_k(blocks: Tensor) -> Parts:
    """In each 128 inputs, 64 bytes have the low four bits, and 32 bytes the high two."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = _bits(blocks[:, 128:192].reshape(-1, 32), 2)
    codes = (low.reshape(-1, SUPER_BLOCK) | (high.reshape(-1, SUPER_BLOCK) << 4)).view(torch.int8) - 32
    return Parts(codes, _half(blocks[:, 208:210]), steps=blocks[:, 192:208].contiguous().view(torch.int8))


def _iq4_xs(blocks: Tensor) -> Parts:
    """A group's step has four bits in one place and two in another, and 32 is taken off."""
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).reshape(-1, 8)
    high = ((blocks[:, 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)) & 3).reshape(-1, 8)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, GROUP // 2))
    return Parts(codes.reshape(-1, SUPER_BLOCK), _half(blocks[:, :2]), steps=(low | (high << 4)).view(torch.int8) - 32)


def _mxfp4(blocks: Tensor) -> Parts:
    """The first byte is the exponent of the scale."""
    return Parts(_nibbles(blocks[:, 1:]), mxfp4.halved_scales(blocks[:, :1]))


FORMATS = {
    GGMLQuantizationType.Q4_0: BlockFormat(_q4_0, bits=4, lowest=-8),
    GGMLQuantizationType.Q4_1: BlockFormat(_q4_1, bits=4, lowest=0),
    GGMLQuantizationType.Q5_0: BlockFormat(_q5_0, bits=5, lowest=-16),
    GGMLQuantizationType.Q5_1: BlockFormat(_q5_1, bits=5, lowest=0),
    GGMLQuantizationType.Q8_0: BlockFormat(_q8_0),
    GGMLQuantizationType.Q2_K: BlockFormat(_q2_k, bits=2, lowest=0, group=16),
    GGMLQuantizationType.Q3_K: BlockFormat(_q3_k, bits=3, lowest=-4, group=16),
    GGMLQuantizationType.Q4_K: BlockFormat(_q4_k, bits=4, lowest=0),
    GGMLQuantizationType.Q5_K: BlockFormat(_q5_k, bits=5, lowest=0),
    GGMLQuantizationType.Q6_K: BlockFormat(_q6_k, bits=6, lowest=-32, group=16),
    GGMLQuantizationType.IQ4_NL: BlockFormat(_iq4_nl, IQ4),
    GGMLQuantizationType.IQ4_XS: BlockFormat(_iq4_xs, IQ4),
    GGMLQuantizationType.MXFP4: BlockFormat(_mxfp4, mxfp4.TABLE),
}
