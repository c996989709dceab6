"""Linear layers in native code: weights packed for the instruction that reads them, in bfloat16, in
int8, or in four bits.

Quantized weights meet activations in int8, quantized when they are computed. Products are summed
exactly, in int32, over all inputs (a scale for each column, and one for each row) or over a group
(a scale for each column and group, and for each row and group). Or activations stay in bfloat16, and
weights become that for the product (widen). What comes before a layer, the norm, and what comes
after it, SiLU times up or the residual, happen inside.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from services.compute.backends.backend import Linear
from services.compute.backends.cpu.columns import COLUMNS, PAIR, copy_columns, of_columns, packed_runs
from services.compute.backends.cpu.library import NativeContext, Weight, pointer
from services.compute.backends.host_memory import mapped_zeros
from services.compute.backends.matrix import BLOCK, Dense, Float8, Grouped, Int4Columns, Int8Columns, Joined, Matrix
from services.compute.backends.torch.reference import quantize_weight
from services.compute.ranks.parallel.distributed import as_bytes
from services.compute.ranks.parallel.outline import LayerOutline, MatrixOutline

QUANTIZATIONS = ("none", "w8a8", "w4", "nf4")  # of backend.py's
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
TILE_BYTES = 64
FOUR_BIT_GROUPS = (32, 64, 128)  # of four-bit codes
GROUPS = (16, 32, 64, 128)
ALIGNMENT = 64  # bytes: kernels read whole lines of the cache
NUMBERS = ("activation", "is_gate", "lowest", "highest", "is_widened")  # of kernels.h's Weight, which no form says
OTHER_PARTS = "its parts have other shapes or types"


class WeightType(IntEnum):
    """kernels.h's WeightType."""

    BF16 = 0
    INT8 = 1
    INT4 = 2
    FOUR_BIT = 3
    INT8_GROUPS = 4
    PLANES = 5


