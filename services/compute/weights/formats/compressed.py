"""compressed-tensors, the format of LLM Compressor: a scheme for each group of layers.

Integers: `weight` [n, k] int8, or `weight_packed` [n, k * bits / 32] int32 with codes + 2 ** (bits
- 1), neighbouring inputs from the lowest bits of a word on; weight = (code - weight_zero_point) *
weight_scale by tensor, by output (channel) or by group of inputs. Zero points are [n, groups] in
int8, or packed along the outputs. Floats: as in fp8.py. How activations are to be quantized is not
used: the backend decides that.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.matrix import Int8Columns
from services.compute.weights.formats.fp8 import keep_fp8
from services.compute.weights.formats.options import Options
from services.compute.weights.formats.stored import (
    AS_THEY_ARE,
    StoredLayer,
    StoredWeight,
    WeightFormat,
    describe,
    keep_groups,
    num_groups,
    read_order,
    signed,
    unpack,
    widen_permuted,
)
from shared.process.errors import StartupError

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
INT_BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of the layers that `targets` name are quantized."""

    targets: tuple[str, ...]  # of layers: names, re:patterns, or the class Linear
    is_float: bool
    bits: int
    strategy: str
    group: int | None  # None: the whole row
    block: tuple[int, int]
    is_symmetric: bool

    @property
    def description(self) -> str:
        kind = "FP8 by " + self.strategy if self.is_float else describe(self.bits, self.group)
        return kind if self.is_symmetric else f"{kind} with zero points"

    def scale_shapes(self, n: int, groups: int) -> list[tuple[int, ...]]:
        if self.strategy == "group":
            return [(n, groups)]
        return [(n, 1), (n,)] if self.strategy == "channel" else [(), (1,), (1, 1)]


@dataclass(frozen=True, slots=True)
class Compressed:
    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...]

    @property
    def description(self) -> str:
        return "compressed-tensors, " + " and ".join(scheme.description for scheme in self.schemes)

    def holds(self, layer: StoredLayer) -> bool:
        return not layer.is_plain() or any(layer.has(part) for part in ("weight_packed", "weight_scale"))

    def matrix(self, layer: StoredLayer) -> StoredWeight:
        scheme = self._scheme(layer)
        if scheme.is_float:
            return keep_fp8(layer, "weight_scale", scheme.block)
        return keep_integers(layer, scheme)

    def _scheme(self, layer: StoredLayer) -> Scheme:
        """The first whose targets name the layer: names come before patterns, patterns before the
        class."""
        name = layer.name.rstrip(".")
        ranks = [
            (rank, scheme)
            for scheme in self.schemes
            for target in scheme.targets
            if (rank := _rank(name, target)) is not None
        ]
        if not ranks or any(_rank(name, each) is not None for each in self.ignored):
            raise layer.refuse("weight_scale", "is there, and quantization_config names no scheme for this layer")
        return min(ranks, key=lambda each: each[0])[1]


def _rank(name: str, target: str) -> int | None:
    """How closely a target names a layer; None: not at all."""
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), name) else None
    return 0 if target == name else 2 if target == "Linear" else None


def keep_integers(layer: StoredLayer, scheme: Scheme) -> StoredWeight:
    n, groups = layer.n, num_groups(layer.k, scheme.group)
    codes = _read_codes(layer, scheme.bits)
    shapes = scheme.scale_shapes(n, groups)
    scales = layer.read_scales("weight_scale", shapes).reshape(-1, groups).expand(n, groups).contiguous()
    zeros = None if scheme.is_symmetric else _read_zeros(layer, scheme, groups, shapes)
    order = read_order(layer, "weight_g_idx", scheme.group)
    if order is not None:
        return widen_permuted(layer, codes, scales, zeros, order)
    if scheme.bits == 8 and scheme.group is None and zeros is None:
        return StoredWeight(Int8Columns(codes, layer.take(scales)[:, 0].float()), AS_THEY_ARE)
    return keep_groups(layer, codes, scales, zeros, scheme.group)


