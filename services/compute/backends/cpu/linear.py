"""Linear layers in native code: weights packed for the instruction that reads them, in bfloat16, in int8, or in four bits.

Quantized weights meet activations in int8, with one scale for each token, taken when they are computed; products are summed exactly, in
int32, over all inputs (int8) or over a group (four bits). What comes before a layer, the norm, and what comes after it, SiLU times
up or the residual, happen inside.
"""

import ctypes

import torch

from services.compute.backends.cpu.library import Weight, load_library, pointer
from services.compute.backends.torch.reference import FOUR_BIT_TABLES, quantize_four_bit
from services.compute.host_memory import mapped_zeros

Tensor = torch.Tensor

TYPES = {"none": 0, "w8a8": 1, "w4": 2, "nf4": 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
PAIR, COLUMNS, TILE_BYTES = 32, 16, 64


class NativeLinear:
    """x @ weight.T + bias on packed weights, which are `parts`: nothing else has to be kept, in memory or in a file."""

    def __init__(
        self, n: int, k: int, *, quantization: str = "none", group: int = 64, is_gated: bool = False, has_bias: bool = False, activation: str = "silu"
    ) -> None:
        """n, k: outputs and inputs; with is_gated the first half of n is the gate's, which goes through the activation; group: inputs that share a
        scale, with four bits."""
        library = load_library()
        assert library is not None
        self.library = library
        self.quantization, self.group = quantization, group
        kind = TYPES[quantization]
        padded_k = _round_up(k, (TILE_BYTES // 2, TILE_BYTES, max(group, TILE_BYTES))[kind])
        padded_n = PAIR * _round_up(n // 2, COLUMNS) // COLUMNS if is_gated else _round_up(n, PAIR)
        self.num_outputs = n // 2 if is_gated else n
        self.rows = torch.empty((0, self.num_outputs))  # of logits
        self.struct = Weight(kind, n, k, padded_n, padded_k, int(is_gated), group=group, activation=ACTIVATIONS[activation])
        self.address = ctypes.byref(self.struct)
        groups = (padded_n // PAIR, padded_k // group, PAIR)
        self.parts = {"data": mapped_zeros(padded_n * padded_k * (4, 2, 1)[kind] // 2)}
        if quantization == "w8a8":
            self.parts |= {"scales": torch.zeros(padded_n), "sums": torch.zeros(padded_n, dtype=torch.int32)}
        elif kind == TYPES["w4"]:
            self.parts |= {"table": torch.tensor(FOUR_BIT_TABLES[quantization], dtype=torch.int8)}
            self.parts["group_scales"] = torch.zeros(groups, dtype=torch.float16)
        if quantization == "w4":
            self.parts["zeros"] = torch.zeros(groups, dtype=torch.int8)
        if has_bias:
            self.parts["bias"] = torch.zeros(padded_n)
        for name, part in self.parts.items():
            setattr(self.struct, name, part.data_ptr())

    def pack(self, weight: Tensor, bias: Tensor | None) -> "NativeLinear":
        """Fill the parts from weight [n, k] and bias [n], bfloat16."""
        assert weight.dtype == torch.bfloat16
        if TYPES[self.quantization] == TYPES["w4"]:
            quantized = quantize_four_bit(weight, self.quantization, self.group)
            codes, scales = quantized.codes.contiguous(), quantized.scales.contiguous()
            self.library.penstock_pack_codes(self.address, codes.data_ptr(), scales.data_ptr(), pointer(quantized.zeros), pointer(bias))
        else:
            self.library.penstock_pack(self.address, weight.contiguous().data_ptr(), pointer(bias))
        return self

    def restore(self, parts: dict[str, Tensor]) -> "NativeLinear":
        """Fill the parts from others of the same layer. Raises ValueError if they are not."""
        if {name: (part.shape, part.dtype) for name, part in parts.items()} != {name: (part.shape, part.dtype) for name, part in self.parts.items()}:
            raise ValueError("its parts have other shapes or types")
        for name, part in parts.items():
            self.parts[name].copy_(part)
        return self

    def __call__(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None) -> Tensor:
        out = torch.empty((x.shape[0], self.num_outputs), dtype=torch.bfloat16)
        self.library.penstock_linear(self.address, x.data_ptr(), pointer(norm), eps, x.shape[0], pointer(residual), out.data_ptr(), None)
        return out

    def logits(self, x: Tensor, *, norm: Tensor, eps: float) -> Tensor:
        """The same in float32, as the sampler wants it, in memory that the next call writes again: fresh pages would take the system longer than
        the kernel takes to fill them."""
        rows = x.shape[0]
        if rows > len(self.rows):
            self.rows = mapped_zeros(rows * self.num_outputs * 4).view(torch.float32).view(rows, self.num_outputs)
        self.library.penstock_linear(self.address, x.data_ptr(), norm.data_ptr(), eps, rows, None, None, self.rows.data_ptr())
        return self.rows[:rows]


class NativeMlp:
    """down(activation(gate) * up) as one call, with the norm before it and the residual after it."""

    def __init__(self, gate_up: NativeLinear, down: NativeLinear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        out = torch.empty_like(x)
        residual = x.data_ptr() if has_residual else None
        self.down.library.penstock_mlp(self.gate_up.address, self.down.address, x.data_ptr(), pointer(norm), eps, x.shape[0], residual, out.data_ptr())
        return out


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
