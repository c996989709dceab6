"""Experts in FP8, all of a mixture in one tensor: `gate_up_proj` [experts, n, k], or [experts, k, n] in the files of
Llama 4, gpt-oss and Qwen 3 VL, and its scales under that name with an ending. They are one number, or for each expert
what fp8.py has for a layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.compute.backends.matrix import FLOAT8, Matrix
from services.compute.weights.formats import StoredLayer
from services.compute.weights.formats.fp8 import SCALE_DTYPES
from services.compute.weights.safetensors_source import SafetensorsSource

# endings of names, and the part of an expert's layer that the tensor has
PARTS = {"": "weight", "_scale_inv": "weight_scale_inv", "_scale": "weight_scale", "_weight_scale": "weight_scale"}


@dataclass(frozen=True, slots=True)
class ExpertReader:
    """The Reader of a layer that is one expert, `stacked` with a dot behind it, of tensors that hold all experts'
    weights and scales."""

    source: SafetensorsSource
    stacked: str  # the name of the weights, [experts, n, k]
    number: int
    is_turned: bool = False  # the weights are [experts, k, n]

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def file_by_name(self) -> dict[str, Path]:
        return {name: self.source.file_by_name[stored] for name, stored in self._stored_names().items()}

    def _stored_names(self) -> dict[str, str]:
        return {
            f"{self.stacked}.{part}": self.stacked + ending
            for ending, part in PARTS.items()
            if self.source.has(self.stacked + ending)
        }

    def stored_dtype(self, name: str) -> str:
        return self.source.stored_dtype(self._stored_names()[name])

    def tensor(self, name: str) -> Tensor:
        stored = self._stored_names().get(name, self.stacked + "_scale_inv")  # if there is no scale, one is missed
        shape = self.source.stored_shape(stored)
        if math.prod(shape) == 1:  # all experts' scale
            return self.source.tensor(stored)
        part = self.source.one_of(stored, self.number, shape[1:], (*FLOAT8, *SCALE_DTYPES))
        n = self.source.stored_shape(self.stacked)[2]
        is_turned = self.is_turned and part.dim() == 2 and (name.endswith(".weight") or part.shape != (n, 1))
        return part.T.contiguous() if is_turned else part


def is_stacked(source: SafetensorsSource, name: str) -> bool:
    """Whether a tensor is all experts' weights in FP8."""
    return source.has(name) and len(source.stored_shape(name)) == 3 and source.stored_dtype(name).startswith("F8_")


def read_stacked(
    source: SafetensorsSource,
    name: str,
    number: int,
    shape: tuple[int, int],
    rows: Sequence[range] | None = None,
    *,
    is_turned: bool = False,
) -> Matrix:
    """Rows of an expert's matrix [n, k]. name: of all experts' weights; is_turned: they are [experts, k, n]. Raises
    StartupError."""
    return source.matrix_of(StoredLayer(ExpertReader(source, name, number, is_turned), name + ".", *shape, rows))


def stacked_values(source: SafetensorsSource, name: str) -> Tensor:
    """All experts' weights in the model's dtype, as they lie in the file: outputs are where a scale of each is. Raises
    StartupError."""
    count, n, k = source.stored_shape(name)
    scales = [source.stored_shape(name + ending)[1:] for ending in PARTS if ending and source.has(name + ending)]
    is_turned = scales[:1] in ([(k,)], [(1, k)], [(k, 1)]) and scales[0] not in ((n,), (n, 1))
    shape = (k, n) if is_turned else (n, k)
    matrices = [read_stacked(source, name, number, shape, is_turned=is_turned) for number in range(count)]
    values = torch.stack([each.dequantize(source.dtype) for each in matrices])
    return values.mT if is_turned else values
