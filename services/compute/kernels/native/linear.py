"""Linear layers in native code: weights packed for the instruction that reads them, in bfloat16, in int8, or in four bits.

Quantized weights meet activations in int8, with one scale for each token, taken when they are computed; products are summed exactly, in
int32, over all inputs (int8) or over a group (four bits). What comes before a layer, the norm, and what comes after it, SiLU times
up or the residual, happen inside.
"""

import ctypes

import torch

from services.compute.kernels.native.library import Weight, load_library, pointer
from services.compute.kernels.reference import FourBitWeight, quantize_four_bit

Tensor = torch.Tensor

TYPES = {"none": 0, "w8a8": 1, "w4": 2, "nf4": 2}
PAIR, COLUMNS, TILE_BYTES = 32, 16, 64


class NativeLinear:
    """x @ weight.T + bias on packed weights. The weight itself may be dropped."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, quantization: str = "none", group: int = 64, is_gated: bool = False) -> None:
        """weight: [n, k] bfloat16, with is_gated its first half is the gate's; bias: [n]; group: inputs that share a scale, with four bits."""
        library = load_library()
        assert library is not None and weight.dtype == torch.bfloat16
        self.library = library
        n, k = weight.shape
        kind = TYPES[quantization]
        padded_k = _round_up(k, (TILE_BYTES // 2, TILE_BYTES, max(group, TILE_BYTES))[kind])
        padded_n = PAIR * _round_up(n // 2, COLUMNS) // COLUMNS if is_gated else _round_up(n, PAIR)
        self.num_outputs = n // 2 if is_gated else n
        self.bias = torch.zeros(padded_n) if bias is not None else None
        self.struct = Weight(kind, n, k, padded_n, padded_k, int(is_gated), bias=pointer(self.bias), group=group)
        self.address = ctypes.byref(self.struct)
        if kind == TYPES["w4"]:
            self._pack_four_bit(quantize_four_bit(weight, quantization, group), bias)
            return
        self.data = _aligned(padded_n * padded_k * (2 if kind == 0 else 1))
        self.scales = torch.zeros(padded_n)
        self.sums = torch.zeros(padded_n, dtype=torch.int32)
        self.struct.data, self.struct.scales, self.struct.sums = (each.data_ptr() for each in (self.data, self.scales, self.sums))
        library.penstock_pack(self.address, weight.contiguous().data_ptr(), pointer(bias))

    def _pack_four_bit(self, weight: FourBitWeight, bias: Tensor | None) -> None:
        struct = self.struct
        shape = (struct.padded_k // weight.group, struct.padded_n)
        self.data = _aligned(struct.padded_n * struct.padded_k // 2)
        self.table = weight.table
        self.scales, self.sums = torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.int16)
        self.zeros = torch.zeros(shape, dtype=torch.int8) if weight.zeros is not None else None
        struct.data, struct.table, struct.group_scales, struct.group_sums = (each.data_ptr() for each in (self.data, self.table, self.scales, self.sums))
        struct.zeros = pointer(self.zeros)
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        self.library.penstock_pack_codes(self.address, codes.data_ptr(), scales.data_ptr(), pointer(weight.zeros), pointer(bias))

    def __call__(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None) -> Tensor:
        out = torch.empty((len(x), self.num_outputs), dtype=torch.bfloat16)
        self.library.penstock_linear(self.address, x.data_ptr(), pointer(norm), eps, len(x), pointer(residual), out.data_ptr(), None)
        return out

    def logits(self, x: Tensor, *, norm: Tensor, eps: float) -> Tensor:
        """The same in float32, as the sampler wants it."""
        out = torch.empty((len(x), self.num_outputs), dtype=torch.float32)
        self.library.penstock_linear(self.address, x.data_ptr(), norm.data_ptr(), eps, len(x), None, None, out.data_ptr())
        return out


class NativeMlp:
    """x + down(silu(gate) * up) of the normalized x, as one call."""

    def __init__(self, gate_up: NativeLinear, down: NativeLinear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor, *, norm: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self.down.library.penstock_mlp(self.gate_up.address, self.down.address, x.data_ptr(), norm.data_ptr(), eps, len(x), out.data_ptr())
        return out


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _aligned(num_bytes: int) -> Tensor:
    """Zeros that begin at a cache line."""
    buffer = torch.zeros(num_bytes + TILE_BYTES, dtype=torch.uint8)
    start = -buffer.data_ptr() % TILE_BYTES
    return buffer[start : start + num_bytes]
