"""FP8 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): weights of eight bits as
floats, times a scale.

`weight` [n, k] is float8; `weight_scale_inv` (DeepSeek-V3's name; it multiplies as well) or
`weight_scale` is one number, one for each output, or for each block of weight_block_size outputs and
inputs; of a gate and an up in one matrix also one for each of the two. Scales of activations are not
used: activations stay as they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.matrix import FLOAT8, Float8
from services.compute.weights.formats.options import Options
from services.compute.weights.formats.stored import FLOATS, StoredLayer, StoredWeight, WeightFormat
from services.compute.weights.source import take_rows

SCALES = ("weight_scale_inv", "weight_scale")
IN_FP8 = "in FP8"
SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class Fp8:
    block: tuple[int, int]

    @property
    def description(self) -> str:
        return "FP8"

    def holds(self, layer: StoredLayer) -> bool:
        return not layer.is_plain() or any(layer.has(part) for part in SCALES)

    def matrix(self, layer: StoredLayer) -> StoredWeight:
        return keep_fp8(layer, next((part for part in SCALES if layer.has(part)), SCALES[0]), self.block)


def keep_fp8(layer: StoredLayer, scale_part: str, block: tuple[int, int]) -> StoredWeight:
    """Codes and scales as they are. block: outputs and inputs that share a scale, where there is
    one for each block."""
    n, k = layer.n, layer.k
    height, width = min(block[0], n), min(block[1], k)
    codes = layer.read("weight", [(n, k)], FLOAT8, along=0)
    blocks = (-(-n // height), -(-k // width))
    halves = [(2, 1)] if layer.name.endswith("gate_up_proj.") and n % 2 == 0 else []
    scales = layer.read_scales(scale_part, [(), (1,), (1, 1), (n,), (n, 1), blocks, *halves], SCALE_DTYPES).float()
    if tuple(scales.shape) == blocks and scales.shape not in ((1, 1), (n, 1)):
        taken, height = take_blocks(layer, scales, height)
        matrix = Float8(codes, taken, width, height)
    else:
        matrix = Float8(
            codes, layer.take(scales.reshape(-1, 1).repeat_interleave(n // scales.numel(), 0)).contiguous(), k
        )
    return StoredWeight(matrix, IN_FP8)


def take_blocks(layer: StoredLayer, scales: Tensor, height: int) -> tuple[Tensor, int]:
    """The wanted rows' scales of [n / height, groups], and how many rows share one: where a border is
    inside a block, each row has its own."""
    if all(each.start % height == 0 for each in layer.ranges) and all(
        each.stop % height == 0 for each in layer.ranges[:-1]
    ):
        return take_rows(
            scales, [range(each.start // height, -(-each.stop // height)) for each in layer.ranges]
        ), height
    numbers = torch.cat([torch.arange(each.start, each.stop) for each in layer.ranges]).to(scales.device)
    return scales[numbers // height], 1


def read_fp8(options: Options) -> WeightFormat:
    options.choice(("fmt",), ("e4m3", "e5m2"), "e4m3")
    height, width = options.integers("weight_block_size", 2) or (128, 128)
    return Fp8((height, width))
