"""Linear layers: weights as kernels/products.py reads them, and how its tiles are chosen; or the
vendor's products, where bits may depend on the batch."""

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
from torch import Tensor

from services.compute.backends.cuda.kernels import products as kernels
from services.compute.backends.cuda.row_math import QuantizedRows, prepare, quantize
from services.compute.backends.matrix import Dense, Float8, Grouped, Int4Columns, Int8Columns, OneForm

GROUPS = (32, 64, 128)
FEW_ROWS, SOME_ROWS = 64, 512
FLOAT8_DEPTH = 128  # inputs that tensor cores may add up in fewer bits than float32 has
VENDOR_UNIT = {torch.int8: 8, torch.float8_e4m3fn: 16}  # inputs and outputs come in multiples of it
FINISHED_ROWS, FINISHED_COLUMNS = 4, 512  # of a program
NARROW = 32  # columns of a tile of few rows
MIN_SPAN, MAX_PARTS = 512, 8
PROGRAMS = 8  # of a multiprocessor, to which the sums of groups are divided: each waits for its group's products
SPAN_UNIT = 256  # a multiple of all tiles' depths


class WeightForm(IntEnum):
    """kernels/products.py's."""

    DENSE = 0
    COLUMNS = 1
    GROUPS = 2
    FOUR_BIT = 3
    FLOAT8 = 4
    FLOAT8_BLOCKS = 5


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile that one program computes at a time, and its warps; stages: tiles on their way from
    memory at once."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class SplitK:
    """How a layer's sums are divided: over each `span` inputs, and then over these parts."""

    span: int
    enough_tiles: int  # from this many on the device is busy: then one program has all parts


