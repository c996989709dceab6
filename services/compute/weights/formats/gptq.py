"""GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization", 2022) as AutoGPTQ and
GPTQModel write it.

Codes of 2, 4 or 8 bits: qweight [k * bits / 32, n] packs neighbouring inputs, qzeros [groups, n *
bits / 32] neighbouring outputs, both from the lowest bits of a word on. weight = (code - zero) *
scale of the input's group, which is g_idx [k]; scales are [groups, n]. The first version of the
format stores zero - 1, modulo 2 ** bits; `gptq_v2` the zero itself.
"""

import re
from dataclasses import dataclass

import torch

from services.compute.backends.matrix import Int8Columns
from services.compute.weights.formats.awq import read_awq
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

BITS = (2, 4, 8)
PARTS = ("qweight", "qzeros", "scales", "g_idx")

AUTO_ROUND_VERSIONS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}
AUTO_ROUND_AWQ = "auto_round:auto_awq"
AUTO_ROUND_FIELDS = ("bits", "group_size", "sym")


@dataclass(frozen=True, slots=True)
class Gptq:
    bits: int
    group: int | None
    zero_offset: int  # what the file has subtracted from zeros
    is_symmetric: bool
    is_ordered: bool  # desc_act: g_idx says which group an input is of
    # for layers whose names match a pattern; None: not quantized
    overrides: tuple[tuple[str, "Gptq | None"], ...] = ()

    @property
    def description(self) -> str:
        return f"GPTQ, {describe(self.bits, self.group)}"

    def holds(self, layer: StoredLayer) -> bool:
        return any(layer.has(part) for part in PARTS)

    def matrix(self, layer: StoredLayer) -> StoredWeight:
        for pattern, override in self.overrides:
            if re.match(pattern, layer.name.rstrip(".")):
                if override is None:
                    raise layer.refuse(
                        "qweight", "is quantized, and quantization_config's `dynamic` leaves this layer out"
                    )
                return override._matrix(layer)
        return self._matrix(layer)

    def _matrix(self, layer: StoredLayer) -> StoredWeight:
        n, k, per_word = layer.n, layer.k, 32 // self.bits
        if self.is_ordered and not layer.has("g_idx"):
            raise layer.refuse("g_idx", "is missing, and quantization_config says desc_act")
        groups = num_groups(k, self.group)
        words = layer.read("qweight", [(-(-k // per_word), n)], (torch.int32,), along=1)
        codes = unpack(words.T, self.bits)[:, :k].contiguous()
        stored = unpack(layer.read("qzeros", [(groups, -(-n // per_word))], (torch.int32,)), self.bits)[:, :n].T
        unsigned = (stored + self.zero_offset) & (2**self.bits - 1)
        scales = layer.read_scales("scales", [(groups, n)]).T.contiguous()
        # both on a signed grid: 8 bits as int8, fewer as codes of a table of -8..7
        codes, zeros = (signed(codes), signed(unsigned)) if self.bits == 8 else (codes, unsigned.view(torch.int8) - 8)
        order = read_order(layer, "g_idx", self.group)
        if order is not None:
            return widen_permuted(layer, codes, scales, zeros, order)
        without_zeros = self.is_symmetric and not bool(zeros.any())
        if self.bits == 8 and self.group is None and without_zeros:
            return StoredWeight(Int8Columns(codes, layer.take(scales)[:, 0].float()), AS_THEY_ARE)
        return keep_groups(layer, codes, scales, None if without_zeros else zeros.contiguous(), self.group)


def read_gptq(options: Options) -> WeightFormat:
    base = _read_one(options, options)
    overrides: list[tuple[str, Gptq | None]] = []
    for name, section in (options.section("dynamic") or Options({})).sections():
        pattern = options.pattern(name.removeprefix("+:").removeprefix("-:"))
        overrides.append((pattern, None if name.startswith("-:") else _read_one(section, options)))
    return Gptq(base.bits, base.group, base.zero_offset, base.is_symmetric, base.is_ordered, tuple(overrides))


def _read_one(options: Options, defaults: Options) -> Gptq:
    """One layer's settings, or all layers': what `options` does not say, `defaults` does."""
    merged = Options({**defaults.values, **options.values}, options.where)
    version = merged.choice(("checkpoint_format", "format"), ("gptq", "gptq_v2"), "gptq")
    merged.choice(("pack_dtype",), ("int32",), "int32")
    bits = merged.bits("bits", allowed=BITS)
    group, is_symmetric, is_ordered = (
        merged.group("group_size", default=128),
        merged.flag("sym", default=True),
        merged.flag("desc_act", default=False),
    )
    return Gptq(bits, group, 1 if version == "gptq" else 0, is_symmetric, is_ordered)


def read_auto_round(options: Options) -> WeightFormat:
    """AutoRound (Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", 2023): another
    way to find codes, in the layouts of GPTQ and AWQ.

    `packing_format` says in which; its own, `auto_round`, is GPTQ's second version. extra_config has
    settings of single layers, by name or pattern; those of 16 bits are dense.
    """
    packing = options.choice(("packing_format",), (*AUTO_ROUND_VERSIONS, AUTO_ROUND_AWQ))
    options.choice(("data_type",), ("int",), "int")
    settings = {name: options.values[name] for name in AUTO_ROUND_FIELDS if name in options.values}
    if packing == AUTO_ROUND_AWQ:
        return read_awq(Options(settings))
    extra = options.section("extra_config") or Options({})
    dynamic = {name: layer.values for name, layer in extra.sections() if layer.integer("bits", default=16) < 16}
    return read_gptq(Options(settings | {"checkpoint_format": AUTO_ROUND_VERSIONS[packing], "dynamic": dynamic}))
