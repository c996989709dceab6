"""Native kernels: against their torch references, on every instruction set of this machine; and a
row's bits do not depend on other rows.
"""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.backends.cpu.attention import NativeAttention
from services.compute.backends.cpu.linear import NativeLinear, NativeMlp
from services.compute.backends.matrix import Dense
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.backends.torch.linear import QuantizedTorchLinear, TorchLinear, TorchMlp
from services.compute.backends.torch.reference import (
    Scores,
    kv_row_size,
    norm_heads,
    quantize_weight,
    read_kv,
    rms_norm,
    rotary,
    write_kv,
)
from services.compute.backends.torch.row_math import TorchRowMath
from services.operator.cli import main
from shared.model.files import DEMO_MODEL
from shared.process.errors import StartupError
from tests.examples import examples
from tests.kernels.backends import native_backend
from tests.kernels.families import Engine
from tests.kernels.slabs import from_slabs, to_slabs

pytestmark = pytest.mark.usefixtures("instruction_set")
EPS = 1e-6
MODES = ("none", "w8a8", "w4", "nf4")


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the root of the mean square."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def native(weight: torch.Tensor, bias: torch.Tensor | None, mode: str, *, group: int = 64, **gate: Any) -> NativeLinear:
    """gate: is_gated and activation."""
    return native_backend().make_linear(Dense(weight), bias, quantization=mode, group=group, **gate)


def torch_linear(
    mode: str, weight: torch.Tensor, bias: torch.Tensor | None, *, group: int = 64, **gate: Any
) -> TorchLinear:
    """The reference, in float32 where the arithmetic is in floating point."""
    if mode != "none":
        return QuantizedTorchLinear(quantize_weight(weight, mode, group), bias, **gate)
    return TorchLinear(weight.float(), bias.float() if bias is not None else None, **gate)


@pytest.mark.parametrize("mode", MODES)
@given(
    rows=st.integers(1, 70),
    n=st.integers(1, 200),
    k=st.integers(1, 300),
    group=st.sampled_from([32, 64, 128]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    seed=st.integers(0, 99),
)
@examples(40)
def test_linear_layers(
    mode: str, rows: int, n: int, k: int, group: int, has_bias: bool, has_residual: bool, seed: int
) -> None:
    x, weight = randn(rows, k, seed=seed), randn(n, k, seed=seed + 1, scale=0.1)
    bias = randn(n, seed=seed + 2) if has_bias else None
    residual = randn(rows, n, seed=seed + 3) if has_residual else None
    layer = native(weight, bias, mode, group=group)
    found = layer(x, residual=residual)
    expected = torch_linear(mode, weight, bias, group=group)(
        x.float(), residual=residual.float() if residual is not None else None
    )
    assert error(found, expected) < 4e-3
    alone = torch.cat(
        [
            layer(x[row : row + 1], residual=residual[row : row + 1] if residual is not None else None)
            for row in range(rows)
        ]
    )
    assert torch.equal(found, alone)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "n", "k"), [(300, 40, 9000), (530, 70, 5000)])
def test_many_long_rows(mode: str, rows: int, n: int, k: int) -> None:
    """They are multiplied in several panels, and in bf16 and int8 in parts, whose sums go on from
    the part before: the same bits as alone.
    """
    x, weight, bias = randn(rows, k), randn(n, k, seed=1, scale=0.1), randn(n, seed=2)
    layer = native(weight, bias, mode)
    found = layer(x)
    assert error(found, torch_linear(mode, weight, bias)(x.float())) < 4e-3
    some = [0, 31, 32, 159, 160, 255, 256, 299, rows - 1]
    assert torch.equal(found[some], torch.cat([layer(x[row : row + 1]) for row in some]))
    assert torch.equal(found[:33], layer(x[:33]))
    assert layer(x[:0]).shape == (0, n)


