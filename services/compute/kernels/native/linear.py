"""Linear layers in native code: weights packed for the instruction that reads them, in bfloat16 or int8.

int8 is W8A8: weights have one scale for each output column, activations one for each token, taken when they are computed; products
are summed exactly, in int32. What comes before a layer, the norm, and what comes after it, SiLU times up or the residual, happen inside.
"""

import ctypes

import torch

from services.compute.kernels.native.library import Weight, load_library, pointer

Tensor = torch.Tensor

TYPES = {"bf16": 0, "w8a8": 1}
PAIR, COLUMNS, TILE_BYTES = 32, 16, 64


class NativeLinear:
    """x @ weight.T + bias on packed weights. The weight itself may be dropped."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, mode: str, is_gated: bool = False) -> None:
        """weight: [n, k] bfloat16, with is_gated its first half is the gate's; bias: [n]; mode: bf16 or w8a8."""
        library = load_library()
        assert library is not None and weight.dtype == torch.bfloat16
        self.library = library
        n, k = weight.shape
        element = 1 if mode == "w8a8" else 2
        padded_k = _round_up(k * element, TILE_BYTES) // element
        padded_n = PAIR * _round_up(n // 2, COLUMNS) // COLUMNS if is_gated else _round_up(n, PAIR)
        self.num_outputs = n // 2 if is_gated else n
        self.data = _aligned(padded_n * padded_k * element)
        self.scales = torch.zeros(padded_n) if mode == "w8a8" else None
        self.sums = torch.zeros(padded_n, dtype=torch.int32) if mode == "w8a8" else None
        self.bias = torch.zeros(padded_n) if bias is not None else None
        tensors = (pointer(each) for each in (self.data, self.scales, self.sums, self.bias))
        self.struct = Weight(TYPES[mode], n, k, padded_n, padded_k, int(is_gated), *tensors)
        self.address = ctypes.byref(self.struct)
        library.penstock_pack(self.address, weight.contiguous().data_ptr(), pointer(bias))

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
