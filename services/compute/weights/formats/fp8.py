"""FP8 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): weights of eight bits as floats, times a scale.

`weight` [n, k] is float8; `weight_scale_inv` (DeepSeek-V3's name; it multiplies as well) or `weight_scale` is one number, one for each output, or one for
each block of weight_block_size outputs and inputs. Scales of activations are not used: activations stay as they are.
"""

from dataclasses import dataclass

import torch

from services.compute.weights.formats.options import Options
from services.compute.weights.formats.stored import FLOAT8, FLOATS, Format, Kept, StoredLayer, widen

Tensor = torch.Tensor

SCALES = ("weight_scale_inv", "weight_scale")
SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)
WIDENED = "dense, widened"


@dataclass(frozen=True, slots=True)
class Fp8:
    block: tuple[int, int]

    @property
    def description(self) -> str:
        return "FP8"

    def holds(self, layer: StoredLayer) -> bool:
        return not layer.is_plain() or any(layer.has(part) for part in SCALES)

    def matrix(self, layer: StoredLayer) -> Kept:
        return widen_fp8(layer, next((part for part in SCALES if layer.has(part)), SCALES[0]), self.block)


def widen_fp8(layer: StoredLayer, scale_part: str, block: tuple[int, int]) -> Kept:
    """weight * scale in float32, rounded once. block: outputs and inputs that share a scale, where there is one for each block."""
    n, k = layer.n, layer.k
    height, width = min(block[0], n), min(block[1], k)
    weight = layer.read("weight", [(n, k)], FLOAT8)
    blocks = (-(-n // height), -(-k // width))
    scales = layer.read_scales(scale_part, [(), (1,), (1, 1), (n,), (n, 1), blocks], SCALE_DTYPES).float()
    by_block = tuple(scales.shape) == blocks and scales.shape not in ((1, 1), (n, 1))
    columns = scales.reshape(-1, 1).expand(n, 1) if not by_block else None

    def rows(some: slice) -> Tensor:
        wide = weight[some].float()
        if columns is not None:
            return wide * columns[some]
        outputs = torch.arange(some.start, some.stop, device=scales.device) // height
        return wide * scales[outputs].repeat_interleave(width, 1)[:, :k]

    return Kept(widen(layer, rows), WIDENED)


def read_fp8(options: Options) -> Format:
    options.choice(("fmt",), ("e4m3", "e5m2"), "e4m3")
    height, width = options.integers("weight_block_size", 2) or (128, 128)
    return Fp8((height, width))
