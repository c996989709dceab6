"""The arithmetic of nano-batches: bytes and operations by hand, and what the bound can never be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.nano_batches import Step, Work, attention, bound, products
from services.simulator.models import MODELS


def test_bytes_and_operations_by_hand() -> None:
    """Llama 3 8B: 16 GB of weights, 128 KiB of KV a token; 32 layers of 32 heads of 128 numbers, so
    half a megaoperation a pair.
    """
    model = MODELS["llama-3-8b"]
    size = model.num_parameters
    assert size == pytest.approx(8.03e9, rel=1e-3)
    assert products(model, Step(64, 1000)) == Work(2.0 * size, 2.0 * size * 64)
    assert attention(model, Step(64, 1000)) == Work(131_072 * 64_000, 524_288 * 64_000)
    assert attention(model, Step(0, 0, 100)) == Work(131_072 * 100, 524_288 * 5050)
    assert products(model, Step(2, 7, 100)).operations == 2.0 * size * 102


def test_a_bound_by_hand() -> None:
    """100 bytes/s, 1,000 operations/s. Products that take 10 s for operations and 4 for bytes,
    attention that takes 6 s for bytes: 16 s become 14.
    """
    model = MODELS["llama-3-8b"]
    step = Step(256, 1024)
    bandwidth, rate = 2.0 * model.num_parameters / 4, products(model, step).operations / 10
    attend_s = attention(model, step).num_bytes / bandwidth
    found = bound(model, step, bandwidth, rate)
    assert (
        attend_s > 6
        and found.seconds == pytest.approx(10 + attend_s)
        and found.attention == pytest.approx(attend_s / (10 + attend_s))
    )
    assert found.gain == pytest.approx(
        (10 + attend_s) / max(8 + attend_s, 10 + attention(model, step).operations / rate) - 1
    )
    assert found.cost == 0.0


steps = st.builds(Step, st.integers(0, 512), st.integers(1, 32_768), st.integers(0, 8192)).filter(
    lambda step: step.num_decodes + step.num_prompt_tokens > 0
)


@given(st.sampled_from(sorted(MODELS)), steps, st.floats(1e9, 1e13), st.floats(1e10, 1e16))
def test_overlapping_two_kinds_of_work_never_doubles_the_speed(
    name: str, step: Step, bandwidth: float, rate: float
) -> None:
    """And where both are bound by memory, it gains nothing, and costs the weights once more."""
    found = bound(MODELS[name], step, bandwidth, rate)
    assert 0 <= found.gain <= 1 + 1e-9 and 0 <= found.cost <= 1 + 1e-9
    multiply, attend = products(MODELS[name], step), attention(MODELS[name], step)
    if all(each.num_bytes / bandwidth >= each.operations / rate for each in (multiply, attend)):
        assert found.gain == 0
    if multiply.operations / rate >= 2 * multiply.num_bytes / bandwidth:
        assert found.cost == 0
