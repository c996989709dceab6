"""Each Triton kernel in the interpreter, against its definition, and a row's bits alone.

`make verify SUITE=cuda-kernels` has more cases, and prints the errors.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from bench.gpu.attention_checks import AttentionCase, check_attention, check_holes, check_spans
from bench.gpu.check import Check, randn
from bench.gpu.kernels import (
    FORMS,
    LinearCase,
    check_draws,
    check_edits,
    check_linear,
    check_logits,
    check_parts,
    check_rows,
    check_search,
)
from services.compute.backends.cuda import attention as attention_module
from services.compute.backends.cuda import search as search_module
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.kernels import attention as kernels
from services.compute.backends.cuda.linear import CudaLinear, SplitK, read_table
from services.compute.backends.cuda.search import CudaRowSearch
from services.compute.backends.matrix import Dense, Grouped
from services.compute.backends.torch.attention import Heads
from services.compute.backends.torch.reference import NF4_TABLE, Scores
from shared.process.errors import StartupError
from tests.kernels.backends import CPU
from tests.kernels.backends import FLOAT32 as TORCH

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# keys are values, too, and have their norm after the rotation
NORMED_LAST = Heads(2, 1, 16, norms_after_rotation=True, kv_projections=1, has_value_norm=True)


def has_held(check: Check) -> bool:
    assert check.error <= check.bound, check
    assert check.is_same_alone, check
    return True


@pytest.mark.parametrize(
    ("form", "dtype"), [("none", FLOAT32), ("none", FLOAT16), ("w4", FLOAT16), *((form, BFLOAT16) for form in FORMS)]
)
def test_linear_layers(form: str, dtype: torch.dtype) -> None:
    """An odd number of inputs and parts of a tile, of few rows; one form of many as well, with all
    that the epilogue adds.
    """
    backend = CudaBackend(dtype, CPU)
    check = check_linear(backend, form, LinearCase(2, 36, 65, has_norm=True))
    assert has_held(check) and (dtype != FLOAT16 or form != "none" or check.error < 4e-4), "float16 has three bits more"
    if form == "w8a8":
        assert has_held(
            check_linear(backend, form, LinearCase(66, 24, 40, activation="silu", has_bias=True, has_residual=True))
        )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("form", FORMS)
def test_sums_in_parts(form: str) -> None:
    backend = CudaBackend(BFLOAT16, CPU)
    assert has_held(check_parts(backend, form, LinearCase(2, 36, 700)))
    assert has_held(check_parts(backend, form, LinearCase(66, 20, 300, activation="silu")))


def test_a_layers_parts_depend_on_the_whole_layer_and_the_device() -> None:
    """A rank's columns are summed as in one process, however few there are."""
    weight = randn(4000, 1096, seed=1, scale=0.1).bfloat16()
    backend = CudaBackend(BFLOAT16, CPU)
    assert backend.make_linear(Dense(weight)).parts is None, "there are enough tiles"
    assert backend.make_linear(Dense(weight[:40]), whole_n=4000).parts is None
    assert backend.make_linear(Dense(weight[:40, :1000])).parts is None, "the inputs are few"
    assert CudaBackend(FLOAT32, CPU).make_linear(Dense(weight[:40].float())).parts is None
    narrow, part = backend.make_linear(Dense(weight[:96])), backend.make_linear(Dense(weight[32:64]), whole_n=96)
    assert narrow.parts == part.parts == SplitK(768, 66)
    x = randn(2, 1096, seed=2).bfloat16()
    assert torch.equal(narrow.logits(x)[:, 32:64], part.logits(x))
    assert "132 multiprocessors" in backend.arithmetic


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
def test_other_gates(activation: str) -> None:
    assert has_held(
        check_linear(
            CudaBackend(BFLOAT16, CPU),
            "none",
            LinearCase(3, 40, 32, activation=activation, has_bias=True, has_residual=True),
        )
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        (FLOAT32, AttentionCase(Heads(4, 2, 32), (5, 20), (1, 9))),
        (FLOAT16, AttentionCase(Heads(4, 2, 32), (5, 20), (1, 9), kv_group=8, norm="heads")),
        (BFLOAT16, AttentionCase(Heads(3, 1, 24, 16), (13, 9), (1, 8), window=6, norm="heads")),
        (BFLOAT16, AttentionCase(Heads(3, 1, 24, 16, norms_after_rotation=True), (13, 9), (1, 8), norm="heads")),
        (BFLOAT16, AttentionCase(Heads(4, 2, 32), (11, 18), (3, 1), kv_group=8, norm="joint", scores=Scores(0.3, 5.0))),
        (BFLOAT16, AttentionCase(Heads(3, 2, 16, per_kv_head=3, num_before=2), (70, 20), (1, 9), has_sinks=True)),
        (BFLOAT16, AttentionCase(Heads(2, 1, 16), (131,), (1,))),
        (FLOAT32, AttentionCase(Heads(2, 1, 16, kv_projections=1, has_value_norm=True), (9, 20), (3, 1))),
        (FLOAT32, AttentionCase(NORMED_LAST, (9, 20), (3, 1), norm="heads")),
        (BFLOAT16, AttentionCase(Heads(2, 1, 512, has_value_norm=True), (20,), (3,), kv_group=64, norm="heads")),
        (FLOAT32, AttentionCase(Heads(4, 2, 16), (5, 24), (1, 20))),
        (BFLOAT16, AttentionCase(Heads(4, 1, 16), (30, 80), (17, 3), window=40)),
        (FLOAT32, AttentionCase(Heads(4, 2, 16), (5, 131, 24), (1, 1, 20), window=40, has_sinks=True)),
    ],
)
def test_attention(dtype: torch.dtype, case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step and in two; single tokens beside others and beside chunks; over more than one
    range, and over more than there are programs.
    """
    monkeypatch.setattr(attention_module, "RANGE", 64)
    monkeypatch.setattr(attention_module, "SPLITS", 2)
    assert has_held(check_attention(CudaBackend(dtype, CPU), case))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "last", "group"), [(FLOAT32, 1, 0), (BFLOAT16, 18, 8)])
def test_attention_over_blocks_that_are_tokens_in_part(
    dtype: torch.dtype, last: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "RANGE", 64)
    monkeypatch.setattr(attention_module, "SPLITS", 2)
    assert has_held(check_holes(CudaBackend(dtype, CPU), Heads(2, 1, 16), (16, 3, 16, 1, 16, 16), last, group))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "window", "group"), [(FLOAT32, None, 0), (BFLOAT16, 30, 8)])
def test_attention_of_spans_that_see_each_other(
    dtype: torch.dtype, window: int | None, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "RANGE", 64)
    monkeypatch.setattr(attention_module, "SPLITS", 2)
    assert has_held(check_spans(CudaBackend(dtype, CPU), Heads(2, 1, 32), window, group))


@pytest.mark.parametrize(("dtype", "has_norm"), [(FLOAT32, True), (BFLOAT16, False)])
def test_adding_to_the_residual(dtype: torch.dtype, has_norm: bool) -> None:
    assert has_held(check_rows(CudaBackend(dtype, CPU), 3, 100, has_norm=has_norm, multiplier=0.22))


@pytest.mark.parametrize(("vocab_size", "k"), [(70, 1), (20, 20), (70, 10)])
def test_the_search_for_candidates(vocab_size: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk and in several."""
    monkeypatch.setattr(search_module, "CHUNK", 32)
    monkeypatch.setattr(search_module, "KEPT", (2,))
    assert has_held(check_search(CudaBackend(BFLOAT16, CPU), 2, vocab_size, k))


def test_the_draws_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mass of all in several parts."""
    monkeypatch.setattr(search_module, "PART", 64)
    monkeypatch.setattr(search_module, "BLOCK", 32)
    assert has_held(check_draws(CudaBackend(BFLOAT16, CPU), 9, 250))


def test_edits_of_several_rows() -> None:
    assert check_edits(CudaBackend(BFLOAT16, CPU), 3, 1260).holds


def test_a_nan_that_a_mask_leaves_out_stays_one() -> None:
    logits = torch.full((1, 70), torch.nan)
    CudaRowSearch().ban(logits, np.zeros(1, np.int64), [np.zeros(12, np.uint8)])
    assert logits.isnan().all()


def test_finishing_logits() -> None:
    assert has_held(check_logits(CudaBackend(BFLOAT16, CPU), 3, 500))


@pytest.mark.parametrize("quantization", ["none", "w8a8", "w4"])
def test_a_nan_of_a_row_is_all_that_comes_of_it(quantization: str) -> None:
    backend = CudaBackend(BFLOAT16, CPU)
    layer = backend.make_linear(
        Dense(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()),
        quantization=quantization,
        group=32,
    )
    x = torch.ones(3, 64).bfloat16()
    x[1, 40] = torch.nan
    found = layer(x)
    assert found[1].isnan().all() and torch.isfinite(found[[0, 2]].float()).all()


def test_tables_of_even_steps_are_counted_and_others_are_looked_up() -> None:
    assert read_table(torch.arange(-8, 8, dtype=torch.int8))[0] == -8
    first, words = read_table(torch.tensor(NF4_TABLE, dtype=torch.int8))
    assert first is None
    assert [value for word in words for value in memoryview(word.to_bytes(8, "little", signed=True)).cast("b")] == list(
        NF4_TABLE
    )


def test_what_no_kernel_reads_is_widened() -> None:
    """Groups of 16 inputs; and anything quantized, in float32."""
    codes = torch.randint(-9, 9, (8, 32), dtype=torch.int8)
    narrow = Grouped(codes, torch.ones(8, 2).half(), 16)
    assert not CudaBackend(BFLOAT16, CPU).is_kept(narrow) and not CudaBackend(FLOAT32, CPU).is_kept(
        Grouped(codes, torch.ones(8, 1).half(), 32)
    )
    layer = CudaBackend(BFLOAT16, CPU).make_linear(narrow)
    assert isinstance(layer, CudaLinear) and torch.equal(layer.weight, codes.bfloat16())


def test_what_can_not_run_is_refused_in_one_line() -> None:
    backend = CudaBackend(FLOAT32, CPU)
    with pytest.raises(StartupError, match="--quantization w4 needs --dtype bfloat16 or float16"):
        backend.make_linear(Dense(torch.eye(32)), quantization="w4")
    with pytest.raises(StartupError, match="packed for the CPU's kernels"):
        backend.restore_linear({}, 32, 32, is_gated=False, has_bias=False, activation="silu")
    with pytest.raises(StartupError, match="heads of 1024 dimensions"):
        backend.make_attention(Heads(2, 2, 1024))
    with pytest.raises(StartupError, match="can't be divided into groups of 20"):
        backend.make_kv_layer(1, 16, 1, 20, group=20)


@triton.jit  # type: ignore[untyped-decorator]
def find_ranges(positions_ptr, numbers_ptr, starts_ptr, COUNT: tl.constexpr, RANGE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    numbers = kernels.range_of(tl.load(positions_ptr + at), RANGE)
    tl.store(numbers_ptr + at, numbers)
    tl.store(starts_ptr + at, kernels.range_start(numbers, RANGE))


def test_ranges_have_one_length_and_then_double() -> None:
    """16 of 512 positions, 8 of 1,024, 8 of 2,048, up to the last position there can be."""
    lengths = [512] * 16 + [512 << doublings for doublings in range(1, 18) for _ in range(8)]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    positions = [
        start + offset for start, length in zip(starts, lengths, strict=True) for offset in (0, length // 2, length - 1)
    ]
    positions += [0] * (512 - len(positions))
    found, begin = torch.zeros(2, 512, dtype=torch.int32)
    find_ranges[(1,)](torch.tensor(positions, dtype=torch.int32), found, begin, COUNT=512, RANGE=512)
    expected = [number for number in range(len(lengths)) for _ in range(3)]
    assert (
        found[: len(expected)].tolist()
        == expected
        == [attention_module.count_ranges(each + 1) - 1 for each in positions[: len(expected)]]
    )
    assert begin[: len(expected)].tolist() == [starts[number] for number in expected]
    assert attention_module.count_ranges(131_072) == 48


@pytest.mark.parametrize("group", [0, 8])
def test_blocks_are_copied_in_all_layers_one_after_the_other(group: int) -> None:
    """Some are copied to after they were copied from."""
    backend, copies = CudaBackend(BFLOAT16, CPU), [(0, 3), (0, 4), (2, 0), (5, 2)]
    layers = [backend.make_kv_layer(6, 16, 3, 8, group=group) for _ in range(3)]
    for layer in layers:
        layer.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(1))
    expected = [layer[:, [2, 1, 5, 0, 0, 5]].clone() for layer in layers]
    backend.copy_blocks(layers, copies)
    assert all(
        torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        for found, wanted in zip(layers, expected, strict=True)
    )
    others = [layer.clone() for layer in layers]
    TORCH.copy_blocks(others, copies[:1])
    backend.copy_blocks(layers, copies[:1])
    assert all(
        torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        for found, wanted in zip(layers, others, strict=True)
    )