@pytest.mark.pairwise
@pytest.mark.parametrize(("mode", "bound"), [("none", 6e-3), ("w8a8", 2.5e-2), ("w4", 2.5e-2), ("nf4", 2.5e-2)])
@pytest.mark.parametrize(("rows", "hidden", "inter"), [(1, 64, 112), (7, 96, 200), (33, 896, 1000), (130, 256, 768)])
def test_normalized_and_gated_layers(mode: str, bound: float, rows: int, hidden: int, inter: int) -> None:
    x, norm = randn(rows, hidden), (1 + randn(hidden, seed=1) * 0.1).bfloat16()
    gate_up, down = randn(2 * inter, hidden, seed=2, scale=0.1), randn(hidden, inter, seed=3, scale=0.1)
    head = native(gate_up, None, mode)
    logits = head.logits(x, norm=norm, eps=EPS)
    normed = rms_norm(x, norm, EPS)
    assert logits.dtype == torch.float32
    assert error(logits, torch_linear(mode, gate_up, None)(normed.float())) < bound
    mlp = NativeMlp(native(gate_up, None, mode, is_gated=True), native(down, None, mode))
    found = mlp(x, norm=norm, eps=EPS)
    reference = TorchMlp(torch_linear(mode, gate_up, None, is_gated=True), torch_linear(mode, down, None))
    assert error(found, reference(x.float(), norm=norm.float(), eps=EPS)) < bound
    assert torch.equal(found, torch.cat([mlp(x[row : row + 1], norm=norm, eps=EPS) for row in range(rows)]))


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "hidden", "inter"), [(1, 64, 112), (33, 96, 200)])
def test_an_mlp_with_gelu_and_no_norm_or_residual(mode: str, rows: int, hidden: int, inter: int) -> None:
    """Also far out, where GELU is its input, or 0."""
    x, gate_up, down = (
        randn(rows, hidden, scale=20.0),
        randn(2 * inter, hidden, seed=2, scale=0.1),
        randn(hidden, inter, seed=3, scale=0.1),
    )
    gate = {"is_gated": True, "activation": "gelu_tanh"}
    layer = native(gate_up, None, mode, **gate)
    reference = torch_linear(mode, gate_up, None, **gate)
    assert error(layer(x), reference(x.float())) < 5e-3
    mlp, reference_mlp = NativeMlp(layer, native(down, None, mode)), TorchMlp(reference, torch_linear(mode, down, None))
    found = mlp(x, norm=None, eps=EPS, has_residual=False)
    assert error(found, reference_mlp(x.float(), norm=None, eps=EPS, has_residual=False)) < (
        6e-3 if mode == "none" else 2.5e-2
    )
    assert torch.equal(
        found, torch.cat([mlp(x[row : row + 1], norm=None, eps=EPS, has_residual=False) for row in range(rows)])
    )


@given(
    rows=st.integers(1, 40),
    hidden=st.integers(1, 300),
    has_norm=st.booleans(),
    multiplier=st.sampled_from([1.0, 0.22]),
    seed=st.integers(0, 99),
)
@examples(60)
def test_adding_to_the_residual(rows: int, hidden: int, has_norm: bool, multiplier: float, seed: int) -> None:
    x, h, norm = (
        randn(rows, hidden, seed=seed),
        randn(rows, hidden, seed=seed + 1, scale=3.0),
        randn(hidden, seed=seed + 2) if has_norm else None,
    )
    native_math = native_backend().row_math
    found = native_math.add(x, h, norm=norm, eps=EPS, multiplier=multiplier)
    expected = TorchRowMath().add(
        x.double(), h.double(), norm=norm.double() if norm is not None else None, eps=EPS, multiplier=multiplier
    )
    # the result is rounded once, and so is a normalized value before its weight
    assert torch.all((found - expected).abs() <= 1.01 * 2**-8 * (expected.abs() + (expected - x.double()).abs()))
    alone = [
        native_math.add(x[row : row + 1], h[row : row + 1], norm=norm, eps=EPS, multiplier=multiplier)
        for row in range(rows)
    ]
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (9, 300), (40, 33)])
def test_a_norm_by_itself_is_what_a_layer_does_before_it_multiplies(rows: int, hidden: int) -> None:
    backend = native_backend()
    x, weight, layer = (
        randn(rows, hidden, scale=3.0),
        (1 + randn(hidden, seed=1) * 0.1).bfloat16(),
        backend.make_linear(Dense(randn(70, hidden, seed=2))),
    )
    found = backend.row_math.norm(x, weight=weight, eps=EPS)
    assert error(found, rms_norm(x.double(), weight.double(), EPS)) < 4e-3
    assert torch.equal(layer(found), layer(x, norm=weight, eps=EPS))


