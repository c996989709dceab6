"""bitsandbytes: NF4 and FP4 (Dettmers et al., "QLoRA", 2023) and int8 by output (Dettmers et al.,
"LLM.int8()", 2022).

Four bits: `weight` holds two codes a byte, the first in the high bits, of the matrix in one row;
weight = quant_map[code] * absmax of the block of `blocksize` neighbours. Double quantization:
absmax is itself a code, absmax = nested_quant_map[code] * nested_absmax of its block +
nested_offset. What is not a tensor is JSON, in the bytes of `weight.quant_state.bitsandbytes__nf4`
(or fp4). int8: weight = code * SCB of the output / 127.
"""

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.matrix import Int8Columns
from services.compute.weights.formats.options import Options
from services.compute.weights.formats.stored import AS_THEY_ARE, FLOATS, StoredLayer, StoredWeight, WeightFormat, widen
from shared.process.errors import StartupError

STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
STORAGES = (torch.uint8, torch.int8, *FLOATS)  # what codes may be stored as
LARGEST_OFFSET = 1e30
WIDENED = "dense, for their tables are not of integers"


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    is_four_bit: bool

    @property
    def description(self) -> str:
        return f"bitsandbytes, {4 if self.is_four_bit else 8} bits"

    def holds(self, layer: StoredLayer) -> bool:
        return not layer.is_plain() or any(layer.has(part) for part in ("weight.absmax", "SCB", *STATES))

    def matrix(self, layer: StoredLayer) -> StoredWeight:
        return widen_four_bit(layer) if self.is_four_bit else keep_int8(layer)


def keep_int8(layer: StoredLayer) -> StoredWeight:
    codes = layer.read("weight", [(layer.n, layer.k)], (torch.int8,), along=0)
    scales = layer.read_scales("SCB", [(layer.n,)])
    if (
        layer.has("weight_format")
        and int(layer.read("weight_format", [(), (1,)], (torch.uint8, torch.int8, torch.int32, torch.int64))) != 0
    ):
        raise layer.refuse(
            "weight_format",
            "says that rows are rearranged for a GPU; save it again with a newer version of bitsandbytes",
        )
    return StoredWeight(Int8Columns(codes, layer.take(scales).float() / 127), AS_THEY_ARE)


def widen_four_bit(layer: StoredLayer) -> StoredWeight:
    n, k = layer.n, layer.k
    state_part, state = _state(layer)
    if state.integers("shape", 2) != (n, k):
        raise layer.refuse(state_part, f"says that the shape is {state.values.get('shape')}; expected: {[n, k]}")
    block = _block(state, "blocksize")
    stored = layer.read("weight", [], STORAGES)
    codes = stored.contiguous().flatten().view(torch.uint8)
    if len(codes) != -(-n * k // 2):
        raise layer.refuse("weight", f"has {len(codes)} bytes; expected: {-(-n * k // 2)}")
    table = layer.read_scales("weight.quant_map", [(16,)]).float()
    scales = _scales(layer, state, -(-n * k // block))

    def values(some: range) -> Tensor:
        begin, end = some.start * k, some.stop * k
        pairs = codes[begin // 2 : -(-end // 2)]  # the first may be half another row's
        of_codes = table[torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten()[begin % 2 :][: end - begin].int()]
        blocks = torch.arange(begin, end, device=codes.device) // block
        return (of_codes * scales[blocks]).view(-1, k)

    return StoredWeight(widen(layer, lambda some: torch.cat([values(each) for each in layer.within(some)])), WIDENED)


def _state(layer: StoredLayer) -> tuple[str, Options]:
    """The name and the fields of the quant_state."""
    part = next((each for each in STATES if layer.has(each)), STATES[0])
    data = bytes(layer.read(part, [], (torch.uint8,)).cpu().flatten().tolist())
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise layer.refuse(part, f"is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise layer.refuse(part, "is not an object")
    return part, Options(state, layer.name + part)


def _block(state: Options, name: str) -> int:
    size = state.integer(name)
    if size < 1:
        raise StartupError(f"{state.where}: {name} {size} is not supported; it must be positive")
    return size


def _scales(layer: StoredLayer, state: Options, count: int) -> Tensor:
    """absmax of each block, [count] float32."""
    if not layer.has("weight.nested_absmax"):
        return layer.read_scales("weight.absmax", [(count,)]).float()
    codes = layer.read("weight.absmax", [(count,)], (torch.uint8,))
    block = _block(state, "nested_blocksize")
    offset = state.values.get("nested_offset")
    if not isinstance(offset, int | float) or not abs(offset) < LARGEST_OFFSET:
        raise StartupError(f"{state.where}: nested_offset {offset!r} is not a number")
    table = layer.read_scales("weight.nested_quant_map", [(256,)]).float()
    outer = layer.read_scales("weight.nested_absmax", [(-(-count // block),)]).float()
    return table[codes.int()] * outer[torch.arange(count, device=outer.device) // block] + offset


def read_bitsandbytes(options: Options) -> WeightFormat:
    four, eight = options.flag("load_in_4bit", default=False), options.flag("load_in_8bit", default=False)
    if four == eight:
        raise StartupError("quantization_config: one of load_in_4bit and load_in_8bit must be true")
    return BitsAndBytes(is_four_bit=four)