def _read_codes(layer: StoredLayer, bits: int) -> Tensor:
    """[height, k]: int8, or of fewer bits uint8 codes from 0 to 15, which stand for -8 to 7."""
    half = 1 << (bits - 1)
    if layer.has("weight_packed"):
        shape = layer.read("weight_shape", [(2,)], (torch.int64, torch.int32))
        if shape.tolist() != [layer.n, layer.k]:
            raise layer.refuse("weight_shape", f"is {shape.tolist()}; expected: {[layer.n, layer.k]}")
        words = layer.read("weight_packed", [(layer.n, -(-layer.k * bits // 32))], (torch.int32,), along=0)
        codes = unpack(words, bits)[:, : layer.k].contiguous()
        return signed(codes) if bits == 8 else codes + (8 - half)
    codes = layer.read("weight", [(layer.n, layer.k)], (torch.int8,), along=0)
    if bits == 8:
        return codes
    if not -half <= int(codes.min()) <= int(codes.max()) < half:
        raise layer.refuse("weight", f"holds values that are not of {bits} bits")
    return codes.view(torch.uint8) + 8


def _read_zeros(layer: StoredLayer, scheme: Scheme, groups: int, shapes: list[tuple[int, ...]]) -> Tensor:
    """[n, groups] int8."""
    n, half = layer.n, 1 << (scheme.bits - 1)
    words = (-(-n * scheme.bits // 32), groups)
    packed = layer.has("weight_packed") and layer.reader.stored_dtype(layer.name + "weight_zero_point") == "I32"
    stored = layer.read("weight_zero_point", [words] if packed else shapes, (torch.int32,) if packed else (torch.int8,))
    if not packed:
        return stored.reshape(-1, groups).expand(n, groups).contiguous()
    return (unpack(stored.T, scheme.bits)[:, :n].T.to(torch.int16) - half).to(torch.int8).contiguous()


def read_compressed(options: Options) -> WeightFormat:
    options.choice(("format",), FORMATS, "dense")
    for name, key in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        section = options.section(name)
        if section is not None and section.values.get(key) not in (None, "dense", {}, []):
            raise StartupError(f"quantization_config: {name} is not supported")
    groups = options.section("config_groups")
    if groups is None:
        raise StartupError("quantization_config has no config_groups")
    schemes = tuple(scheme for _, group in groups.sections() if (scheme := _read_scheme(group)) is not None)
    if not schemes:
        raise StartupError("quantization_config: config_groups quantize no weights")
    ignored = options.strings("ignore")
    for pattern in (*ignored, *(target for scheme in schemes for target in scheme.targets)):
        if pattern.startswith("re:"):
            options.pattern(pattern.removeprefix("re:"))
    return Compressed(schemes, ignored)


def _read_scheme(options: Options) -> Scheme | None:
    """The weights' scheme; None where a group quantizes activations only."""
    weights = options.section("weights")
    if weights is None:
        return None
    options.choice(("format",), FORMATS, "dense")
    is_float = weights.choice(("type",), ("int", "float"), "int") == "float"
    bits = weights.bits("num_bits", allowed=(8,) if is_float else INT_BITS, default=8)
    allowed = ("tensor", "channel", "block") if is_float else ("tensor", "channel", "group")
    size = weights.values.get("group_size")
    strategy = weights.choice(
        ("strategy",), allowed, "tensor" if size is None else "channel" if size == -1 else "group"
    )
    group = weights.group("group_size") if strategy == "group" else None
    height, width = weights.integers("block_structure", 2) or (128, 128)
    symmetric = weights.flag("symmetric", default=True)
    if is_float and not symmetric:
        raise StartupError(f"{weights.where}: floats with zero points are not supported")
    return Scheme(options.strings("targets"), is_float, bits, strategy, group, (height, width), symmetric)
