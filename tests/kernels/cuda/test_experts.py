"""A mixture's experts in few launches, in the interpreter: the same bits as expert by expert,
whoever else is in the step.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.gpu.check import randn
from bench.gpu.kernels import FORMS, make_matrix
from services.compute.backends.backend import Linear, RouterConfig
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.experts import CudaExperts
from services.compute.models.moe import Expert, run_experts
from tests.kernels.backends import CPU, FLOAT32

EXPERTS, ACTIVE, HIDDEN, INTER = 3, 2, 40, 32


def make_experts(
    backend: CudaBackend, form: str, activation: str = "silu"
) -> tuple[list[Expert], list[tuple[Linear, Linear]]]:
    experts = []
    for seed in range(EXPERTS):
        gate_up, down = (
            randn(*shape, seed=seed, scale=0.2).to(backend.dtype) for shape in ((2 * INTER, HIDDEN), (HIDDEN, INTER))
        )
        gate_up_bias, down_bias = (randn(size, seed=50 + seed).to(backend.dtype) for size in (2 * INTER, HIDDEN))
        first = backend.make_linear(make_matrix(gate_up, form, 32), gate_up_bias, is_gated=True, activation=activation)
        experts.append(
            Expert(first, backend.make_linear(make_matrix(down, form, 32), down_bias if activation != "silu" else None))
        )
    return experts, [(each.gate_up, each.down) for each in experts]


def group(backend: CudaBackend, pairs: list[tuple[Linear, Linear]], first: int = 0) -> CudaExperts:
    grouped = backend.group_experts(pairs, EXPERTS, first)
    assert grouped is not None
    return grouped


def rows_and_choice(dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor]:
    return randn(num_rows, HIDDEN, seed=7).to(dtype), FLOAT32.row_math.choose_experts(
        randn(num_rows, EXPERTS, seed=8), RouterConfig(ACTIVE, has_normalized_weights=False)
    )[0]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("form", "dtype"), [("none", torch.float32), *((form, torch.bfloat16) for form in FORMS)])
def test_all_at_once_have_the_bits_of_one_by_one(form: str, dtype: torch.dtype) -> None:
    experts, pairs = make_experts(backend := CudaBackend(dtype, CPU), form)
    x, chosen = rows_and_choice(dtype, 4)
    expected = run_experts(experts, x, chosen)
    assert torch.equal(group(backend, pairs).run(x, chosen), expected)
    assert torch.equal(run_experts(experts, x, chosen), expected), "the layers still stand alone"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("form", "num_rows"), [("none", 70), ("w8a8", 90), ("w4", 30)])
def test_larger_tiles_have_the_same_bits(form: str, num_rows: int) -> None:
    """All rows choose the same experts: more than a tile holds; and gates with other activations and biases."""
    backend = CudaBackend(torch.bfloat16, CPU)
    _, pairs = make_experts(backend, form, "clamped_swiglu")
    grouped = group(backend, pairs)
    x, chosen = randn(num_rows, HIDDEN, seed=7).bfloat16(), torch.tensor([[2, 0]]).expand(num_rows, 2).contiguous()
    together = grouped.run(x, chosen)
    some = [0, num_rows // 2, num_rows - 1]
    assert torch.equal(
        together[some], torch.cat([grouped.run(x[row : row + 1], chosen[row : row + 1]) for row in some])
    )


def test_a_range_of_experts_writes_its_own_rows_alone() -> None:
    backend = CudaBackend(torch.bfloat16, CPU)
    experts, pairs = make_experts(backend, "w8a8")
    x, chosen = rows_and_choice(torch.bfloat16, 5)
    expected = run_experts(experts, x, chosen)
    whole = torch.empty_like(expected)
    for first, last in ((0, 1), (1, EXPERTS)):
        found = group(backend, pairs[first:last], first).run(x, chosen)
        is_held = (chosen >= first) & (chosen < last)
        whole[is_held] = found[is_held]
    assert torch.equal(whole, expected)


@settings(max_examples=10, deadline=None)
@given(
    chosen=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=30),
    first=st.integers(0, 1),
    rows=st.sampled_from([2, 16]),
)
def test_tiles_hold_each_pair_of_the_range_once_and_in_order(chosen: list[int], first: int, rows: int) -> None:
    backend = CudaBackend(torch.float32, CPU)
    _, pairs = make_experts(backend, "none")
    groups = group(backend, pairs[first:], first)._group(torch.tensor(chosen)[:, None], rows)
    found: dict[int, list[int]] = {expert: [] for expert in range(first, EXPERTS)}
    for expert, begin, end in groups.tiles.tolist():
        assert 0 <= end - begin <= rows
        found[first + expert] += groups.order[begin:end].tolist()
    assert found == {expert: [pair for pair, each in enumerate(chosen) if each == expert] for expert in found}


SOFTMAX = RouterConfig(4, has_normalized_weights=False)
SIGMOID = RouterConfig(4, has_normalized_weights=True, has_sigmoid_scores=True, scaling=2.5)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("has_correction", [False, True])
@pytest.mark.parametrize("router", [SOFTMAX, SIGMOID])
def test_the_choice_is_the_definitions(router: RouterConfig, has_correction: bool, num_groups: int) -> None:
    row_math = CudaBackend(torch.float32, CPU).row_math
    router = replace(router, num_groups=num_groups, num_active_groups=max(num_groups - 1, 1))
    logits, correction = randn(6, 12, seed=3) * 2, randn(12, seed=4) * 0.3 if has_correction else None
    chosen, weights = row_math.choose_experts(logits, router, correction)
    expected, expected_weights = FLOAT32.row_math.choose_experts(logits, router, correction)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-6)
    alone = row_math.choose_experts(logits[2:3], router, correction)
    assert torch.equal(alone[0], chosen[2:3]) and torch.equal(alone[1], weights[2:3])


@pytest.mark.parametrize("is_normalized", [False, True])
def test_ties_are_chosen_by_number(is_normalized: bool) -> None:
    """Also of a row with a NaN, as padding may leave one: it gets some experts."""
    row_math = CudaBackend(torch.float32, CPU).row_math
    router = replace(SOFTMAX, has_normalized_weights=is_normalized)
    ties = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [2.0, torch.nan, 2.0, 3.0, 0.0]])
    chosen, weights = row_math.choose_experts(ties, router)
    assert chosen.tolist() == [[1, 2, 4, 0], [3, 0, 2, 4]]
    assert weights[0].isfinite().all() and weights[1].isnan().all()


@pytest.mark.parametrize("has_residual", [False, True])
def test_the_weighted_sum_is_the_definitions(has_residual: bool) -> None:
    row_math = CudaBackend(torch.float32, CPU).row_math
    x, results, weights = randn(5, HIDDEN, seed=7), randn(5, ACTIVE, HIDDEN, seed=4), randn(5, ACTIVE, seed=1)
    shared = randn(5, HIDDEN, seed=2), randn(5, 1, seed=3) * 9
    expected = FLOAT32.row_math.add_experts(x, results, weights, shared=None, has_residual=has_residual)
    assert torch.equal(row_math.add_experts(x, results, weights, shared=None, has_residual=has_residual), expected)
    for score in (None, shared[1]):
        found, expected = (
            each.add_experts(x, results, weights, shared=(shared[0], score), has_residual=has_residual)
            for each in (row_math, FLOAT32.row_math)
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_experts_of_several_forms_are_called_one_by_one() -> None:
    backend = CudaBackend(torch.bfloat16, CPU)
    mixed = make_experts(backend, "w4")[1][:1] + make_experts(backend, "none")[1][1:]
    assert backend.group_experts(mixed, EXPERTS) is None
