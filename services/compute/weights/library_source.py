"""A safetensors checkpoint by the names of transformers' parameters, in whatever form it has them.

The library renames tensors when it loads a checkpoint, and makes parameters of several (experts of one
file each are one tensor in memory, a fused matrix is cut). Its rules are for weights in float; here they
are run on the numbers of rows. They say which rows of which stored matrices a parameter is made of, and
these are read in the format that they have. Where a rule does more than move whole rows, it is run on
the weights.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from services.compute.backends.matrix import Dense, Matrix, concatenate
from services.compute.models.decoder import EmbeddingRows
from services.compute.models.library_errors import first_line
from services.compute.weights.formats import StoredLayer
from services.compute.weights.formats.stored import FLOATS
from services.compute.weights.mxfp4 import to_matrix
from services.compute.weights.safetensors_source import SafetensorsSource
from services.compute.weights.stacked_experts import is_stacked, read_stacked, stacked_values
from shared.model.files import text_config
from shared.process.errors import StartupError

# endings of the tensor that stands for a matrix in a quantized format, and the ending of its weight
MATRIX_PARTS = {".qweight": ".weight", ".weight_packed": ".weight", "_blocks": ""}
ROW_OPERATIONS = (Chunk, Concatenate, Interleave, MergeModulelist, PermuteForRope, Split)


@dataclass(slots=True)
class Origin:
    """The stored tensors that a parameter is made of."""

    converter: WeightConverter | None  # the rule; None: of one tensor, as it is
    first: str  # the parameter that names the rule's results
    # the stored weights, each with the rule's pattern that it fits
    sources: list[tuple[str, str]] = field(default_factory=list)


class ConvertedSource:
    """The tensors of a checkpoint in a folder, for the modules of a model."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, model: Any, key_mapping: dict[str, str] | None
    ) -> None:
        """model: on the device `meta`; key_mapping: more names, pattern by pattern. Raises StartupError."""
        self.folder = folder
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.stored = SafetensorsSource(
            folder, dtype, device, text_config(config).get("quantization_config"), has_own_names=True
        )
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        # all that the library's rules ask of a model
        self._model = SimpleNamespace(get_parameter=dict(model.named_parameters()).__getitem__, config=model.config)
        self._origins = self._find_origins(model, get_model_conversion_mapping(model, key_mapping))
        self._last: tuple[str, Tensor] | None = None  # a parameter that was made of floats
        for one, other in model.all_tied_weights_keys.items():
            for missing, there in ((one, other), (other, one)):
                if missing not in self._origins and there in self._origins:
                    self._origins[missing] = self._origins[there]

    def _find_origins(self, model: Any, rules: Sequence[Any]) -> dict[str, Origin]:
        renamings = [each for each in rules if isinstance(each, WeightRenaming)]
        converters = [each for each in rules if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        state, prefix = model.state_dict(), model.base_model_prefix
        origins: dict[str, Origin] = {}
        for stored in sorted({_weight_of(name) for name in self.stored.file_by_name}, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
            if name not in state and stored in state:
                name, pattern = rename_source_key(stored, [], [], prefix, state)
            if name not in state:
                continue
            converter = None if pattern is None else by_pattern[pattern]
            origin = origins.setdefault(name, Origin(converter, name))
            origin.sources.append((pattern or stored, stored))
            if converter is not None:
                first, *others = converter.target_patterns
                origins |= {name.replace(first, other): origin for other in others}
        return origins

    @property
    def quantized_as(self) -> str:
        return self.stored.quantized_as

    def has(self, name: str) -> bool:
        return name in self._origins

    def is_tied(self, head: str, embedding: str) -> bool:
        """Whether these parameters are one tensor of the checkpoint."""
        return not self.has(head) or self._origins[head] is self._origins.get(embedding)

    def tied_head(self, embedding: Tensor | None, shape: tuple[int, int]) -> Matrix:  # noqa: ARG002
        """The embedding as the matrix of the head. embedding: the model's own."""
        assert embedding is not None
        return Dense(embedding)

    def kept_embedding(self, shape: tuple[int, int], name: str) -> EmbeddingRows | None:  # noqa: ARG002
        """None: the rows of an embedding are read at start."""
        return None

    def orders(self, name: str) -> tuple[None, None]:  # noqa: ARG002
        """Rows and columns are in the order of the modules."""
        return None, None

    def check_modules(self, model: Any) -> None:
        """Raises StartupError for a tensor that the checkpoint has not."""
        ignored = model._keys_to_ignore_on_load_missing or ()
        for name in self.shapes:
            if name not in self._origins and not any(re.search(each, name) for each in ignored):
                raise StartupError(f"{self.folder}: the checkpoint has no tensor {name}")

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The weight [n, k] of the linear layer `name`, which ends in a dot."""
        return self._rows(name + "weight", shape, None)

    def expert(self, name: str, number: int, shape: tuple[int, int], *, is_transposed: bool) -> Matrix:
        """An expert's matrix [n, k], of the parameter of all of them."""
        origin = self._origins[name]
        stored = origin.sources[0][1]
        if self.stored.has(stored + "_blocks"):
            n, groups = shape[0], shape[1] // 32
            codes = self.stored.one_of(stored + "_blocks", number, (n, groups, 16), (torch.uint8,))
            scales = self.stored.one_of(stored + "_scales", number, (n, groups), (torch.uint8,))
            return to_matrix(codes, scales, self.stored.dtype)
        if is_stacked(self.stored, stored) and self._is_turned(origin, name) != is_transposed:
            return read_stacked(self.stored, stored, number, shape, is_turned=True)
        if not is_transposed:
            return self._rows(name, shape, number)
        return Dense(self._rows(name, shape[::-1], number).dequantize(self.stored.dtype).T.contiguous())

    def _is_turned(self, origin: Origin, name: str) -> bool:
        """Whether the rule does nothing but exchange rows and columns of each expert."""
        match [] if origin.converter is None else origin.converter.operations:
            case [Transpose(dim0=1, dim1=2) as rule]:
                return not rule.check_dims or self.stored.stored_shape(origin.sources[0][1]) != self.shapes[name]
        return False

    def dense(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A parameter in floats; dtype: another than the model's."""
        return self._whole(name, shape).to(device=self.stored.device, dtype=dtype or self.stored.dtype, copy=True)

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        origin = self._origins[name]
        if origin.converter is None:
            tensor = self._values(origin, origin.sources[0][1], shape)
        else:
            values = [self._values(origin, stored, shape) for _, stored in origin.sources]
            tensor = self._convert(origin, values)[name]
        if tuple(tensor.shape) != shape:
            raise StartupError(f"{self.folder}: {name} has the shape {tuple(tensor.shape)}, config.json says {shape}")
        return tensor

    def _values(self, origin: Origin, stored: str, shape: tuple[int, ...]) -> Tensor:
        """A stored weight in floats, of a parameter of this shape."""
        if is_stacked(self.stored, stored):
            return stacked_values(self.stored, stored)
        layer = self._layer(origin, stored, shape[-1]) if shape else None
        if layer is not None and self.stored.format is not None and self.stored.format.holds(layer):
            return self.stored.matrix(layer.name, (layer.n, layer.k)).dequantize(self.stored.dtype)
        tensor = self.stored.tensor(stored)
        if tensor.element_size() < 2 and tensor.dtype != torch.bool:
            raise StartupError(
                f"{self.folder}: {stored} is {str(tensor.dtype).removeprefix('torch.')}, and config.json has no "
                "quantization_config that says how to read it"
            )
        return tensor

    def _layer(self, origin: Origin, stored: str, k: int) -> StoredLayer | None:
        """The stored linear layer; None: it is no matrix of one."""
        name = stored.removesuffix("weight")
        if not stored.endswith(".weight"):
            return None
        if self.stored.has(stored) and not self.stored.has(stored + ".absmax"):
            shape = self.stored.stored_shape(stored)
            return StoredLayer(self.stored, name, shape[0], k) if len(shape) == 2 else None
        # packed: the file does not say how many rows there are
        targets = [other for other, each in self._origins.items() if each is origin and origin.converter is not None]
        height = sum(math.prod(self.shapes[other][:-1]) for other in targets or [origin.first])
        return StoredLayer(self.stored, name, height // len(origin.sources), k)

    def _convert(self, origin: Origin, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """The library's rule, run on these instead of what is stored. By the parameter's name. Raises
        StartupError."""
        converter = deepcopy(origin.converter)
        assert converter is not None
        for (pattern, stored), each in zip(origin.sources, values, strict=True):
            converter.add_tensor(origin.first, stored, pattern, each)
        try:
            made = converter.convert(origin.first, model=self._model, config=self._model.config)
        except Exception as error:  # of the library's own code
            raise StartupError(
                f"{self.folder}: transformers can't make {origin.first} of the checkpoint's tensors: "
                f"{first_line(error)}"
            ) from None
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def _rows(self, name: str, shape: tuple[int, int], number: int | None) -> Matrix:
        """A parameter [n, k], or a part of one [count, n, k], of the stored matrices that have its
        rows."""
        origin, k = self._origins[name], shape[1]
        whole = shape if number is None else self.shapes[name]
        heights = [self._stored_heights(origin, stored, whole) for _, stored in origin.sources]
        starts = list(accumulate((count * height for count, height in heights), initial=0))
        rows = self._numbers(origin, name, heights)
        if rows is None or len(runs := _runs(rows if number is None else rows[number], starts)) > 2 * len(heights):
            if self._last is None or self._last[0] != name:
                self._last = name, self._whole(name, whole)
            part = self._last[1] if number is None else self._last[1][number]
            return Dense(part.to(device=self.stored.device, dtype=self.stored.dtype, copy=True))
        parts = []
        for run in runs:
            place = next(place for place, end in enumerate(starts[1:]) if run.start < end)
            own = range(run.start - starts[place], run.stop - starts[place])
            parts.append(self._read(origin, origin.sources[place][1], heights[place], own, k))
        return concatenate(parts, self.stored.dtype)

    def _stored_heights(self, origin: Origin, stored: str, whole: tuple[int, ...]) -> tuple[int, int]:
        """How many matrices a stored tensor holds, and of how many rows."""
        layer = self._layer(origin, stored, whole[-1])
        if layer is not None:
            return 1, layer.n
        shape = self.stored.stored_shape(stored)
        return (shape[0], shape[1]) if len(shape) == 3 else (1, shape[0])

    def _numbers(self, origin: Origin, name: str, heights: list[tuple[int, int]]) -> Tensor | None:
        """Which row of all stored ones is where, [..., n] int64; None: the rule does not move whole
        rows."""
        total = sum(count * height for count, height in heights)
        if origin.converter is None:
            if total != math.prod(self.shapes[name][:-1]):
                shape = self.stored.stored_shape(origin.sources[0][1])
                raise StartupError(f"{self.folder}: {name} has the shape {shape}, config.json says {self.shapes[name]}")
            return torch.arange(total).view(self.shapes[name][:-1])
        if not all(isinstance(each, ROW_OPERATIONS) for each in origin.converter.operations):
            return None
        numbers = torch.split(torch.arange(total), [count * height for count, height in heights])
        narrow = [
            each.view(*((count, height, 1) if count > 1 else (height, 1)))
            for each, (count, height) in zip(numbers, heights, strict=True)
        ]
        found = self._convert(origin, narrow)[name]
        return found[..., 0] if tuple(found.shape) == (*self.shapes[name][:-1], 1) else None

    def _read(self, origin: Origin, stored: str, heights: tuple[int, int], rows: range, k: int) -> Matrix:
        """Rows of a stored tensor, which are of one of its matrices."""
        layer, (_, height) = self._layer(origin, stored, k), heights
        if layer is not None:
            return self.stored.matrix(layer.name, (layer.n, k), None if len(rows) == layer.n else [rows])
        if len(self.stored.stored_shape(stored)) < 3:
            return Dense(self.stored.dense(stored, (height, k), [rows]))
        number, first = divmod(rows.start, height)
        if is_stacked(self.stored, stored):
            return read_stacked(self.stored, stored, number, (height, k), [range(first, first + len(rows))])
        part = self.stored.one_of(stored, number, (height, k), FLOATS)
        return Dense(part[first : first + len(rows)].to(self.stored.dtype))

    def report(self) -> None:
        self.stored.report()

    def close(self) -> None:
        self.stored.close()


def _weight_of(name: str) -> str:
    """The name of the weight that a stored tensor stands for."""
    for ending, weight in MATRIX_PARTS.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + weight
    return name


def _runs(rows: Tensor, starts: Sequence[int]) -> list[range]:
    """[n] int64 as ranges of neighbours, none of which reaches beyond one of the starts."""
    breaks = (rows[1:] != rows[:-1] + 1) | torch.isin(rows[1:], torch.tensor(starts))
    borders = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(rows)]
    return [range(int(rows[a]), int(rows[a]) + b - a) for a, b in pairwise(borders)]