def divide(n: int, k: int, multiprocessors: int, *, has_groups: bool) -> SplitK | None:
    """The parts of a layer [n, k] that has tiles of outputs for less than half of a device's programs; None:
    it has enough, or its inputs are few. It depends on nothing else: the parts decide bits. has_groups: of
    int8 or 4-bit codes, whose programs run PROGRAMS together."""
    num_tiles, num_programs = triton.cdiv(n, NARROW), multiprocessors * (PROGRAMS if has_groups else 1)
    num_parts = min(num_programs // num_tiles, k // MIN_SPAN, MAX_PARTS)
    if num_parts < 2:
        return None
    return SplitK(triton.cdiv(triton.cdiv(k, num_parts), SPAN_UNIT) * SPAN_UNIT, num_programs // 2)


def choose_tile(form: WeightForm, num_rows: int, group: int, *, is_gated: bool, is_wide: bool, is_hopper: bool) -> Tile:
    """The fastest that were measured on an H200; docs/understand/gpu.md says how fast. Dense and FP8 tiles
    have 64 rows or more and one depth, so that all rows run through the same instructions in the same
    order; with int8 any tile gives the same bits. None takes more than 96 KB of a multiprocessor's
    memory. is_gated: two products, one after the other; is_wide: weights in float32, which take twice the
    room of others; is_hopper: its tensor cores read from shared memory, and leave registers for larger
    tiles, which others would spill."""
    if num_rows <= FEW_ROWS:
        return _tile_of_few(form, num_rows, group, is_gated=is_gated, is_wide=is_wide)
    if not is_hopper or is_wide:
        depth = {WeightForm.DENSE: 32 if is_wide else 64, WeightForm.COLUMNS: 128, WeightForm.FLOAT8: FLOAT8_DEPTH}.get(
            form, group
        )
        return Tile(128, 128 if form == WeightForm.FLOAT8 else 64, depth, 8, 3)
    is_some = num_rows <= SOME_ROWS
    if form == WeightForm.DENSE:
        return Tile(64, 128, 64, 4, 4) if is_some else Tile(128, 128, 64, 8, 3)
    if form == WeightForm.COLUMNS:
        return Tile(64, 128, 128, 4, 4) if is_some else Tile(128, 128, 128, 4, 3)
    if form >= WeightForm.FLOAT8:
        return Tile(64, 128, FLOAT8_DEPTH, 4, 4) if form == WeightForm.FLOAT8 else Tile(128, 64, group, 8, 3)
    return Tile(64, 128, group, 4, 3)


def _tile_of_few(form: WeightForm, num_rows: int, group: int, *, is_gated: bool, is_wide: bool) -> Tile:
    if form == WeightForm.DENSE:
        return Tile(64, 32, 32, 4, 6) if is_wide else Tile(64, 64, 64, 4, 5) if is_gated else Tile(64, 32, 64, 4, 8)
    if form >= WeightForm.FLOAT8:
        return Tile(64, 32, group if form == WeightForm.FLOAT8_BLOCKS else FLOAT8_DEPTH, 4, 4 if is_gated else 6)
    if form == WeightForm.COLUMNS:
        return Tile(16, 32, 256, 4, 4) if num_rows <= 16 else Tile(64, 32, 128, 4, 4 if is_gated else 6)
    return Tile(16, 32, group, 4, 4) if num_rows <= 16 else Tile(64, 32, group, 4, 3)


def is_readable(matrix: OneForm) -> bool:
    """Whether there is a kernel that reads this form as it is, on a device that multiplies its
    type."""
    if isinstance(matrix, Float8):
        return matrix.codes.dtype == torch.float8_e4m3fn and (matrix.is_by_column or matrix.group in GROUPS)
    if not isinstance(matrix, Grouped):
        return True
    halves = [each for each in (matrix.scales, matrix.minima) if each is not None]
    are_half = all(each.dtype == torch.float16 or torch.equal(each.half().to(each.dtype), each) for each in halves)
    are_bytes = all(each.dtype == torch.int8 for each in (matrix.table, matrix.zeros) if each is not None)
    return matrix.group in GROUPS and are_half and are_bytes


class CudaLinear:
    """x @ weight.T + bias; with is_gated, activation(the first half of the outputs) * the other
    half. Of quantized weights, x is quantized too."""

    def __init__(
        self,
        matrix: OneForm,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        is_gated: bool,
        activation: str,
        vendor_from: int | None = None,
        parts: SplitK | None = None,
        is_hopper: bool,
    ) -> None:
        """matrix: readable; dtype: of x and of what comes out, and of dense weights; vendor_from:
        rows from which on the vendor's product is used, if any; parts: of the whole layer's sums; is_hopper:
        the device."""
        matrix = matrix.grouped() if isinstance(matrix, Int4Columns) else matrix
        n, self.k = matrix.shape
        self.num_outputs = n // 2 if is_gated else n
        self.dtype = dtype
        self.parts = parts
        self.is_hopper = is_hopper
        self.bias = bias
        self.activation = activation if is_gated else None
        self.scales: Tensor | None = None
        self.zeros: Tensor | None = None
        self.minima: Tensor | None = None
        self.first: int | None = None
        self.words = (0, 0)
        self.group = self.k
        self.height = 1
        if isinstance(matrix, Dense):
            self.form, self.weight = WeightForm.DENSE, matrix.dequantize(dtype).contiguous()
        elif isinstance(matrix, Int8Columns):
            self.form, self.weight, self.scales = (
                WeightForm.COLUMNS,
                matrix.codes.contiguous(),
                matrix.scales.float().contiguous(),
            )
        elif isinstance(matrix, Float8):
            matrix = matrix.by_output() if matrix.is_by_column else matrix
            self.form = WeightForm.FLOAT8 if matrix.is_by_column else WeightForm.FLOAT8_BLOCKS
            self.group, self.height = matrix.group, matrix.height
            self.weight, self.scales = matrix.codes.contiguous(), matrix.scales.float().contiguous()
        else:
            matrix = matrix.with_table()
            self.group = matrix.group
            self.form, self.weight = (
                (WeightForm.GROUPS, matrix.codes.contiguous())
                if matrix.table is None
                else (WeightForm.FOUR_BIT, pack_pairs(matrix.codes))
            )
            self.scales = matrix.scales.half().contiguous()
            self.zeros = matrix.zeros.contiguous() if matrix.zeros is not None else None
            self.minima = matrix.minima.half().contiguous() if matrix.minima is not None else None
            if matrix.table is not None:
                self.first, self.words = read_table(matrix.table)
        unit = VENDOR_UNIT.get(self.weight.dtype, 1)
        # what _scaled_mm takes with scales by row and column
        is_scaled_in_bf16 = self.form is WeightForm.FLOAT8 and dtype == torch.bfloat16
        has_vendor = (
            (self.form in (WeightForm.DENSE, WeightForm.COLUMNS) or is_scaled_in_bf16)
            and n % unit == 0
            and self.k % unit == 0
        )
        self.vendor_from = vendor_from if has_vendor else None

    @property
    def num_bytes(self) -> int:
        """Bytes that a call reads, without x."""
        return sum(
            each.nbytes for each in (self.weight, self.bias, self.scales, self.zeros, self.minima) if each is not None
        )

    def __call__(
        self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None
    ) -> Tensor:
        rows = self.prepare(x, norm, eps)
        if self.vendor_from is not None and len(x) >= self.vendor_from:
            return self.multiply_by_vendor(rows, residual)
        return self.multiply(rows, residual, self.dtype)

    def logits(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None) -> Tensor:
        logits = self.multiply(self.prepare(x, norm, eps), None, torch.float32)
        return logits if out is None else out.copy_(logits)

    def prepare(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor | QuantizedRows:
        """norm(x), in codes where weights are."""
        if self.form != WeightForm.DENSE:
            return quantize(
                x, self.group, torch.float8_e4m3fn if self.form >= WeightForm.FLOAT8 else torch.int8, norm=norm, eps=eps
            )
        return x.contiguous() if norm is None else prepare(x, norm=norm, eps=eps)

    def multiply(self, rows: Tensor | QuantizedRows, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns [T, num_outputs] in dtype."""
        inputs = (rows.codes, rows.scales, rows.sums) if isinstance(rows, QuantizedRows) else (rows, None, None)
        num_rows, n = len(inputs[0]), self.num_outputs
        out = torch.empty((num_rows, n), dtype=dtype, device=self.weight.device)
        if num_rows == 0:
            return out
        tile = self.tile(num_rows)
        num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns)
        if self.parts is not None and num_tiles <= self.parts.enough_tiles:
            return self.multiply_parts(inputs, residual, out, tile, self.parts.span)
        kernels.multiply[(num_tiles,)](
            *inputs,
            self.weight,
            self.scales,
            self.zeros,
            self.minima,
            self.bias,
            residual,
            out,
            num_rows,
            n,
            self.k,
            self.k if self.parts is None else self.parts.span,
            self.weight.stride(0),
            self.height,
            *self.words,
            FORM=int(self.form),
            FIRST=self.first,
            GROUP=self.group if self.form in (WeightForm.GROUPS, WeightForm.FOUR_BIT) else 0,
            ACTIVATION=self.activation,
            HAS_PARTS=self.parts is not None,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            # whose sums are multiply-adds; else one tile would be fused where another is not
            enable_fp_fusion=self.weight.dtype == torch.float32,
        )
        return out

    def tile(self, num_rows: int) -> Tile:
        is_gated, is_wide = self.activation is not None, self.weight.dtype == torch.float32
        return choose_tile(
            self.form, num_rows, self.group, is_gated=is_gated, is_wide=is_wide, is_hopper=self.is_hopper
        )

    def multiply_parts(
        self,
        inputs: tuple[Tensor, Tensor | None, Tensor | None],
        residual: Tensor | None,
        out: Tensor,
        tile: Tile,
        span: int,
    ) -> Tensor:
        """The same bits, by a program for each part of a tile, and a pass that adds them up."""
        num_rows, n = len(out), self.weight.shape[0]
        num_parts = triton.cdiv(self.k, span)
        sums = torch.empty(
            (num_parts, num_rows, n),
            dtype=torch.int32 if self.form == WeightForm.COLUMNS else torch.float32,
            device=out.device,
        )
        kernels.multiply_part[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns), num_parts)](
            *inputs,
            self.weight,
            self.scales,
            self.zeros,
            self.minima,
            sums,
            num_rows,
            n,
            self.k,
            span,
            self.weight.stride(0),
            self.height,
            *self.words,
            FORM=int(self.form),
            FIRST=self.first,
            GROUP=self.group if self.form in (WeightForm.GROUPS, WeightForm.FOUR_BIT) else 0,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        scales = (inputs[1], self.scales) if self.form in (WeightForm.COLUMNS, WeightForm.FLOAT8) else (None, None)
        self.finish(sums, scales, residual, out, num_parts, is_fused=False)
        return out

    def finish(
        self,
        sums: Tensor,
        scales: tuple[Tensor | None, Tensor | None],
        residual: Tensor | None,
        out: Tensor,
        num_parts: int,
        *,
        is_fused: bool,
    ) -> None:
        """out [T, num_outputs] from sums of products: see kernels.finish_product."""
        num_rows, n = out.shape
        grid = (triton.cdiv(num_rows, FINISHED_ROWS), triton.cdiv(n, FINISHED_COLUMNS))
        kernels.finish_product[grid](
            sums,
            *scales,
            self.bias,
            residual,
            out,
            num_rows,
            n,
            num_parts,
            ACTIVATION=self.activation,
            BLOCK_M=FINISHED_ROWS,
            BLOCK_N=FINISHED_COLUMNS,
            enable_fp_fusion=is_fused,
        )

    def multiply_by_vendor(self, rows: Tensor | QuantizedRows, residual: Tensor | None) -> Tensor:
        """Compute the product in self.dtype by the vendor's library, whose sums may be divided as
        the number of rows makes it fast, and the rest in a pass of its own."""
        scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if not isinstance(rows, QuantizedRows):
            product = rows @ self.weight.T
        elif self.form == WeightForm.COLUMNS:
            product, scales = torch._int_mm(rows.codes, self.weight.T), (rows.scales, self.scales)
        else:
            assert self.scales is not None
            product = torch._scaled_mm(
                rows.codes, self.weight.T, scale_a=rows.scales, scale_b=self.scales.T, out_dtype=self.dtype
            )
        if product.dtype == self.dtype and self.bias is None and self.activation is None and residual is None:
            return product
        out = torch.empty((len(product), self.num_outputs), dtype=self.dtype, device=product.device)
        self.finish(product, scales, residual, out, 1, is_fused=True)
        return out


def pack_pairs(codes: Tensor) -> Tensor:
    """[n, k] codes below 16 as [n, ceil(k / 2)] bytes, the first of two in the lower half."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous()


def read_table(table: Tensor) -> tuple[int | None, tuple[int, int]]:
    """The first of values that rise by one, or None; and the 16 values as two words of eight
    bytes."""
    values = table.tolist()
    first = values[0] if values == list(range(values[0], values[0] + 16)) else None
    low, high = (
        int.from_bytes(bytes(value & 0xFF for value in half), "little", signed=True)
        for half in (values[:8], values[8:])
    )
    return first, (low, high)
