"""AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023) in AutoAWQ's `gemm` layout.

Codes of four bits, packed along the outputs: a word of qweight [k, n / 8] and of qzeros [groups, n
/ 8] holds eight neighbouring outputs, from its lowest bits on in the order 0, 2, 4, 6, 1, 3, 5, 7.
weight = (code - zero) * scale, with scales [groups, n].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.weights.formats.options import Options
from services.compute.weights.formats.stored import (
    StoredLayer,
    StoredWeight,
    WeightFormat,
    describe,
    keep_groups,
    num_groups,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word
PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, slots=True)
class Awq:
    group: int | None

    @property
    def description(self) -> str:
        return f"AWQ, {describe(4, self.group)}"

    def holds(self, layer: StoredLayer) -> bool:
        return any(layer.has(part) for part in PARTS)

    def matrix(self, layer: StoredLayer) -> StoredWeight:
        groups, words = num_groups(layer.k, self.group), layer.n // 8
        if layer.n % 8:
            raise layer.refuse("qweight", f"packs eight outputs in a word, and {layer.n} can't be divided by 8")
        codes = layer.trim(
            unpack_outputs(layer.read("qweight", [(layer.k, words)], (torch.int32,), along=1, per=8)), per=8
        )
        zeros = unpack_outputs(layer.read("qzeros", [(groups, words)], (torch.int32,)))
        scales = layer.read_scales("scales", [(groups, layer.n)])
        return keep_groups(layer, codes, scales.T.contiguous(), zeros.view(torch.int8) - 8, self.group)


def unpack_outputs(words: Tensor) -> Tensor:
    """[m, n / 8] int32 to [n, m] uint8."""
    columns = words.T.contiguous()
    codes = torch.empty((columns.shape[0], 8, columns.shape[1]), dtype=torch.uint8, device=words.device)
    for place, output in enumerate(ORDER):
        codes[:, output] = (columns >> 4 * place) & 15
    return codes.flatten(0, 1)


def read_awq(options: Options) -> WeightFormat:
    options.choice(("version", "checkpoint_format", "format"), ("gemm",), "gemm")
    options.bits("bits", "w_bit", allowed=(4,))
    return Awq(options.group("group_size", "q_group_size", default=128))