BY_COLUMNS = (WeightType.INT8, WeightType.INT4)
BY_GROUPS = (WeightType.FOUR_BIT, WeightType.INT8_GROUPS, WeightType.PLANES)
BITS = {
    WeightType.BF16: 16,
    WeightType.INT8: 8,
    WeightType.INT4: 4,
    WeightType.FOUR_BIT: 4,
    WeightType.INT8_GROUPS: 8,
}  # planes: PackedForm.bits
PLANES = range(2, 7)  # bits of codes


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How the weights of a layer are packed."""

    kind: WeightType
    group: int = TILE_BYTES  # inputs that share a scale or a step, where kind has groups
    has_zeros: bool = False
    has_minima: bool = False
    bits: int = 8  # planes: of a code, and what is taken off it; in int8 groups, what bounds the values
    offset: int = 128
    has_steps: bool = False

    @property
    def data_bits(self) -> int:
        """The bits of a weight."""
        return self.bits if self.kind == WeightType.PLANES else BITS[self.kind]

    @property
    def unit(self) -> int:
        """Inputs are a multiple of it."""
        return (
            TILE_BYTES // 2
            if self.kind == WeightType.BF16
            else max(self.group, BLOCK if self.has_steps else TILE_BYTES)
        )


def is_packable(matrix: Matrix) -> bool:
    """Whether there are kernels that read this form as it is."""
    if isinstance(matrix, Int4Columns):
        return matrix.group in FOUR_BIT_GROUPS
    if not isinstance(matrix, Grouped):
        return not isinstance(matrix, Float8)
    table, zeros = matrix.table, matrix.zeros
    if matrix.group not in GROUPS or not all(
        _is_half(each) for each in (matrix.scales, matrix.minima) if each is not None
    ):
        return False
    if not all(_is_int8(each) for each in (matrix.steps, matrix.minimum_steps) if each is not None):
        return False
    if table is not None and matrix.group not in FOUR_BIT_GROUPS:
        return False
    if table is None or zeros is None:
        return zeros is None and (table is None or _is_int8(table))
    return (
        _is_int8(table)
        and _is_int8(zeros)
        and int(table.min()) - int(zeros.max()) >= -128
        and int(table.max()) - int(zeros.min()) <= 127
    )  # unpacked values are int8


def _is_int8(numbers: Tensor) -> bool:
    return numbers.dtype == torch.int8


def _is_half(numbers: Tensor) -> bool:
    return numbers.dtype == torch.float16 or torch.equal(numbers.half().to(numbers.dtype), numbers)


def pack_linear(
    context: NativeContext,
    matrix: Matrix,
    bias: Tensor | None,
    *,
    quantization: str = "none",
    group: int = 32,
    is_gated: bool = False,
    activation: str = "silu",
) -> "NativeLinear":
    """A layer of a matrix [n, k] and bias [n] (bfloat16). What is dense, or becomes so because it
    is not packable, is quantized as `quantization` says; all else stays what it is."""
    assert quantization in QUANTIZATIONS
    if isinstance(matrix, Joined):
        return pack_joined(
            context, matrix, bias, quantization=quantization, group=group, is_gated=is_gated, activation=activation
        )
    if not is_packable(matrix):
        matrix = Dense(matrix.dequantize(torch.bfloat16))
    if isinstance(matrix, Dense) and quantization in ("w4", "nf4"):
        matrix = quantize_weight(matrix.dequantize(torch.bfloat16), quantization, group)
    is_int8 = isinstance(matrix, Int8Columns) or quantization == "w8a8"
    form = (
        form_of(matrix)
        if isinstance(matrix, Grouped | Int4Columns)
        else PackedForm(WeightType.INT8 if is_int8 else WeightType.BF16)
    )
    n, k = matrix.shape
    layer = NativeLinear(context, n, k, form, is_gated=is_gated, has_bias=bias is not None, activation=activation)
    layer.pack(matrix, bias)
    return layer


def pack_joined(
    context: NativeContext,
    matrix: Joined,
    bias: Tensor | None,
    *,
    quantization: str,
    group: int,
    is_gated: bool,
    activation: str,
) -> "NativeLinear":
    """A layer of several matrices, which is its first with the others behind it. A gated one is of
    two: the gate, and what its activation is multiplied by."""
    assert not is_gated or (len(matrix.parts) == 2 and matrix.parts[0].shape == matrix.parts[1].shape)
    sizes = [each.shape[0] for each in matrix.parts]
    biases = [None] * len(sizes) if bias is None else [each.contiguous() for each in torch.split(bias, sizes)]
    layers = [
        pack_linear(context, part, of_part, quantization=quantization, group=group, activation=activation)
        for part, of_part in zip(matrix.parts, biases, strict=True)
    ]
    return join(layers, is_gated=is_gated)


def join(layers: Sequence["NativeLinear"], *, is_gated: bool) -> "NativeLinear":
    """The first of some layers, with the others behind it."""
    for before, after in pairwise(layers):
        before.struct.next = ctypes.addressof(after.struct)
    first = layers[0]
    first.following = tuple(layers[1:])
    if first.following:
        first.struct.is_gate = int(is_gated)
        first.num_outputs = first.struct.n if is_gated else sum(layer.struct.n for layer in layers)
    return first


def form_of(matrix: Grouped | Int4Columns) -> PackedForm:
    if isinstance(matrix, Int4Columns):
        return PackedForm(WeightType.INT4, matrix.group)
    kind = (
        WeightType.FOUR_BIT
        if matrix.table is not None
        else WeightType.PLANES
        if matrix.bits in PLANES
        else WeightType.INT8_GROUPS
    )
    bits, offset = (matrix.bits, -matrix.lowest) if kind == WeightType.PLANES else (8, 128)
    return PackedForm(
        kind, matrix.group, matrix.zeros is not None, matrix.minima is not None, bits, offset, matrix.steps is not None
    )


def restore_linear(
    context: NativeContext,
    parts: dict[str, Tensor],
    n: int,
    k: int,
    *,
    is_gated: bool,
    has_bias: bool,
    activation: str = "silu",
    outputs: Sequence[range] | None = None,
) -> "NativeLinear":
    """A layer from the parts of one that was packed before, in whatever form they are, or some of its
    outputs. Raises ValueError for parts of another layer."""
    form = _form_of(parts)
    shapes = part_shapes(form, *padded(n, k, form, is_gated), has_bias=has_bias)
    if {name: (part.shape, part.dtype) for name, part in parts.items()} != shapes:
        raise ValueError(OTHER_PARTS)
    count = n if outputs is None else sum(map(len, outputs)) * (2 if is_gated else 1)
    layer = NativeLinear(context, count, k, form, is_gated=is_gated, has_bias=has_bias, activation=activation)
    layer.restore(parts, [range(layer.num_outputs)] if outputs is None else outputs)
    return layer


def _form_of(parts: dict[str, Tensor]) -> PackedForm:
    of_groups = parts.get("group_scales", parts.get("steps"))
    if of_groups is None:
        return PackedForm(WeightType.INT8 if "scales" in parts else WeightType.BF16)
    kind = (
        WeightType.FOUR_BIT
        if "table" in parts
        else WeightType.INT8_GROUPS
        if "group_scales" in parts
        else WeightType.INT4
    )
    num_bits = parts["data"].nbytes * 8 if "data" in parts else 0
    group = num_bits // BITS[kind] // max(of_groups.numel(), 1)
    if group not in (GROUPS if kind == WeightType.INT8_GROUPS else FOUR_BIT_GROUPS):
        raise ValueError(OTHER_PARTS)
    return (
        PackedForm(kind, group)
        if kind == WeightType.INT4
        else PackedForm(kind, group, "zeros" in parts, "minima" in parts)
    )


class NativeLinear:
    """x @ weight.T + bias on packed weights, which are `parts`: nothing else has to be kept, in
    memory or in a file."""

    def __init__(
        self,
        context: NativeContext,
        n: int,
        k: int,
        form: PackedForm,
        *,
        is_gated: bool,
        has_bias: bool,
        activation: str = "silu",
        parts: dict[str, Tensor] | None = None,
    ) -> None:
        """n, k: outputs and inputs; with is_gated the first half of n is the gate's, which goes
        through the activation; parts: the memory that part_shapes asks for; None: new memory."""
        self.context = context
        self.form = form
        padded_n, padded_k = padded(n, k, form, is_gated)
        self.num_outputs = n // 2 if is_gated else n
        self.rows = torch.empty((0, self.num_outputs))  # of logits
        self.following: tuple[NativeLinear, ...] = ()  # the layer's other matrices
        self.struct = Weight(
            form.kind,
            n,
            k,
            padded_n,
            padded_k,
            int(is_gated),
            group=form.group,
            activation=ACTIVATIONS[activation],
            bits=form.bits,
            offset=form.offset,
        )
        self.address = ctypes.byref(self.struct)
        self.parts = _empty_parts(form, padded_n, padded_k, has_bias=has_bias) if parts is None else parts
        for name, part in self.parts.items():
            setattr(self.struct, name, part.data_ptr())

    def pack(self, matrix: Matrix, bias: Tensor | None) -> None:
        """Fill the parts from a matrix of this form, or a dense one, and bias [n], both
        bfloat16."""
        assert bias is None or bias.dtype == torch.bfloat16
        if isinstance(matrix, Dense):
            weight = matrix.dequantize(torch.bfloat16).contiguous()
            self.context.pack(self.address, weight.data_ptr(), pointer(bias))
        elif isinstance(matrix, Int8Columns):
            codes, scales = matrix.codes.contiguous(), matrix.scales.float().contiguous()
            self.context.pack_columns(self.address, codes.data_ptr(), scales.data_ptr(), pointer(bias))
        elif isinstance(matrix, Int4Columns):
            columns = [
                each.contiguous() for each in (matrix.codes, matrix.scales, (matrix.steps - 1) + matrix.zeros * 16)
            ]
            self.context.pack_int4(self.address, *map(pointer, columns), pointer(bias))
        else:
            assert isinstance(matrix, Grouped)
            if matrix.table is not None:
                self.parts["table"].copy_(matrix.table)
            halves = [each.half() if each is not None else None for each in (matrix.scales, matrix.minima)]
            parts = (matrix.codes, halves[0], matrix.zeros, halves[1], matrix.steps, matrix.minimum_steps)
            kept = [None if part is None else part.contiguous() for part in parts]
            self.context.pack_groups(self.address, *map(pointer, kept), pointer(bias))
            self._bound_values()

    def restore(self, parts: dict[str, Tensor], outputs: Sequence[range]) -> None:
        """Fill the parts from those of a layer that has these outputs among its own."""
        runs = packed_runs(outputs, is_gated=bool(self.struct.is_gated))
        tile_bytes = self.parts["data"].numel() * COLUMNS // self.struct.padded_n
        for name, part in parts.items():
            if name == "table":
                self.parts[name].copy_(part)
            else:
                copy_columns(of_columns(name, self.parts[name], tile_bytes), of_columns(name, part, tile_bytes), runs)
        self._bound_values()

    def _bound_values(self) -> None:
        """Say which values there may be, where they are codes: few of them are cheaper on AVX2."""
        lowest, highest = -self.form.offset, (1 << self.form.bits) - 1 - self.form.offset
        if "table" in self.parts:
            table, zeros = self.parts["table"], self.parts.get("zeros", torch.zeros(1))
            lowest, highest = min(0, int(table.min()) - int(zeros.max())), int(table.max()) - int(zeros.min())
        self.struct.lowest, self.struct.highest = lowest, highest

    def widen(self) -> None:
        """Leave activations in bfloat16 from now on: each product is that of the weights rounded to
        bfloat16, bit by bit, though they stay packed as they are."""
        for each in (self, *self.following):
            each.struct.is_widened = int(each.form.kind != WeightType.BF16)

    def __call__(
        self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None
    ) -> Tensor:
        out = torch.empty((x.shape[0], self.num_outputs), dtype=torch.bfloat16)
        self.context.linear(
            self.address, x.data_ptr(), pointer(norm), eps, x.shape[0], pointer(residual), out.data_ptr(), None, 0
        )
        return out

    def logits(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None) -> Tensor:
        """Compute the same in float32, as the sampler wants it, in memory that the next call writes
        again: fresh pages would take the system longer than the kernel takes to fill them."""
        rows = x.shape[0]
        if out is None and rows > len(self.rows):
            self.rows = mapped_zeros(rows * self.num_outputs * 4).view(torch.float32).view(rows, self.num_outputs)
        to = self.rows[:rows] if out is None else out
        self.context.linear(
            self.address, x.data_ptr(), pointer(norm), eps, rows, None, None, to.data_ptr(), to.stride(0)
        )
        return to


class NativeMlp:
    """down(activation(gate) * up) as one call, with the norm before it and the residual after
    it."""

    is_recordable = True

    def __init__(self, gate_up: NativeLinear, down: NativeLinear) -> None:
        self.gate_up = gate_up
        self.down = down

    @property
    def linears(self) -> dict[str, Linear]:
        return {"gate_up.": self.gate_up, "down.": self.down}

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        out = torch.empty_like(x)
        residual = x.data_ptr() if has_residual else None
        self.down.context.mlp(
            self.gate_up.address,
            self.down.address,
            x.data_ptr(),
            pointer(norm),
            eps,
            x.shape[0],
            residual,
            out.data_ptr(),
        )
        return out


def _empty_parts(form: PackedForm, padded_n: int, padded_k: int, *, has_bias: bool) -> dict[str, Tensor]:
    """The parts of a layer of this form, as kernels.h has them, with zeros inside."""
    shapes = part_shapes(form, padded_n, padded_k, has_bias=has_bias)
    return {
        name: mapped_zeros(*shape) if name == "data" else torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in shapes.items()
    }


def part_shapes(
    form: PackedForm, padded_n: int, padded_k: int, *, has_bias: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each part, by its name in kernels.h."""
    of_groups = (padded_n // PAIR, padded_k // form.group, PAIR)
    of_scales = (padded_n // PAIR, padded_k // BLOCK, PAIR) if form.has_steps else of_groups
    by_groups, by_columns = form.kind in BY_GROUPS, form.kind in BY_COLUMNS
    wanted: dict[str, tuple[bool, tuple[int, ...], torch.dtype]] = {
        "data": (True, (padded_n * padded_k * form.data_bits // 8,), torch.uint8),
        "scales": (by_columns, (padded_n,), torch.float32),
        "sums": (by_columns, (padded_n,), torch.int32),
        "table": (form.kind == WeightType.FOUR_BIT, (16,), torch.int8),
        "group_scales": (by_groups, of_scales, torch.float16),
        "zeros": (by_groups and form.has_zeros, of_groups, torch.int8),
        "minima": (by_groups and form.has_minima, of_scales, torch.float16),
        "steps": (form.kind == WeightType.INT4 or (by_groups and form.has_steps), of_groups, torch.int8),
        "minimum_steps": (by_groups and form.has_steps and form.has_minima, of_groups, torch.int8),
        "bias": (has_bias, (padded_n,), torch.float32),
    }
    return {name: (shape, dtype) for name, (is_there, shape, dtype) in wanted.items() if is_there}


def padded(n: int, k: int, form: PackedForm, is_gated: bool) -> tuple[int, int]:
    """Outputs and inputs with what fills their last tiles."""
    return PAIR * _round_up(n // 2, COLUMNS) // COLUMNS if is_gated else _round_up(n, PAIR), _round_up(k, form.unit)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def move_out(linears: Sequence[Linear | None]) -> tuple[LayerOutline, Tensor]:
    """The outline of a layer's qkv, output, gate_up and down, and their bytes, [num_bytes] uint8."""
    outlines, pieces = [], [torch.empty(0, dtype=torch.uint8)]
    for linear in linears:
        assert linear is None or isinstance(linear, NativeLinear)
        matrices = () if linear is None else (linear, *linear.following)
        outlines.append(tuple(_outline(each) for each in matrices))
        for part in (part for matrix in matrices for part in matrix.parts.values()):
            pieces += [as_bytes(part), torch.zeros(-part.nbytes % ALIGNMENT, dtype=torch.uint8)]
    memory = torch.cat(pieces)
    return LayerOutline(len(memory), *outlines), memory


def move_in(context: NativeContext, outline: LayerOutline, memory: Tensor) -> list[NativeLinear | None]:
    """The layer's qkv, output, gate_up and down. Whenever they are called, memory [num_bytes] uint8 has
    their bytes."""
    at, linears = 0, list[NativeLinear | None]()
    for linear in (outline.qkv, outline.output, outline.gate_up, outline.down):
        matrices = []
        for of in linear:
            parts, form = {}, PackedForm(*of.form)
            for name, (shape, dtype) in part_shapes(
                form, *padded(of.n, of.k, form, of.is_gated), has_bias=of.has_bias
            ).items():
                size = math.prod(shape) * dtype.itemsize
                parts[name] = memory[at : at + size].view(dtype).view(shape)
                at += size + -size % ALIGNMENT
            matrix = NativeLinear(context, of.n, of.k, form, is_gated=of.is_gated, has_bias=of.has_bias, parts=parts)
            for name, number in zip(NUMBERS, of.numbers, strict=True):
                setattr(matrix.struct, name, number)
            matrices.append(matrix)
        linears.append(join(matrices, is_gated=bool(matrices[0].struct.is_gate)) if matrices else None)
    return linears


def _outline(matrix: NativeLinear) -> MatrixOutline:
    struct = matrix.struct
    numbers = tuple(getattr(struct, name) for name in NUMBERS)
    return MatrixOutline(
        struct.n, struct.k, bool(struct.is_gated), "bias" in matrix.parts, astuple(matrix.form), numbers
    )