@given(
    rows=st.integers(1, 9),
    vocab=st.integers(1, 30_000),
    multiplier=st.sampled_from([1.0, 0.125]),
    cap=st.sampled_from([0.0, 30.0]),
    seed=st.integers(0, 9),
)
@examples(30)
def test_finishing_logits(rows: int, vocab: int, multiplier: float, cap: float, seed: int) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 60
    expected = TorchRowMath().finish_logits(logits.double(), multiplier=multiplier, cap=cap)
    finish = native_backend().row_math.finish_logits
    found = [finish(each, multiplier=multiplier, cap=cap) for each in (logits.clone(), logits[-1:].clone())]
    torch.testing.assert_close(found[0].double(), expected, atol=1e-5, rtol=1e-6)
    assert torch.equal(found[0][-1:], found[1])


def exact_attention(
    heads: Heads,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    scores_of: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """In float64. q: [n, heads, d]; k, v: [context, kv_heads, d]; positions: [n]; sinks: [heads].
    Returns [n, heads * d].
    """
    here = slice(heads.num_before, heads.num_before + heads.num_heads)
    k, v = (each.double().repeat_interleave(heads.sharing, 1)[:, here] for each in (k, v))
    scores = torch.einsum("nhd,chd->hnc", q.double(), k) * scores_of.scale
    if scores_of.cap:
        scores = scores_of.cap * torch.tanh(scores / scores_of.cap)
    keys = torch.arange(len(k))[None, :]
    is_seen = keys <= positions[:, None]
    if window is not None:
        is_seen &= keys > positions[:, None] - window
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hnc,chd->nhd", scores.softmax(-1)[..., : len(k)], v).flatten(1)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("group", "scores", "spread"),
    [(0, None, 0), (0, Scores(0.3, 5.0), 3), (8, None, 40), (32, Scores(0.3, 5.0), 0), (0, None, 2)],
)
@pytest.mark.parametrize(
    ("heads", "block_size", "window", "contexts", "lengths"),
    [
        (Heads(14, 2, 64), 16, None, [5, 33, 100, 2500], [1, 33, 7, 1]),
        (Heads(4, 4, 32), 32, 20, [50, 17, 64], [50, 1, 3]),
        (Heads(9, 3, 64), 16, None, [530, 17, 31, 48], [1, 2, 31, 48]),
        (Heads(5, 2, 64, per_kv_head=3), 16, None, [530, 17, 31, 48], [1, 2, 31, 48]),
        (Heads(4, 3, 64, per_kv_head=2, num_before=1), 16, 700, [2100, 1500], [2, 150]),
        (Heads(5, 3, 32, per_kv_head=3, num_before=2), 16, None, [5 + 3 * number for number in range(33)], [1] * 33),
        (Heads(1, 1, 64, per_kv_head=7, num_before=3), 16, 20, [3000, 40], [1, 9]),
        (Heads(32, 8, 128), 16, None, [3000], [1]),
        (Heads(8, 1, 96), 16, 700, [2100, 1500], [2, 150]),
        (Heads(16, 8, 256), 16, None, [5 + 3 * number for number in range(33)], [1] * 33),
        (Heads(9, 9, 256), 16, None, [40] * 33, [1] * 33),
        (Heads(16, 2, 512), 16, None, [1100, 40, 90], [1, 9, 90]),
    ],
)
def test_attention(
    heads: Heads,
    block_size: int,
    window: int | None,
    contexts: list[int],
    lengths: list[int],
    group: int,
    scores: Scores | None,
    spread: int,
) -> None:
    """Over a cache that holds the context already; with angles of 0 nothing rotates, and the step's
    own K and V come from qkv. spread: of sinks.
    """
    dim, num_heads = heads.head_dim, heads.num_heads
    counts = [-(-context // block_size) for context in contexts]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)).tolist()
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    kv = torch.stack([randn(sum(counts), heads.num_kv_heads, block_size, dim, seed=seed) for seed in (6, 7)])
    if group:
        quantized = torch.zeros(*kv.shape[:-1], kv_row_size(dim, group), dtype=torch.uint8)
        keys, values = (each.transpose(1, 2).flatten(0, 1) for each in kv)
        write_kv(quantized, keys, values, torch.arange(sum(counts) * block_size))
        kv = quantized
    for table, context in zip(tables, contexts, strict=True):  # what others left there is no number
        kv[:, table[-1], :, (context - 1) % block_size + 1 :] = 0xFF if group else torch.nan
    native = to_slabs(kv, dim)
    num_tokens = sum(lengths)
    qkv = randn(num_tokens, (num_heads + 2 * heads.num_kv_heads) * dim, seed=8)
    starts = [0, *accumulate(lengths)]
    positions = [torch.arange(context - length, context) for context, length in zip(contexts, lengths, strict=True)]
    slots = torch.cat(
        [
            torch.tensor(table)[at // block_size] * block_size + at % block_size
            for table, at in zip(tables, positions, strict=True)
        ]
    )

    def inputs(which: list[int], lens: list[int], ends: list[int], rows: slice) -> AttentionInputs:
        count = rows.stop - rows.start
        return AttentionInputs(
            lens,
            ends,
            [tuple(tables[each]) for each in which],
            slots[rows],
            ((torch.ones(count, dim // 2), torch.zeros(count, dim // 2)),),
        )

    attention = native_backend().make_attention(heads, scores)
    assert isinstance(attention, NativeAttention)
    sinks = randn(num_heads, seed=9).float() * spread if spread else None
    everything = inputs(list(range(len(contexts))), lengths, contexts, slice(0, num_tokens))
    found = attention(
        qkv.clone(),
        native,
        attention.plan(everything, block_size),
        window=window,
        norms=(None, None),
        eps=EPS,
        sinks=sinks,
    ).clone()
    kv = from_slabs(native, dim)
    for number, table in enumerate(tables):
        rows = slice(starts[number], starts[number + 1])
        k, v = (
            read_kv(kv[which][torch.tensor(table)], dim, torch.bfloat16)
            .transpose(1, 2)
            .flatten(0, 1)[: contexts[number]]
            for which in (0, 1)
        )
        q = qkv[rows, : num_heads * dim].view(-1, num_heads, dim)
        assert (
            error(found[rows], exact_attention(heads, q, k, v, positions[number], window, attention.scores, sinks))
            < 5e-3
        )
        for row in range(rows.start, rows.stop, 7):
            end = int(positions[number][row - rows.start]) + 1
            one = inputs([number], [1], [end], slice(row, row + 1))
            alone = attention(
                qkv[row : row + 1].clone(),
                native,
                attention.plan(one, block_size),
                window=window,
                norms=(None, None),
                eps=EPS,
                sinks=sinks,
            )
            assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("group", [0, 32])
def test_gated_attention(group: int) -> None:
    """Attention without the gate, times the gate's sigmoid: of a step of several sequences, and of a row
    alone.
    """
    plain, tokens = Heads(6, 2, 256, 64), 37
    gated = Heads(6, 2, 256, 64, has_gate=True)
    qkv, gate = randn(tokens, 10 * 256, seed=1), randn(tokens, 6 * 256, seed=2, scale=4.0)
    angles = torch.rand(tokens, 32, generator=torch.Generator().manual_seed(1)) * 6
    rotary_tables = angles.cos(), angles.sin()
    row_size = kv_row_size(256, group) if group else 256
    kv = torch.zeros(2, 4, 2, 16, row_size, dtype=torch.uint8 if group else torch.bfloat16)

    def run(heads: Heads, rows: torch.Tensor, kv: torch.Tensor, first: int = 0) -> torch.Tensor:
        attention, count = native_backend().make_attention(heads), len(rows)
        lens, ends = ([20, count - 20], [20, count - 20]) if count > 1 else ([1], [first - 19])
        of_second = (2, 3)
        slots = torch.tensor([at if at < 20 else 32 + at - 20 for at in range(first, first + count)])
        ropes = (tuple(table[first : first + count] for table in rotary_tables),)
        inputs = AttentionInputs(lens, ends, [(0, 1), of_second] if count > 1 else [of_second], slots, ropes)
        plan = attention.plan(inputs, 16)
        return attention(rows.clone(), kv, plan, window=None, norms=(None, None), eps=EPS).clone()

    native = to_slabs(kv, 256)
    expected = run(plain, qkv, native.clone()).double() * gate.double().sigmoid()
    found = run(gated, torch.cat([qkv, gate], 1), native)
    assert error(found, expected) < 4e-3
    assert torch.equal(run(gated, torch.cat([qkv, gate], 1)[-1:], native, tokens - 1), found[-1:])


@pytest.mark.parametrize("quantization", MODES)
def test_a_nan_of_a_row_is_all_that_comes_of_it(quantization: str) -> None:
    """Gated, and then down: of the row as it comes, and of what is between. Others stay numbers."""
    backend = native_backend()
    gate_up = backend.make_linear(Dense(randn(512, 256)), quantization=quantization, is_gated=True)
    mlp = backend.make_mlp(gate_up, backend.make_linear(Dense(randn(256, 256, seed=3)), quantization=quantization))
    for column in (0, 15, 16, 255):
        x = randn(20, 256, seed=4)
        x[3, column] = torch.nan
        found = mlp(x, norm=None, eps=EPS, has_residual=False)
        assert found[3].isnan().all() and torch.isfinite(found[torch.arange(20) != 3].float()).all(), column


@pytest.mark.pairwise
@pytest.mark.parametrize("group", [0, 8, 64])
@pytest.mark.parametrize("norm_heads_of", [None, (1, 1), (6, 2)])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotation_and_the_way_into_the_cache(
    norm_heads_of: tuple[int, int] | None, group: int, rotary_dim: int
) -> None:
    """Without a norm, with one of each head, and with one of all heads together; of all dimensions,
    and of the first.
    """
    check_rotation(Heads(6, 2, 64, rotary_dim), norm_heads_of, group)


@pytest.mark.parametrize(("group", "rotary_dim"), [(0, 64), (8, 32)])
@pytest.mark.parametrize("are_keys_values", [False, True])
@pytest.mark.parametrize("is_after", [False, True])
def test_norms_before_and_after_the_rotation(
    is_after: bool, are_keys_values: bool, group: int, rotary_dim: int
) -> None:
    """And where keys are also the values, which then have neither the keys' norm nor the rotation."""
    heads = Heads(6, 2, 64, rotary_dim, norms_after_rotation=is_after)
    if are_keys_values:
        heads = replace(heads, kv_projections=1, has_value_norm=True)
    check_rotation(heads, (1, 1), group)


def check_rotation(heads: Heads, norm_heads_of: tuple[int, int] | None, group: int) -> None:
    """norm_heads_of: whose norms the weights of q and of k are."""
    tokens, rotary_dim = 9, heads.rotary_dim or heads.head_dim
    qkv = randn(tokens, heads.num_projected * 64)
    angles = torch.rand(tokens, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(2))[:tokens]
    norms = (
        tuple((1 + randn(64 * count, seed=count) * 0.1).bfloat16() for count in norm_heads_of)
        if norm_heads_of is not None
        else (None, None)
    )
    kv = (
        torch.zeros(2, 4, 2, 16, kv_row_size(64, group), dtype=torch.uint8)
        if group
        else torch.zeros(2, 4, 2, 16, 64).bfloat16()
    )
    expected = kv.clone()
    q, k, v = qkv.view(tokens, -1, 64).tensor_split([6, 8], dim=1)
    v = k if heads.kv_projections == 1 else v
    v = rms_norm(v, None, EPS) if heads.has_value_norm else v
    if not heads.norms_after_rotation:
        q, k = norm_heads(q, norms[0], EPS), norm_heads(k, norms[1], EPS)
    q, k = (rotary(each, angles.cos()[:, None], angles.sin()[:, None]) for each in (q, k))
    if heads.norms_after_rotation:
        q, k = norm_heads(q, norms[0], EPS), norm_heads(k, norms[1], EPS)
    attention = native_backend().make_attention(heads)
    inputs = AttentionInputs(
        [1] * tokens, [1] * tokens, [(int(slot) // 16,) for slot in slots], slots, ((angles.cos(), angles.sin()),)
    )
    changed, native = qkv.clone(), to_slabs(kv, 64)
    attention(changed, native, attention.plan(inputs, 16), window=None, norms=norms, eps=EPS)
    torch.testing.assert_close(changed.view(tokens, -1, 64)[:, :6], q)
    write_kv(expected, k, v, slots)
    kv = from_slabs(native, 64)
    found, wanted = read_kv(kv, 64, torch.bfloat16), read_kv(expected, 64, torch.bfloat16)
    torch.testing.assert_close(found, wanted)
    assert (kv != expected).float().mean() < 0.01  # torch may round a tie of a rotation otherwise


@given(vocab=st.integers(1, 9000), rows=st.integers(1, 5), wanted=st.integers(1, 300), seed=st.integers(0, 99))
@examples(60)
def test_the_largest_logits_and_the_mass_of_all(vocab: int, rows: int, wanted: int, seed: int) -> None:
    """Values are rounded, so that many are tied. A row's results are the same alone."""
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 16).round() / 4
    logits[0, vocab // 2 :] = -torch.inf
    logits[0, 0] = 1.0
    k = min(wanted, vocab)
    search = native_backend().row_search
    values, ids = search.find_largest(logits, k)
    expected_values, order = logits.sort(dim=-1, descending=True, stable=True)
    assert values.tolist() == expected_values[:, :k].tolist()
    assert ids.tolist() == order[:, :k].tolist()
    which, largest, temperatures = (
        np.arange(rows)[::-1].copy(),
        values[::-1, 0].copy(),
        np.linspace(0.3, 2.0, rows, dtype=np.float32),
    )
    masses = search.total_masses(logits, which, largest, temperatures)
    exact = [
        ((logits[row].double() - float(largest[at])) / float(temperatures[at])).exp().sum().item()
        for at, row in enumerate(which)
    ]
    np.testing.assert_allclose(masses, exact, rtol=3e-6)  # exponents are rounded to float32
    for at in range(rows):
        assert (
            search.total_masses(logits, which[at : at + 1], largest[at : at + 1], temperatures[at : at + 1])[0]
            == masses[at]
        )


@pytest.mark.sampled(2)
def test_the_modes_agree_with_float32(tmp_path: Path) -> None:
    """The demo model's own answers survive quantization."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    texts = ["What is a KV cache?", "What is Penstock?", "What is continuous batching?", "What is a block table?"]
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )
        for text in texts
    ]
    expected = Engine(DEMO_MODEL).generate(prompts, 40, eos=1)
    for quantization in MODES:
        assert (
            Engine(DEMO_MODEL, dtype=torch.bfloat16, quantization=quantization).generate(prompts, 40, eos=1) == expected
        )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("quantization", "options"), [("w8a8", {}), ("w4", {}), ("nf4", {"attention_output": True, "lm_head": True})]
)
def test_a_quantized_checkpoint_is_the_same_model(
    quantization: str, options: dict[str, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[5, 6, 7], list(range(40, 90))]
    at_load = Engine(DEMO_MODEL, dtype=torch.bfloat16, quantization=quantization, **options)
    expected = at_load.generate(prompts, 12)
    assert (
        main(
            [
                "quantize",
                "demo",
                str(tmp_path),
                "--quantization",
                quantization,
                *(["--attention-output", "--lm-head"] if options else []),
            ]
        )
        == 0
    )
    from_file = Engine(tmp_path, dtype=torch.bfloat16)
    assert from_file.generate(prompts, 12) == expected
    for number in range(len(prompts)):
        assert torch.equal(torch.stack(from_file.logits[number]), torch.stack(at_load.logits[number]))
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < (0.9 if quantization == "w8a8" else 0.75) * (DEMO_MODEL / "model.safetensors").stat().st_size
    capsys.readouterr()
    for arguments, message in (
        (["quantize", str(tmp_path), str(tmp_path / "twice")], "is quantized already"),
        (["quantize", "demo", str(DEMO_MODEL)], "of its own"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(StartupError, match="packed for the native kernels"):
        Engine(tmp_path, dtype=torch.float32)
    with pytest.raises(StartupError, match="quantized already"):
        Engine(tmp_path, dtype=torch.bfloat16, quantization="nf4" if quantization != "nf4" else "w4")
    if quantization == "w8a8":  # all of it has eight bits: the options are of four
        assert (
            Engine(tmp_path, dtype=torch.bfloat16, attention_output=True, lm_head=True).generate(prompts, 12)
            == expected
        )
    elif not options:
        with pytest.raises(StartupError, match="quantized already, without it"):
            Engine(tmp_path, dtype=torch.bfloat16, attention_output=True)
        with pytest.raises(StartupError, match="--quantize-lm-head: .* quantized already, without it"):
            Engine(tmp_path, dtype=torch.bfloat16, lm_head=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["intermediate_size"] += 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="its parts have other shapes"):
        Engine(tmp_path, dtype=torch.bfloat16)
