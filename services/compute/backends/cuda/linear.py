"""Linear layers: weights as kernels/products.py reads them, and how its tiles are chosen."""

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton

from services.compute.backends.cuda.kernels import products as kernels
from services.compute.backends.cuda.row_math import QuantizedRows, prepare, quantize
from services.compute.backends.matrix import Dense, Grouped, Int8Columns, Matrix

Tensor = torch.Tensor

GROUPS = (32, 64, 128)
FEW_ROWS = 64


class Form(IntEnum):
    """kernels/products.py's."""

    DENSE = 0
    COLUMNS = 1
    GROUPS = 2
    FOUR_BIT = 3


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at a time, and with how many threads of 32; stages: tiles on their way from memory at once."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def choose_tile(form: Form, num_rows: int, group: int, *, is_wide: bool) -> Tile:
    """docs/gpu.md says why. Dense tiles have 64 rows or more and one depth, so that all rows run through the same instructions in the same order; with int8
    any tile gives the same bits. is_wide: weights in float32, which take twice the room of others."""
    if form == Form.DENSE:
        depth = 32 if is_wide else 64
        return Tile(64, 32, depth, 4, 6) if num_rows <= FEW_ROWS else Tile(128, 64, depth, 8, 3)
    if form == Form.COLUMNS:
        return Tile(16, 32, 256, 4, 4) if num_rows <= 16 else Tile(64, 32, 128, 4, 4) if num_rows <= FEW_ROWS else Tile(128, 64, 128, 8, 3)
    return Tile(16, 32, group, 4, 4) if num_rows <= 16 else Tile(64, 32, group, 4, 3) if num_rows <= FEW_ROWS else Tile(128, 64, group, 8, 3)


def is_readable(matrix: Matrix) -> bool:
    """Whether there is a kernel that reads this form as it is."""
    if not isinstance(matrix, Grouped):
        return True
    halves = [each for each in (matrix.scales, matrix.minima) if each is not None]
    are_half = all(each.dtype == torch.float16 or torch.equal(each.half().to(each.dtype), each) for each in halves)
    are_bytes = all(each.dtype == torch.int8 for each in (matrix.table, matrix.zeros) if each is not None)
    return matrix.group in GROUPS and are_half and are_bytes


class CudaLinear:
    """x @ weight.T + bias; with is_gated, activation(the first half of the outputs) * the other half. Of quantized weights, x is quantized too."""

    def __init__(self, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype, *, is_gated: bool, activation: str) -> None:
        """matrix: readable; dtype: of x and of what comes out, and of dense weights."""
        n, self.k = matrix.shape
        self.num_outputs = n // 2 if is_gated else n
        self.dtype = dtype
        self.bias = bias
        self.activation = activation if is_gated else None
        self.scales: Tensor | None = None
        self.zeros: Tensor | None = None
        self.minima: Tensor | None = None
        self.first: int | None = None
        self.words = (0, 0)
        self.group = self.k
        if isinstance(matrix, Dense):
            self.form, self.weight = Form.DENSE, matrix.dequantize(dtype).contiguous()
        elif isinstance(matrix, Int8Columns):
            self.form, self.weight, self.scales = Form.COLUMNS, matrix.codes.contiguous(), matrix.scales.float().contiguous()
        else:
            self.group = matrix.group
            self.form, self.weight = (Form.GROUPS, matrix.codes.contiguous()) if matrix.table is None else (Form.FOUR_BIT, pack_pairs(matrix.codes))
            self.scales = matrix.scales.half().contiguous()
            self.zeros = matrix.zeros.contiguous() if matrix.zeros is not None else None
            self.minima = matrix.minima.half().contiguous() if matrix.minima is not None else None
            if matrix.table is not None:
                self.first, self.words = read_table(matrix.table)

    @property
    def num_bytes(self) -> int:
        """Of all that a call reads beside x."""
        return sum(each.nbytes for each in (self.weight, self.bias, self.scales, self.zeros, self.minima) if each is not None)

    def __call__(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None) -> Tensor:
        return self.multiply(x, norm, eps, residual, self.dtype)

    def logits(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        return self.multiply(x, norm, eps, None, torch.float32)

    def multiply(self, x: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns [T, num_outputs] in dtype."""
        num_rows, n = len(x), self.num_outputs
        out = torch.empty((num_rows, n), dtype=dtype, device=x.device)
        if num_rows == 0:
            return out
        rows: QuantizedRows | None = None
        if self.form != Form.DENSE:
            rows = quantize(x, self.group, norm=norm, eps=eps)
        elif norm is not None:
            x = prepare(x, norm=norm, eps=eps)
        tile = choose_tile(self.form, num_rows, self.group, is_wide=self.weight.dtype == torch.float32)
        grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns),)
        inputs = (x.contiguous(), None, None) if rows is None else (rows.codes, rows.scales, rows.sums)
        kernels.multiply[grid](
            *inputs, self.weight, self.scales, self.zeros, self.minima, self.bias, residual, out, num_rows, n, self.k, self.weight.stride(0), *self.words,
            FORM=int(self.form), FIRST=self.first, GROUP=self.group if self.form > Form.COLUMNS else 0, ACTIVATION=self.activation,
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out


def pack_pairs(codes: Tensor) -> Tensor:
    """[n, k] codes below 16 as [n, ceil(k / 2)] bytes, the first of two in the lower half."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous()


def read_table(table: Tensor) -> tuple[int | None, tuple[int, int]]:
    """The first of values that rise by one, or None; and the 16 values as two words of eight bytes."""
    values = table.tolist()
    first = values[0] if values == list(range(values[0], values[0] + 16)) else None
    low, high = (int.from_bytes(bytes(value & 0xFF for value in half), "little", signed=True) for half in (values[:8], values[8:]))
    return first, (low, high)
