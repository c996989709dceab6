"""Weights in the forms in which files hold them: packed as they are, they compute what the torch
definition says, on every instruction set.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from services.compute.backends.cpu.linear import NativeLinear, is_packable
from services.compute.backends.matrix import (
    BLOCK,
    MAX_STEPS,
    Dense,
    Grouped,
    Int4Columns,
    Int8Columns,
    Joined,
    Matrix,
    concatenate,
)
from services.compute.backends.torch.linear import QuantizedTorchLinear, TorchLinear, TorchMlp
from services.compute.backends.torch.reference import gated, quantize_groups, quantize_rows, rms_norm
from services.compute.models.architectures import read_config
from services.compute.models.config import Packed
from services.compute.weights.loader import Loader, warn_of_widened
from shared.model.files import DEMO_MODEL
from tests.examples import examples
from tests.kernels.backends import FLOAT32, native_backend
from tests.kernels.test_native import EPS, error, randn

pytestmark = pytest.mark.usefixtures("instruction_set")

RESTORED = (
    "int8 columns",
    "four bits by column",
    "int8 groups",
    "int8 groups, minima",
    "four bits",
    "four bits, zeros",
    "four bits, minima",
    "four bits, zeros and minima",
    "any table",
)
# bits, and the lowest code
PLANES = {
    "planes of 2, steps, minima": (2, 0),
    "planes of 3, steps": (3, -4),
    "planes of 4, steps, minima": (4, 0),
    "planes of 5": (5, -16),
    "planes of 5, minima": (5, 0),
    "planes of 5, steps, minima": (5, 0),
    "planes of 6, steps": (6, -32),
}
FORMS = (*RESTORED, "four bits, steps", *PLANES)
HALF_OF_BF16 = 2.0**-8


def held(form: str, n: int, k: int, group: int, seed: int = 0) -> Int8Columns | Int4Columns | Grouped:
    """A matrix [n, k] of random codes, and scales between 0.01 and 0.02. With a table, groups are of 32 at least."""
    generator = torch.Generator().manual_seed(seed)
    group = max(group, 32) if form.startswith(("four", "any")) and group == 16 else group
    groups = (n, -(-k // group))
    if form == "four bits by column":
        return held_by_column(n, k, group, generator)
    if "steps" in form:
        return held_in_steps(form, n, k, group, generator)
    scales = (0.01 + 0.01 * torch.rand(groups, generator=generator)).half()
    if form == "int8 columns":
        return Int8Columns(
            torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator), scales[:, 0].float() + 1e-5
        )
    zeros = torch.randint(-8, 8, groups, dtype=torch.int8, generator=generator) if "zeros" in form else None
    minima = torch.randn(groups, generator=generator).half() * 0.1 if "minima" in form else None
    if form.startswith("int8 groups"):
        return Grouped(
            torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator), scales, group, None, zeros, minima
        )
    if form in PLANES:
        bits, lowest = PLANES[form]
        codes = torch.randint(lowest, lowest + 2**bits, (n, k), dtype=torch.int8, generator=generator)
        return Grouped(codes, scales, group, None, None, minima, bits, lowest)
    table = (
        torch.randint(-128, 128, (16,), generator=generator)
        if form == "any table"
        else torch.arange(16) - (0 if minima is not None else 8)
    )
    return Grouped(
        torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator),
        scales,
        group,
        table.to(torch.int8),
        zeros,
        minima,
    )


def held_by_column(n: int, k: int, group: int, generator: torch.Generator) -> Int4Columns:
    """With any steps and zeros, and codes as far from these as int8 reaches."""
    groups = (n, -(-k // group))
    steps, zeros = (torch.randint(low, low + 16, groups, dtype=torch.int8, generator=generator) for low in (1, 0))
    most, middle = ((each.repeat_interleave(group, 1)[:, :k].int()) for each in (127 // steps, zeros))
    codes = torch.randint(0, 16, (n, k), generator=generator).clamp(middle - most, middle + most).to(torch.uint8)
    return Int4Columns(codes, (0.01 + 0.01 * torch.rand(n, generator=generator)) / MAX_STEPS, zeros, steps, group)


def held_in_steps(form: str, n: int, k: int, group: int, generator: torch.Generator) -> Grouped:
    """With scales that are up to 127 times those of blocks of 256, in both directions."""
    blocks, groups = (n, -(-k // BLOCK)), (n, -(-k // group))
    bits, lowest = PLANES.get(form, (4, 0))
    table = torch.randint(-128, 128, (16,), generator=generator).to(torch.int8) if form not in PLANES else None
    codes = torch.randint(lowest, lowest + 2**bits, (n, k), generator=generator).to(
        torch.int8 if table is None else torch.uint8
    )
    steps, minimum_steps = (torch.randint(-128, 128, groups, dtype=torch.int8, generator=generator) for _ in range(2))
    scales = ((0.01 + 0.01 * torch.rand(blocks, generator=generator)) / 64).half()
    minima = (0.1 * torch.randn(blocks, generator=generator) / 64).half() if "minima" in form else None
    return Grouped(
        codes, scales, group, table, None, minima, bits, lowest, steps, minimum_steps if minima is not None else None
    )


def largest_error(x: torch.Tensor, matrix: Int8Columns | Int4Columns | Grouped, exact: torch.Tensor) -> torch.Tensor:
    """The most that a layer's result may differ from the exact product of x and the dequantized
    weights: half a step of int8 in each activation, the result's rounding to bf16, and float32's in
    the sums."""
    group = matrix.group if isinstance(matrix, Grouped) else matrix.shape[1]
    weight = matrix.dequantize(torch.float64).abs()
    steps = quantize_groups(x, group)[1].double().repeat_interleave(group, 1)[:, : x.shape[1]]
    return 0.501 * steps @ weight.T + HALF_OF_BF16 * exact.abs() + 1e-5 * (x.double().abs() @ weight.T) + 1e-6


def test_values_that_are_all_above_zero() -> None:
    plain = held("four bits, zeros", 32, 128, 64)
    matrix, x = replace(plain, zeros=torch.full((32, 2), -10, dtype=torch.int8)), randn(9, 128, seed=1)
    exact = x.double() @ matrix.dequantize(torch.float64).T
    found = native_backend().make_linear(matrix)(x)
    assert ((found.double() - exact).abs() <= largest_error(x, matrix, exact)).all()


@pytest.mark.parametrize("form", FORMS)
@given(
    rows=st.integers(1, 70),
    n=st.integers(1, 150),
    k=st.integers(1, 400),
    group=st.sampled_from([16, 32, 64, 128]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    seed=st.integers(0, 99),
)
@examples(30)
def test_a_layer_of_any_form(
    form: str, rows: int, n: int, k: int, group: int, has_bias: bool, has_residual: bool, seed: int
) -> None:
    matrix, x = held(form, n, k, group, seed), randn(rows, k, seed=seed + 1)
    bias = randn(n, seed=seed + 2) if has_bias else None
    residual = randn(rows, n, seed=seed + 3) if has_residual else None
    layer = native_backend().make_linear(matrix, bias)
    found = layer(x, residual=residual)
    expected = QuantizedTorchLinear(matrix, bias)(
        x.float(), residual=residual.float() if residual is not None else None
    )
    exact = x.double() @ matrix.dequantize(torch.float64).T
    for addend in (bias, residual):
        exact = exact + addend.double() if addend is not None else exact
    assert ((found.double() - exact).abs() <= largest_error(x, matrix, exact)).all()
    assert torch.allclose(
        found.double(), expected.double(), rtol=HALF_OF_BF16, atol=1e-5 * float(exact.abs().max() + 1)
    )
    alone = torch.cat(
        [
            layer(x[row : row + 1], residual=residual[row : row + 1] if residual is not None else None)
            for row in range(rows)
        ]
    )
    assert torch.equal(found, alone)


@given(
    rows=st.integers(1, 70),
    n=st.integers(1, 150),
    k=st.integers(1, 1200),
    group=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 99),
)
@examples(40)
def test_four_bits_by_column_are_int8_by_column(rows: int, n: int, k: int, group: int, seed: int) -> None:
    """The same bits as of the int8 values that they stand for, however many rows there are."""
    matrix, x = held("four bits by column", n, k, group, seed), randn(rows, k, seed=seed + 1)
    assert isinstance(matrix, Int4Columns) and matrix.widened().codes.abs().max() <= 127
    layers = [native_backend().make_linear(each) for each in (matrix, matrix.widened())]
    assert torch.equal(*(layer(x) for layer in layers))
    assert torch.equal(*(layer.logits(x) for layer in layers))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
def test_gated_layers_norms_and_logits(form: str) -> None:
    """Gate and up alternate by tiles, the second layer reads its activations from tiles, and the last gives float32."""
    hidden, inter, rows = 200, 232, 37
    x, norm = randn(rows, hidden), (1 + randn(hidden, seed=1) * 0.1).bfloat16()
    for group in (16, 32, 64, 128):
        gate_up, down = held(form, 2 * inter, hidden, group), held(form, hidden, inter, group, seed=1)
        backend = native_backend()
        mlp = backend.make_mlp(backend.make_linear(gate_up, is_gated=True), backend.make_linear(down))
        found = mlp(x, norm=norm, eps=EPS)
        reference = TorchMlp(QuantizedTorchLinear(gate_up, None, is_gated=True), QuantizedTorchLinear(down, None))
        assert error(found, reference(x.float(), norm=norm.float(), eps=EPS)) < 2.5e-2, group
        assert torch.equal(found, torch.cat([mlp(x[row : row + 1], norm=norm, eps=EPS) for row in range(rows)])), group
        logits = backend.make_linear(gate_up).logits(x, norm=norm, eps=EPS)
        assert error(logits, QuantizedTorchLinear(gate_up, None)(rms_norm(x, norm, EPS).float())) < 2.5e-2, group


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_many_long_rows(form: str) -> None:
    """Several panels of rows: the same bits as alone, and in any smaller company."""
    for group in (16, 32, 128):
        matrix, x = held(form, 70, 5000, group), randn(300, 5000)
        layer = native_backend().make_linear(matrix)
        found = layer(x)
        assert error(found, QuantizedTorchLinear(matrix, None)(x.float())) < 4e-3, group
        some = [0, 31, 32, 159, 160, 255, 256, 299]
        assert torch.equal(found[some], torch.cat([layer(x[row : row + 1]) for row in some])), group
        for count in (2, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33):
            assert torch.equal(found[:count], layer(x[:count])), (group, count)


@given(rows=st.integers(1, 9), k=st.integers(1, 300), group=st.sampled_from([16, 32, 64, 128]), seed=st.integers(0, 99))
@examples(60)
def test_activations_by_groups(rows: int, k: int, group: int, seed: int) -> None:
    """Each group is quantized as a row of its own would be."""
    x = randn(rows, k, seed=seed).float()
    codes, scales = quantize_groups(x, group)
    assert codes.shape == x.shape and scales.shape == (rows, -(-k // group))
    for number, part in enumerate(x.split(group, dim=1)):
        expected, of_part = quantize_rows(part)
        assert torch.equal(codes[:, number * group : (number + 1) * group], expected) and torch.equal(
            scales[:, number], of_part
        )


def test_an_outlier_costs_nothing_outside_its_group() -> None:
    x = randn(20, 512)
    x[:, 3] *= 1000
    matrix = held("int8 groups", 64, 512, 64)
    codes = matrix.codes.clone()
    codes[:, :64] = 0
    matrix = replace(matrix, codes=codes)
    exact = x.double() @ matrix.dequantize(torch.float64).T
    assert error(native_backend().make_linear(matrix)(x), exact) < 1e-2
    by_row = native_backend().make_linear(Dense(matrix.dequantize(torch.bfloat16)), quantization="w8a8")
    assert error(by_row(x), exact) > 0.5


@pytest.mark.parametrize("form", RESTORED)
def test_parts_make_the_same_layer_again(form: str) -> None:
    backend = native_backend()
    for is_gated, (group, (n, k)) in product((False, True), ((32, (70, 90)), (64, (64, 50)), (128, (64, 300)))):
        bias = randn(n, seed=3)
        layer = backend.make_linear(held(form, n, k, group), bias, is_gated=is_gated)
        again = backend.restore_linear(layer.parts, n, k, is_gated=is_gated, has_bias=True, activation="silu")
        x = randn(9, k)
        assert again.form == layer.form and torch.equal(again(x), layer(x))
        for name in layer.parts.keys() - {"zeros", "minima"}:  # without those it is another form
            with pytest.raises(ValueError, match="its parts have other shapes"):
                backend.restore_linear(
                    {other: part for other, part in layer.parts.items() if other != name},
                    n,
                    k,
                    is_gated=is_gated,
                    has_bias=True,
                    activation="silu",
                )
        for other_n, other_k, has_bias in ((n + 64, k, True), (n, k + 128, True), (n, k, False)):
            with pytest.raises(ValueError, match="its parts have other shapes"):
                backend.restore_linear(
                    layer.parts, other_n, other_k, is_gated=is_gated, has_bias=has_bias, activation="silu"
                )


def of_sixteen(n: int, k: int) -> Grouped:
    """Four bits with a table, in groups of 16."""
    return Grouped(
        torch.zeros(n, k, dtype=torch.uint8), torch.ones(n, k // 16).half(), 16, torch.arange(16, dtype=torch.int8)
    )


def unpackable() -> dict[str, Matrix]:
    four, eight = held("four bits, zeros", 40, 256, 64), held("int8 groups", 40, 256, 64)
    assert isinstance(four, Grouped) and isinstance(eight, Grouped)
    assert four.zeros is not None
    return {
        "groups of 16 with a table": of_sixteen(40, 256),
        "groups of 256": held("four bits", 40, 256, 256),
        "scales that are no float16": replace(four, scales=four.scales.float() + 1e-7),
        "minima that are no float16": replace(eight, minima=torch.full((40, 4), 1e9)),
        "int8 codes with zeros": replace(eight, zeros=four.zeros),
        "a table in floating point": replace(four, table=torch.arange(16) / 15),
        "values beyond int8": replace(four, table=torch.arange(-128, 128, 16).to(torch.int8)),
    }


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_what_no_kernel_reads_is_widened(quantization: str) -> None:
    backend, x = native_backend(), randn(5, 256)
    for name, matrix in unpackable().items():
        assert not is_packable(matrix), name
        layer = backend.make_linear(matrix, quantization=quantization)
        widened = backend.make_linear(Dense(matrix.dequantize(torch.bfloat16)), quantization=quantization)
        assert torch.equal(layer(x), widened(x)), name


def test_what_is_quantized_already_keeps_its_form() -> None:
    """Whatever quantization is asked for; and where the model computes in float32, it is widened."""
    for form in FORMS:
        matrix, x = held(form, 40, 128, 64), randn(5, 128)
        kept = native_backend().make_linear(matrix, quantization="w4", group=32)
        assert isinstance(kept, NativeLinear) and torch.equal(kept(x), native_backend().make_linear(matrix)(x)), form
        exact = FLOAT32.make_linear(matrix)
        assert (
            isinstance(exact, TorchLinear)
            and error(exact(x.float()), x.float() @ matrix.dequantize(torch.float32).T) < 1e-6
        ), form  # torch rounds by the number of rows


def test_scales_in_float32_that_float16_holds_are_packed() -> None:
    matrix = held("four bits, minima", 40, 128, 64)
    assert isinstance(matrix, Grouped) and matrix.minima is not None
    wide, x = replace(matrix, scales=matrix.scales.float(), minima=matrix.minima.float()), randn(5, 128)
    assert is_packable(wide) and torch.equal(
        native_backend().make_linear(wide)(x), native_backend().make_linear(matrix)(x)
    )


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("scales", torch.ones(4, 3).half()),
        ("zeros", torch.ones(4, 1, dtype=torch.int8)),
        ("minima", torch.ones(3, 2).half()),
        ("codes", torch.ones(4, 128)),
        ("table", torch.ones(8)),
    ],
)
def test_parts_that_do_not_fit_are_refused(part: str, other: torch.Tensor) -> None:
    """A kernel would read beyond their ends."""
    matrix = held("four bits", 4, 128, 64)
    with pytest.raises(ValueError, match="not 4 bits in groups of 64"):
        replace(matrix, **{part: other})
    with pytest.raises(ValueError, match="not int8 by column"):
        Int8Columns(torch.zeros(4, 8, dtype=torch.int8), torch.ones(5))
    by_column = held("four bits by column", 4, 128, 64)
    for name, wrong in {
        "scales": torch.ones(5),
        "zeros": torch.zeros(4, 1, dtype=torch.int8),
        "steps": torch.ones(4, 3, dtype=torch.int8),
    }.items():
        with pytest.raises(ValueError, match="not 4 bits by column in groups of 64"):
            replace(by_column, **{name: wrong})


class Held:
    """A WeightSource of made-up matrices."""

    folder = Path("made-up")

    def __init__(self, form_by_name: dict[str, str]) -> None:
        self.form_by_name = form_by_name

    def matrix(self, name: str, shape: tuple[int, int], rows: Sequence[range] | None = None) -> Matrix:
        assert rows is None
        form, group = self.form_by_name.get(name.split(".")[-2], "four bits/64").split("/")
        if form == "four bits" and group == "16":
            return of_sixteen(*shape)
        return held(form, *shape, int(group))

    def dense(self, name: str, shape: tuple[int, ...], rows: Sequence[range] | None = None) -> torch.Tensor:
        assert rows is None
        return randn(*shape, seed=len(name))

    def close(self) -> None: ...


def test_the_log_says_once_what_was_widened(caplog: pytest.LogCaptureFixture) -> None:
    config = read_config(json.loads((DEMO_MODEL / "config.json").read_text()))
    loader = Loader(
        Held({"v_proj": "four bits/16", "down_proj": "four bits/256"}), config, native_backend(), Packed("none", 64)
    )
    for number in range(3):
        prefix = f"layers.{number}."
        loader.linear(prefix + "qkv.", [f"{prefix}{name}_proj." for name in "qkv"], [(32, 64)] * 3, has_bias=False)
        loader.linear(prefix + "down.", [prefix + "down_proj."], [(64, 96)], has_bias=True)
        loader.linear(prefix + "output.", [prefix + "o_proj."], [(64, 64)], has_bias=False)
    with caplog.at_level(logging.WARNING, logger="penstock.compute"):
        warn_of_widened(loader.widened, torch.bfloat16)
    expected = {"3 of 4 bits in groups of 16", "3 of 4 bits in groups of 64", "3 of 4 bits in groups of 256"}
    [line] = [record.getMessage() for record in caplog.records]
    assert (
        line.startswith("layers are widened to bfloat16")
        and set(line.split("layers='")[1].rstrip("'").split("; ")) == expected
    )


def test_alike_matrices_are_joined() -> None:
    for form in FORMS:
        parts = [held(form, n, 96, 32, seed=7 if form in ("any table", "four bits, steps") else n) for n in (3, 5, 8)]
        if form in ("any table", "four bits, steps"):
            parts = [replace(part, table=parts[0].table) for part in parts if isinstance(part, Grouped)]
        joined = concatenate(parts, torch.bfloat16)
        assert type(joined) is type(parts[0])
        assert torch.equal(
            joined.dequantize(torch.float64), torch.cat([part.dequantize(torch.float64) for part in parts])
        )
    mixed = [held("four bits", 3, 96, 32), held("four bits", 5, 96, 32), held("four bits, minima", 3, 96, 32)]
    both = concatenate(mixed, torch.bfloat16)
    assert isinstance(both, Joined) and [each.shape[0] for each in both.parts] == [8, 3]
    assert torch.equal(both.dequantize(torch.float64), torch.cat([part.dequantize(torch.float64) for part in mixed]))


@pytest.mark.parametrize("rows", [1, 9, 300])
def test_matrices_of_different_forms_are_one_layer(rows: int) -> None:
    """The same bits as layers of their own, whose outputs are put side by side."""
    matrices = [
        held("planes of 4, steps, minima", 96, 300, 32),
        held("four bits, minima", 33, 300, 64),
        held("planes of 6, steps", 31, 300, 16),
    ]
    backend, x, residual, bias = native_backend(), randn(rows, 300), randn(rows, 160, seed=1), randn(160, seed=2)
    norm = (1 + randn(300, seed=3) * 0.1).bfloat16()
    joined = concatenate(matrices, torch.bfloat16)
    found = backend.make_linear(joined, bias)(x, norm=norm, eps=EPS, residual=residual)
    parts = zip(matrices, bias.split([96, 33, 31]), residual.split([96, 33, 31], 1), strict=True)
    apart = [
        backend.make_linear(matrix, some)(x, norm=norm, eps=EPS, residual=rest.contiguous())
        for matrix, some, rest in parts
    ]
    assert backend.is_kept(joined) and torch.equal(found, torch.cat(apart, 1))
    logits = backend.make_linear(joined).logits(x)
    assert torch.equal(logits, torch.cat([backend.make_linear(matrix).logits(x) for matrix in matrices], 1))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_a_gate_of_another_form(activation: str) -> None:
    for rows, inter in product((1, 9, 40), (41, 48, 232)):
        gate, up, down = (
            held("planes of 5", inter, 300, 32),
            held("int8 groups", inter, 300, 32, seed=1),
            held("planes of 6, steps", 300, inter, 16),
        )
        backend, x, norm = native_backend(), randn(rows, 300), (1 + randn(300, seed=3) * 0.1).bfloat16()
        gate_up = backend.make_linear(Joined((gate, up)), is_gated=True, activation=activation)
        hidden = gate_up(x, norm=norm, eps=EPS)
        halves = torch.cat([backend.make_linear(each).logits(x, norm=norm, eps=EPS) for each in (gate, up)], 1)
        assert torch.allclose(hidden.float(), gated(halves, activation), rtol=HALF_OF_BF16, atol=1e-4)
        mlp = backend.make_mlp(gate_up, backend.make_linear(down))
        found = mlp(x, norm=norm, eps=EPS)
        assert torch.equal(found, backend.make_linear(down)(hidden, residual=x))
        assert torch.equal(found, torch.cat([mlp(x[row : row + 1], norm=norm, eps=EPS) for row in range(rows)]))


def test_widening_a_matrix_takes_little_beside_the_matrix() -> None:
    """However long its rows are: 16 MiB of float32 at a time."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if (
                isinstance(found, torch.Tensor)
                and found.dtype == torch.float32
                and func is not torch.ops.aten.empty.memory_format
            ):
                self.numel = max(self.numel, found.numel())
            return found

    matrix = Grouped(torch.ones(700, 16_384, dtype=torch.int8), torch.ones(700, 512, dtype=torch.float16), 32)
    with Largest() as largest:
        widened = matrix.dequantize(torch.float32)
    assert bool((widened == 1).all()) and largest.numel <= 1 << 22
