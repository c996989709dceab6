"""MXFP4: four-bit floats with one power of two for each 32 inputs (Open Compute Project, "Microscaling
Formats (MX)", 2023, sections 5.3.3 and 6.3). gpt-oss has its experts in it."""

import torch
from torch import Tensor

from services.compute.backends.matrix import Dense, Grouped, Joined, OneForm, reordered
from services.compute.weights.formats.mxfp4 import DESCRIPTION
from services.compute.weights.formats.stored import AS_THEY_ARE, FLOATS
from services.compute.weights.safetensors_source import SafetensorsSource
from services.compute.weights.stacked_experts import is_stacked, read_stacked
from shared.process.errors import StartupError

GROUP = 32
# twice the values, as some are halves; scales are halved in turn
TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# of the exponents, those whose halved scales are float16, from 2**-24 to 2**15
MIN_EXPONENT, MAX_EXPONENT = 104, 143


def has_wide_scales(codes: Tensor, exponents: Tensor) -> bool:
    """Whether float16 can't hold the scales; groups of zeros have none that counts. codes: [...,
    groups, bytes] uint8, two to a byte; exponents: [..., groups] uint8."""
    is_wide = (exponents < MIN_EXPONENT) | (exponents > MAX_EXPONENT)
    return bool((is_wide & ((codes & 0x77) != 0).any(-1)).any())


def halved_scales(exponents: Tensor) -> Tensor:
    """The scales of TABLE's values, of uint8 exponents, as float16."""
    powers = exponents.clamp(MIN_EXPONENT, MAX_EXPONENT).int() - 128
    return torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers).half()


def read_expert(
    source: SafetensorsSource, name: str, number: int, shape: tuple[int, int], order: Tensor
) -> tuple[OneForm, Tensor]:
    """An expert's matrix [n, k] and its bias [n] of gpt-oss' files, rows in this order: blocks in MXFP4,
    [experts, n, ...], or weights [experts, k, n], in FP8 or not. Raises StartupError."""
    (n, k), dtype = shape, source.dtype
    bias = source.one_of(name + "_bias", number, (n,), FLOATS)[order].to(dtype)
    if not source.has(name + "_blocks"):
        if is_stacked(source, name):
            stacked = read_stacked(source, name, number, shape, is_turned=True)
            assert not isinstance(stacked, Joined)
            return reordered(stacked, order), bias
        return Dense(source.one_of(name, number, (k, n), FLOATS).T[order].to(dtype)), bias
    if source.quantized_as != DESCRIPTION:
        raise StartupError(f"{source.folder}: {name} is in MXFP4, and config.json's quantization_config says otherwise")
    if k % GROUP:
        raise StartupError(f"{source.folder}: {name} is in MXFP4, whose groups of {GROUP} don't fill rows of {k}")
    blocks = source.one_of(name + "_blocks", number, (n, k // GROUP, GROUP // 2), (torch.uint8,))[order]
    exponents = source.one_of(name + "_scales", number, (n, k // GROUP), (torch.uint8,))[order]
    matrix = to_matrix(blocks, exponents, dtype)
    source.kept["in float" if isinstance(matrix, Dense) else AS_THEY_ARE] += 1
    return matrix, bias


def to_matrix(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> OneForm:
    """A matrix of a safetensors file. codes: [n, groups, 16] uint8, in each byte an input in the low
    half and the next in the high one; exponents: [n, groups] uint8. In dtype where float16 can't
    hold the scales, or dtype is float32, which no kernel reads four bits for."""
    values = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    table = torch.tensor(TABLE, dtype=torch.int8, device=codes.device)
    if dtype != torch.float32 and not has_wide_scales(codes, exponents):
        return Grouped(values, halved_scales(exponents), GROUP, table)
    wide = torch.ldexp(table[values.int()].float().view(*exponents.shape, GROUP), exponents.int()[..., None] - 128)
    return Dense(wide.flatten(1).to(dtype))
