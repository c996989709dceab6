"""Quantized weights with activations in bfloat16: the bits of the same weights rounded to bfloat16,
on every instruction set.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.backends.choose import choose_backend
from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.matrix import Dense, Joined
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.reference import quantize_weight
from shared.process.errors import StartupError
from tests.examples import examples
from tests.kernels.backends import CPU, native_backend
from tests.kernels.test_forms import FORMS, RESTORED, held
from tests.kernels.test_native import EPS, error, randn


def widening_backend() -> CpuBackend:
    backend = choose_backend(torch.bfloat16, CPU, activations="bfloat16")
    assert isinstance(backend, CpuBackend)
    return backend


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("form", FORMS)
@given(
    rows=st.sampled_from([1, 2, 3, 7, 8, 9, 33, 70]),
    n=st.integers(1, 150),
    k=st.integers(1, 700),
    group=st.sampled_from([16, 32, 64, 128]),
    has_bias=st.booleans(),
    is_gated=st.booleans(),
    seed=st.integers(0, 99),
)
@examples(30)
def test_a_layer_computes_the_bits_of_its_widened_weights(
    form: str, rows: int, n: int, k: int, group: int, has_bias: bool, is_gated: bool, seed: int
) -> None:
    n = 2 * n if is_gated else n
    matrix, x, norm = held(form, n, k, group, seed), randn(rows, k, seed=seed + 1), randn(k, seed=seed + 2)
    bias = randn(n, seed=seed + 3) if has_bias else None
    dense = native_backend().make_linear(Dense(matrix.dequantize(torch.bfloat16)), bias, is_gated=is_gated)
    widened = widening_backend().make_linear(matrix, bias, is_gated=is_gated)
    assert torch.equal(widened(x, norm=norm, eps=EPS), dense(x, norm=norm, eps=EPS))
    if form in RESTORED:
        again = widening_backend().restore_linear(
            widened.parts, n, k, is_gated=is_gated, has_bias=has_bias, activation="silu"
        )
        assert torch.equal(again(x), dense(x))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.pairwise
@pytest.mark.parametrize("quantization", ["w8a8", "w4", "nf4"])
@pytest.mark.parametrize("rows", [1, 5, 40, 600])
def test_an_mlp_that_is_quantized_at_load(quantization: str, rows: int) -> None:
    gate_up, down, x, norm = (
        randn(2 * 200, 320, seed=1),
        randn(320, 200, seed=2),
        randn(rows, 320, seed=3),
        randn(320, seed=4),
    )
    native, widening = native_backend(), widening_backend()
    forms = [quantize_weight(each, quantization, 32) for each in (gate_up, down)]
    dense = native.make_mlp(
        *(
            native.make_linear(Dense(each.dequantize(torch.bfloat16)), is_gated=is_gated)
            for each, is_gated in zip(forms, (True, False), strict=True)
        )
    )
    widened = widening.make_mlp(
        *(
            widening.make_linear(Dense(each), quantization=quantization, is_gated=is_gated)
            for each, is_gated in ((gate_up, True), (down, False))
        )
    )
    found = widened(x, norm=norm, eps=EPS)
    assert torch.equal(found, dense(x, norm=norm, eps=EPS))
    torch_backend = TorchBackend(torch.bfloat16, CPU, "bfloat16")
    definition = torch_backend.make_linear(Dense(gate_up), quantization=quantization, is_gated=True)
    assert (
        error(widening.make_linear(Dense(gate_up), quantization=quantization, is_gated=True)(x), definition(x).double())
        < 0.01
    )


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("is_gated", [False, True])
def test_matrices_of_several_forms_behind_one_call(is_gated: bool) -> None:
    parts = (held("planes of 6, steps", 96, 512, 16, 1), held("planes of 4, steps, minima", 96, 512, 32, 2))
    x, bias = randn(19, 512, seed=3), randn(192, seed=4)
    widened = widening_backend().make_linear(Joined(parts), bias, is_gated=is_gated)
    dense = native_backend().make_linear(Dense(Joined(parts).dequantize(torch.bfloat16)), bias, is_gated=is_gated)
    assert torch.equal(widened(x), dense(x))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("bits", [0x7FFF, -1, 0x7E00])
def test_what_is_no_number_stays_none(bits: int) -> None:
    """float16's NaNs of any payload, as a broken file's scale."""
    matrix, x = held("planes of 4, steps, minima", 32, 256, 32, 1), randn(3, 256, seed=2)
    matrix.scales[5] = torch.tensor(bits, dtype=torch.int16).view(torch.float16)
    found = widening_backend().make_linear(matrix)(x)
    assert found[:, 5].isnan().all() and not found[:, 6:].isnan().any()


def test_on_a_gpu_there_is_no_choice() -> None:
    with pytest.raises(StartupError, match="--activations bfloat16 is for CPUs only"):
        choose_backend(torch.bfloat16, torch.device("cuda"), activations="bfloat16")
