"""Every kernel against its definition in torch, and a row's bits alone against those in company. On
a GPU, or in Triton's interpreter.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.attention_checks import attention_checks
from bench.gpu.check import EPS, Check, name_of, randn, relative_error
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.linear import SplitK
from services.compute.backends.matrix import Dense, Float8, Grouped, Int4Columns, Int8Columns, OneForm
from services.compute.backends.torch.linear import QuantizedTorchLinear, TorchLinear
from services.compute.backends.torch.reference import (
    FLOAT8_LARGEST,
    quantize_nf4,
    quantize_rows,
    quantize_weight,
    rms_norm,
)
from services.compute.backends.torch.row_math import TorchRowMath
from services.compute.backends.torch.row_search import TorchRowSearch
from services.compute.candidates.edits import EditKind, TokenEdits, edit_on_device, edit_on_host
from services.compute.candidates.reduction import begin_reduction
from services.compute.candidates.row_mask import num_bytes
from services.compute.candidates.rows import CandidateRows
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.arrays import Array
from shared.model.sampling_params import SamplingParams

FORMS = ("none", "w8a8", "w4", "nf4", "w4 with minima", "int8 groups", "int8 groups with minima", "fp8", "fp8 blocks")
VENDORS = ("none", "w8a8", "fp8")  # that the vendor's library multiplies, too


def make_matrix(weight: Tensor, form: str, group: int) -> OneForm:
    """weight [n, k] in one of FORMS."""
    if form == "none":
        return Dense(weight)
    if form in ("w8a8", "w4", "nf4", "fp8"):
        matrix = quantize_weight(weight, form, group)
        return matrix.grouped() if isinstance(matrix, Int4Columns) else matrix
    n, k = weight.shape
    if form == "fp8 blocks":  # of half as many outputs as inputs
        height = group // 2
        largest = torch.nn.functional.max_pool2d(weight.float().abs()[None], (height, group), ceil_mode=True)[0]
        spread = largest.repeat_interleave(height, 0)[:n].repeat_interleave(group, 1)[:, :k]
        return Float8(
            (weight.float() / spread * FLOAT8_LARGEST).to(torch.float8_e4m3fn), largest / FLOAT8_LARGEST, group, height
        )
    minima = randn(n, -(-k // group), seed=9, scale=0.1).half()
    if form == "w4 with minima":
        four = quantize_nf4(weight, group)
        return Grouped(four.codes, four.scales, group, torch.arange(16, dtype=torch.int8), minima=minima)
    codes, scales = quantize_rows(torch.nn.functional.pad(weight, (0, -k % group)).view(n, -1, group))
    return Grouped(codes.flatten(1)[:, :k], scales.half(), group, minima=minima if "minima" in form else None)


def moved(matrix: OneForm, device: torch.device) -> OneForm:
    if isinstance(matrix, Dense):
        return Dense(matrix.weight.to(device))
    if isinstance(matrix, Int8Columns):
        return Int8Columns(matrix.codes.to(device), matrix.scales.to(device))
    if isinstance(matrix, Float8):
        return Float8(matrix.codes.to(device), matrix.scales.to(device), matrix.group, matrix.height)
    assert isinstance(matrix, Grouped)
    table = matrix.table.to(device) if matrix.table is not None else None
    parts: dict[str, Any] = {name: each.to(device) for name, each in matrix.by_group().items()}
    return replace(matrix, codes=matrix.codes.to(device), table=table, **parts)


@dataclass(frozen=True, slots=True)
class LinearCase:
    rows: int
    n: int
    k: int
    group: int = 32
    activation: str | None = None  # of a gated layer
    has_bias: bool = False
    has_residual: bool = False
    has_norm: bool = False

    def __str__(self) -> str:
        more = [self.activation, *(name for name in ("bias", "residual", "norm") if getattr(self, "has_" + name))]
        return " ".join([f"{self.rows} x {self.n} x {self.k}, groups of {self.group}", *filter(None, more)])


def check_linear(backend: CudaBackend, form: str, case: LinearCase, *, is_vendors: bool = False) -> Check:
    """In float64 over the same codes; in the norm, whose rounding may fall on another step of int8 or
    FP8, the definition. is_vendors: the vendor's product, whose bits are not promised."""
    dtype, device = backend.dtype, backend.device
    x, weight = randn(case.rows, case.k, seed=1).to(dtype), randn(case.n, case.k, seed=2, scale=0.1).to(dtype)
    bias = randn(case.n, seed=3).to(dtype) if case.has_bias else None
    num_outputs = case.n // 2 if case.activation else case.n
    residual = randn(case.rows, num_outputs, seed=4).to(dtype) if case.has_residual else None
    norm = (1 + randn(case.k, seed=5, scale=0.1)).to(dtype) if case.has_norm else None
    matrix = make_matrix(weight, form, case.group)
    gate = {"is_gated": case.activation is not None, "activation": case.activation or "silu"}
    normed = x if norm is None else rms_norm(x, norm, EPS)
    wide_bias = bias.double() if bias is not None else None
    reference = (
        TorchLinear(weight.double(), wide_bias, **gate)  # type: ignore[arg-type]
        if isinstance(matrix, Dense)
        else QuantizedTorchLinear(matrix, wide_bias, **gate)  # type: ignore[arg-type]
    )
    expected = reference(normed.double(), residual=residual.double() if residual is not None else None)

    def on(tensor: Tensor | None) -> Tensor | None:
        return tensor.to(device) if tensor is not None else None

    layer = backend.make_linear(moved(matrix, device), on(bias), **gate)  # type: ignore[arg-type]
    there, there_residual = x.to(device), on(residual)
    if is_vendors:
        layer.vendor_from = 1
    found = layer(there, norm=on(norm), eps=EPS, residual=there_residual)
    is_coarse = case.has_norm and form != "none"
    bound = 1e-5 if dtype == torch.float32 else 2.5e-2 if is_coarse else 6e-3 if case.has_norm or is_vendors else 4e-3
    if is_vendors:
        return Check(
            f"linear, {form}, vendor's", name_of(dtype), str(case), relative_error(found, expected), bound, None
        )
    some = [slice(row, row + 1) for row in sorted({0, case.rows // 2, case.rows - 1})]
    alone = [
        layer(there[row], norm=on(norm), eps=EPS, residual=there_residual[row] if there_residual is not None else None)
        for row in some
    ]
    is_same = all(torch.equal(found[row], each) for row, each in zip(some, alone, strict=True))
    return Check("linear, " + form, name_of(dtype), str(case), relative_error(found, expected), bound, is_same)


def check_parts(backend: CudaBackend, form: str, case: LinearCase) -> Check:
    """A narrow layer, whose sums are divided: a program for each part gives the bits of one for
    all, and of a row alone. The error is beside float64.
    """
    dtype, device = backend.dtype, backend.device
    x, weight = randn(case.rows, case.k, seed=1).to(dtype), randn(case.n, case.k, seed=2, scale=0.1).to(dtype)
    matrix = make_matrix(weight, form, case.group)
    gate = {"is_gated": case.activation is not None, "activation": case.activation or "silu"}
    reference = (
        TorchLinear(weight.double(), None, **gate)  # type: ignore[arg-type]
        if isinstance(matrix, Dense)
        else QuantizedTorchLinear(matrix, None, **gate)  # type: ignore[arg-type]
    )
    layer, there = backend.make_linear(moved(matrix, device), **gate), x.to(device)  # type: ignore[arg-type]
    found = {}
    for enough in (0, 1 << 20):
        layer.parts = SplitK(256, enough)
        found[enough] = layer.logits(there)
    alone = [layer.logits(there[row : row + 1])[0] for row in (0, case.rows - 1)]
    is_same = torch.equal(found[0], found[1 << 20]) and torch.equal(found[0][[0, case.rows - 1]], torch.stack(alone))
    return Check(
        f"linear in parts, {form}",
        name_of(dtype),
        str(case),
        relative_error(found[0], reference(x.double())),
        4e-3,
        is_same,
    )


def check_rows(backend: CudaBackend, rows: int, hidden: int, *, has_norm: bool, multiplier: float) -> Check:
    dtype, device = backend.dtype, backend.device
    x, h, norm = (
        randn(rows, hidden, seed=1).to(dtype),
        randn(rows, hidden, seed=2, scale=3.0).to(dtype),
        (1 + randn(hidden, seed=3, scale=0.1)).to(dtype),
    )
    expected = TorchRowMath().add(
        x.double(), h.double(), norm=norm.double() if has_norm else None, eps=EPS, multiplier=multiplier
    )
    there_x, there_h, there_norm = x.to(device), h.to(device), norm.to(device) if has_norm else None
    found = backend.row_math.add(there_x, there_h, norm=there_norm, eps=EPS, multiplier=multiplier)
    alone = [
        backend.row_math.add(
            there_x[row : row + 1], there_h[row : row + 1], norm=there_norm, eps=EPS, multiplier=multiplier
        )
        for row in range(min(rows, 3))
    ]
    bound = 1e-6 if dtype == torch.float32 else 4e-3
    case = f"{rows} x {hidden}, {'norm, ' if has_norm else ''}times {multiplier}"
    return Check(
        "norm and residual",
        name_of(dtype),
        case,
        relative_error(found, expected),
        bound,
        torch.equal(torch.cat(alone), found[:3]),
    )


def check_search(backend: CudaBackend, rows: int, vocab_size: int, k: int) -> Check:
    """Logits with many ties and zeros of both signs, banned tokens, and a row with NaN. The error is
    the masses'; candidates that are not exactly the definition's count as 1."""
    logits = (randn(rows, vocab_size, seed=1) * 16).round() / 4
    logits[0, vocab_size // 2 :] = -torch.inf
    logits[0, :3] = torch.tensor([1.0, -0.0, 0.0])
    search, there = backend.row_search, logits.to(backend.device)
    values, ids = search.find_largest(there, k)
    expected, order = logits.sort(dim=-1, descending=True, stable=True)
    is_exact = np.array_equal(values, expected[:, :k].numpy()) and np.array_equal(ids, order[:, :k].numpy())
    alone = [search.find_largest(there[row : row + 1], k) for row in range(rows)]
    is_same = all(
        np.array_equal(values[row], found[0][0]) and np.array_equal(ids[row], found[1][0])
        for row, found in enumerate(alone)
    )
    which, largest, temperatures = (
        np.arange(rows)[::-1].copy(),
        values[::-1, 0].copy(),
        np.linspace(0.3, 2.0, rows, dtype=np.float32),
    )
    masses = search.total_masses(there, which, largest, temperatures)
    exact = np.array(
        [
            ((logits[row].double() - float(largest[at])) / float(temperatures[at])).exp().sum().item()
            for at, row in enumerate(which)
        ]
    )
    is_same &= all(
        search.total_masses(there, which[at : at + 1], largest[at : at + 1], temperatures[at : at + 1])[0] == masses[at]
        for at in range(rows)
    )
    there[rows - 1, vocab_size // 3] = torch.nan
    is_exact &= bool(np.isnan(search.find_largest(there, k)[0][rows - 1, 0]))
    error = float(np.abs(masses / exact - 1).max()) if is_exact else 1.0
    return Check("candidates", "float32", f"{rows} x {vocab_size}, {k} largest", error, 3e-6, is_same)


def check_edits(backend: CudaBackend, rows: int, vocab_size: int) -> Check:
    """Penalties, biases, bans and masks of several rows, as the host applies them. The error is the
    share of numbers with other bits.
    """
    on_host = randn(rows, vocab_size, seed=6, scale=8.0)
    on_device, rng = on_host.clone().to(backend.device), np.random.default_rng(1)
    edits: dict[int, TokenEdits] = {}
    for row in range(0, rows, 2):
        tokens = rng.choice(vocab_size, vocab_size // 5, replace=False)
        edits[row] = {
            kind: (tokens, rng.uniform(0.5, 2.0, len(tokens)).astype(np.float32))
            for kind in EditKind
            if kind != EditKind.BANNED
        }
        edits[row][EditKind.BANNED] = tokens[:9], np.zeros(1, np.float32)
    masked = np.arange(rows - 1, -1, -3)
    masks = [rng.integers(0, 256, num_bytes(vocab_size), np.uint8) for _ in masked]
    edit_on_host(on_host, edits)
    TorchRowSearch().ban(on_host, masked, masks)
    edit_on_device(on_device, edits)
    backend.row_search.ban(on_device, masked, masks)
    return Check(
        "edits",
        "float32",
        f"{rows} x {vocab_size}",
        float((on_device.cpu().view(torch.int32) != on_host.view(torch.int32)).double().mean()),
        0.0,
        None,
    )


FLAT = 256  # tokens, of which 64 have more than half of the mass
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 0.7},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 3},
)


def check_draws(backend: CudaBackend, rows: int, vocab_size: int) -> Check:
    """Rows so peaked that the candidates hold what top-p keeps: the device's draws are the host's. The
    error is the share that is not. Of few tokens one row is flat: of its mass, which top-p is a
    share of, a part lies beyond the candidates."""
    logits = randn(rows, vocab_size, seed=6, scale=8.0)
    if vocab_size <= FLAT:
        logits[3] /= 8
    logits[0] = logits[0].round()
    logits[-1, 3:] = -torch.inf
    sequences = [
        Sequence(Request(row, "r", SamplingParams(seed=row, **DRAWS[row % len(DRAWS)])), Tokens([1, 2], 1))
        for row in range(rows)
    ]

    def drawn(some: slice) -> tuple[Array, CandidateRows]:
        reduction = begin_reduction(
            logits[some].to(backend.device), [sequence.prefix() for sequence in sequences[some]], backend.row_search
        )
        found = reduction.searching.read_drawn()
        assert found is not None
        return found, reduction.finish()

    found, expected = drawn(slice(0, rows))
    is_listed = expected.chosen != expected.tail_token_ids  # a tail that wins is the host's to find
    is_same = all(drawn(slice(row, row + 1))[0][0] == found[row] for row in (1, 4, rows - 1))
    return Check(
        "draws", "float64", f"{rows} x {vocab_size}", float((found != expected.chosen)[is_listed].mean()), 0.0, is_same
    )


def check_logits(backend: CudaBackend, rows: int, vocab_size: int) -> Check:
    logits = randn(rows, vocab_size, seed=4) * 60
    expected = TorchRowMath().finish_logits(logits.double(), multiplier=0.125, cap=30.0)
    found, alone = (
        backend.row_math.finish_logits(each.clone().to(backend.device), multiplier=0.125, cap=30.0)
        for each in (logits, logits[-1:])
    )
    return Check(
        "cap of logits",
        "float32",
        f"{rows} x {vocab_size}",
        relative_error(found, expected),
        1e-6,
        torch.equal(alone, found[-1:]),
    )


LINEARS = (
    LinearCase(1, 40, 96),
    LinearCase(5, 80, 96, has_norm=True),
    LinearCase(3, 96, 72, activation="silu", has_bias=True),
    LinearCase(70, 72, 160, has_bias=True, has_residual=True),
    LinearCase(17, 66, 65, 64, activation="gelu_tanh", has_norm=True),
    LinearCase(64, 130, 256, 64, has_norm=True, has_residual=True),
    LinearCase(130, 200, 300, 128),
    LinearCase(200, 128, 512, 64, activation="silu"),
    LinearCase(65, 33, 1000, 128, has_bias=True),
    LinearCase(16, 256, 2048, 64),
    LinearCase(530, 40, 96, has_residual=True),
)
NARROW_LINEARS = (LinearCase(3, 40, 1000), LinearCase(70, 72, 520, activation="silu"))
VENDORS_LINEARS = (
    LinearCase(17, 48, 96, has_bias=True),
    LinearCase(70, 160, 64, activation="silu", has_bias=True),
    LinearCase(33, 64, 128),
    LinearCase(130, 528, 320, has_norm=True, has_residual=True),
)


def kernel_checks(backends: list[CudaBackend], *, on_device: bool) -> Iterator[partial[Check]]:
    """Cases of each backend, in its dtype; quantized layers in bfloat16 only. on_device: also what
    takes the interpreter hours, sorting above all.
    """
    for backend in backends:
        is_wide = backend.dtype == torch.float32
        for form in FORMS[: 1 if is_wide else None]:
            if backend.has_float8 or not form.startswith("fp8"):
                yield from (partial(check_linear, backend, form, linear) for linear in LINEARS)
                if not is_wide:
                    yield from (partial(check_parts, backend, form, linear) for linear in NARROW_LINEARS)
                if form in VENDORS and not is_wide:
                    yield from (
                        partial(check_linear, backend, form, linear, is_vendors=True) for linear in VENDORS_LINEARS
                    )
        yield from attention_checks(backend, on_device=on_device)
        for rows, hidden in ((1, 64), (5, 300), (40, 4096), (3, 14336)):
            yield partial(check_rows, backend, rows, hidden, has_norm=True, multiplier=0.22)
            yield partial(check_rows, backend, rows, hidden, has_norm=False, multiplier=1.0)
    for case in (
        (2, 300, 1),
        (2, 1500, 20),
        *(((5, 30_000, 64), (2, 151_936, 200), (4, 300, 300)) if on_device else ()),
    ):
        yield partial(check_search, backends[0], *case)
    for draws in ((18, 250), *(((900, 30_000), (90, 151_936)) if on_device else ())):
        yield partial(check_draws, backends[0], *draws)
    yield partial(check_logits, backends[0], 3, 1500)
    for edits in ((5, 1500), *(((64, 151_936),) if on_device else ())):
        yield partial(check_edits, backends[0], *edits)
