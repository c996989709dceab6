"""Rounding to four bits by column: codes times whole steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.backends.matrix import MAX_STEPS
from services.compute.backends.torch.reference import quantize_int4
from tests.examples import examples
from tests.kernels.test_native import randn


@given(
    n=st.integers(1, 40),
    k=st.integers(1, 400),
    group=st.sampled_from([32, 64, 128]),
    scale=st.floats(1e-4, 1e3),
    seed=st.integers(0, 99),
)
@examples(40)
def test_rounding_to_four_bits_by_column(n: int, k: int, group: int, scale: float, seed: int) -> None:
    """Every number has its range, so that none overflows its byte, and no weight is far off."""
    weight = scale * randn(n, k, seed=seed).float()
    found = quantize_int4(weight, group)
    assert (
        found.codes.max() < 16
        and found.zeros.min() >= 0
        and found.zeros.max() < 16
        and found.steps.min() >= 1
        and found.steps.max() <= MAX_STEPS
    )
    values = (found.codes.int() - found.zeros.repeat_interleave(group, 1)[:, :k]) * found.steps.repeat_interleave(
        group, 1
    )[:, :k]
    assert values.abs().max() <= 127 and torch.equal(values.to(torch.int8), found.widened().codes)
    error = (found.dequantize(torch.float32) - weight).abs()
    assert (error.amax(1) <= 0.2 * weight.abs().amax(1) + 1e-6).all()
    nothing = quantize_int4(torch.zeros(n, k), group)
    assert (nothing.dequantize(torch.float32) == 0).all()


@pytest.mark.parametrize(("group", "most"), [(32, 0.0815), (64, 0.091), (128, 0.1)])
@pytest.mark.parametrize("scale", [1e-8, 1.0])
def test_what_rounding_to_four_bits_costs(group: int, most: float, scale: float) -> None:
    weight = scale * torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert float((quantize_int4(weight, group).dequantize(torch.float32) - weight).norm() / weight.norm()) < most
