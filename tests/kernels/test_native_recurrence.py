"""Recurrent layers in native code: against their formulas in float64, and bit for bit among all ways to
come through a sequence.
"""

import ctypes
import math
import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from services.compute.backends.backend import LayerCache, LayerWeights, Linear, Norms
from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.cpu.library import RecurrenceArguments, RecurrentPointers, pointer
from services.compute.backends.cpu.recurrent import NativeRecurrence
from services.compute.backends.matrix import Dense
from services.compute.backends.torch.recurrent import (
    RecurrenceConfig,
    RecurrentWeights,
    StateLayer,
    StateRows,
    TorchRecurrence,
)
from services.compute.models.config import ModelConfig
from services.compute.models.decoder import Decoder, ForwardBatch, ModelWeights
from services.compute.models.rope import Rope
from tests.kernels.backends import CPU, native_backend

pytestmark = pytest.mark.usefixtures("instruction_set")
EPS = 1e-6
KINDS = ("delta", "channel_delta", "mamba2", "convolution")  # by their numbers in kernels.h


def rand(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Sizes:
    kind: str
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    norm_heads: int = 1  # whose values have one norm; 0: there is no norm
    is_gated_first: bool = False
    has_sigmoid_gate: bool = False
    steps: tuple[float, float] = (0.0, math.inf)
    has_bias: bool = False
    is_tiled: bool = False

    @property
    def inner(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        return self.inner + (2 * self.key_heads * self.key_dim if self.kind != "convolution" else 0)

    @property
    def logged(self) -> int:
        scalars = {"delta": 2, "channel_delta": 1 + self.key_dim, "mamba2": 1, "convolution": 0}
        return self.channels + self.heads * scalars[self.kind]

    @property
    def width(self) -> int:
        return 3 * self.channels if self.kind == "convolution" else self.logged + self.inner


@dataclass
class Made:
    """A layer's weights, and slots full of NaN, as if others had left them."""

    sizes: Sizes
    num_slots: int
    ring: int
    weights: dict[str, torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.sizes
        num_biases = sizes.heads * (sizes.key_dim if sizes.kind == "channel_delta" else 1)
        self.weights = {
            "convolution": rand(sizes.kernel, sizes.channels, seed=1, scale=0.5),
            "convolution_bias": rand(sizes.channels, seed=2, scale=0.3) if sizes.has_bias else None,
            "decay": -rand(sizes.heads, seed=3).exp(),
            "step_bias": rand(num_biases, seed=4) - 1.0,
            "skip": rand(sizes.heads, seed=5) if sizes.kind == "mamba2" else None,
            "norm": 1 + rand(sizes.value_dim * max(1, sizes.norm_heads), seed=6, scale=0.2)
            if sizes.norm_heads
            else None,
        }
        if sizes.norm_heads > 1:
            self.weights["norm"] = 1 + rand(sizes.inner, seed=6, scale=0.2)
        self.states = torch.full((self.num_slots, sizes.heads, sizes.key_dim, sizes.value_dim), torch.nan)
        self.inputs = torch.full((self.num_slots, self.ring, sizes.logged), torch.nan, dtype=torch.bfloat16)

    def step(self, rows: StateRows, projected: list[torch.Tensor]) -> list[torch.Tensor]:
        """projected: of each sequence's tokens. Returns the results of each."""
        sizes, context = self.sizes, native_backend().context
        joined = torch.cat(projected).contiguous()
        starts = torch.tensor([0, *torch.tensor(rows.query_lens).cumsum(0).tolist()])
        numbers = [torch.tensor(each) for each in (rows.starts, rows.slots, rows.num_folded, rows.fold_to)]
        out = torch.empty(len(joined), sizes.inner + 16, dtype=torch.bfloat16)  # with other columns behind
        norm = self.weights["norm"]
        arguments = RecurrenceArguments(
            KINDS.index(sizes.kind),
            sizes.heads,
            sizes.key_heads,
            sizes.is_tiled,
            sizes.key_dim,
            sizes.value_dim,
            sizes.kernel,
            sizes.value_dim * max(1, sizes.norm_heads),
            0 if norm is None else len(norm),
            sizes.is_gated_first,
            sizes.has_sigmoid_gate,
            *sizes.steps,
            EPS,
            starts.data_ptr(),
            *(each.data_ptr() for each in numbers),
            len(rows.slots),
            joined.data_ptr(),
            out.data_ptr(),
            out.shape[1],
            RecurrentPointers(
                self.states.data_ptr(), self.inputs.data_ptr(), self.ring, *map(pointer, self.weights.values())
            ),
        )
        context.recurrence(ctypes.byref(arguments))
        return list(out[:, : sizes.inner].split(rows.query_lens))


def exact(made: Made, projected: torch.Tensor) -> torch.Tensor:
    """A sequence's results, in float64. projected: [T, width]. Returns [T, inner]."""
    sizes = made.sizes
    weights = {name: None if each is None else each.double() for name, each in made.weights.items()}
    rows, count = projected.double(), len(projected)

    def convolve(x: torch.Tensor) -> torch.Tensor:
        taps, bias = weights["convolution"], weights["convolution_bias"]
        assert taps is not None
        padded = F.pad(x, (0, 0, sizes.kernel - 1, 0))
        total = torch.stack([padded[tap : tap + count] * taps[tap] for tap in range(sizes.kernel)]).sum(0)
        return total if bias is None else total + bias

    if sizes.kind == "convolution":
        b, c, x = rows.chunk(3, 1)
        return c * convolve((b * x).bfloat16().double())
    keys, inner, heads = sizes.key_heads * sizes.key_dim, sizes.inner, sizes.heads
    convolved, scalars, z = (
        F.silu(convolve(rows[:, : sizes.channels])),
        rows[:, sizes.channels : sizes.logged],
        rows[:, sizes.logged :],
    )
    if sizes.kind == "mamba2":
        v, k, q = convolved.split([inner, keys, keys], 1)
    else:
        q, k, v = convolved.split([keys, keys, inner], 1)
    readers = (
        torch.arange(heads) % sizes.key_heads if sizes.is_tiled else torch.arange(heads) // (heads // sizes.key_heads)
    )
    q, k = (each.view(count, sizes.key_heads, -1)[:, readers] for each in (q, k))
    v, decay, bias = v.view(count, heads, -1), weights["decay"], weights["step_bias"]
    assert decay is not None and bias is not None
    if sizes.kind == "mamba2":
        factor = F.softplus(scalars + bias).clamp(*sizes.steps)
        stays = (decay * factor).exp()[..., None, None]
    else:
        q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
        q = q * sizes.key_dim**-0.5
        factor = scalars[:, :heads].sigmoid()
        steps = F.softplus(scalars[:, heads:] + bias).view(count, heads, -1)
        stays = (decay[:, None] * steps).exp()[..., None]
    state = torch.zeros(heads, sizes.key_dim, sizes.value_dim, dtype=torch.float64)
    read = []
    for t in range(count):
        state = state * stays[t]
        known = torch.einsum("hkv,hk->hv", state, k[t]) if sizes.kind != "mamba2" else 0.0
        state = state + k[t, :, :, None] * (factor[t, :, None] * (v[t] - known))[:, None]
        read.append(torch.einsum("hkv,hk->hv", state, q[t]))
    y = torch.stack(read)
    if weights["skip"] is not None:
        y = y + weights["skip"][:, None] * v
    y, gate = y.flatten(1), z.sigmoid() if sizes.has_sigmoid_gate else F.silu(z)
    if sizes.is_gated_first:
        y = y * gate
    if (norm := weights["norm"]) is not None:
        grouped = y.view(count, -1, sizes.value_dim * sizes.norm_heads)
        y = (grouped * (grouped.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(1)
        y = y * norm.repeat(inner // len(norm))
    return y if sizes.is_gated_first else y * gate


CASES = [
    Sizes("delta", 4, 2, 128, 128),
    Sizes("delta", 3, 3, 64, 64, kernel=3, has_bias=True),
    Sizes("delta", 5, 1, 32, 80),
    Sizes("delta", 6, 2, 64, 96, is_tiled=True),
    Sizes("delta", 6, 2, 256, 256, kernel=2),
    Sizes("channel_delta", 3, 3, 64, 64, has_sigmoid_gate=True),
    Sizes("channel_delta", 2, 2, 128, 128, has_sigmoid_gate=True),
    Sizes("mamba2", 6, 1, 128, 64, norm_heads=6, is_gated_first=True, has_bias=True),
    Sizes("mamba2", 6, 2, 64, 80, norm_heads=3, is_gated_first=True, steps=(0.001, 0.5)),
    Sizes("mamba2", 4, 2, 256, 128, norm_heads=0, is_gated_first=True),
    Sizes("convolution", 1, 1, 16, 208, kernel=3),
    Sizes("convolution", 1, 1, 16, 64, kernel=4, has_bias=True),
]
by_case = pytest.mark.parametrize(
    "sizes", CASES, ids=lambda sizes: f"{sizes.kind}-{sizes.heads}x{sizes.key_dim}x{sizes.value_dim}"
)


def sequence(sizes: Sizes, count: int, seed: int) -> torch.Tensor:
    return rand(count, sizes.width, seed=seed).bfloat16()


def whole(made: Made, projected: torch.Tensor, slot: int) -> torch.Tensor:
    count = len(projected)
    return made.step(StateRows([slot], [count], [0], [0], [count]), [projected])[0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@by_case
def test_a_sequence_is_what_the_formulas_say(sizes: Sizes) -> None:
    made = Made(sizes, 2, ring=8)
    projected = sequence(sizes, 83, seed=20)
    found, expected = whole(made, projected, 1), exact(made, projected)
    assert error(found, expected) < 5e-3
    assert error(found[-10:], expected[-10:]) < 5e-3


@dataclass
class Running:
    """A sequence, of which some tokens came, and fewer are in its state."""

    projected: torch.Tensor
    expected: torch.Tensor
    state: torch.Tensor  # at its end
    came: int = 0
    folded: int = 0

    def next_part(self, dice: random.Random, most_logged: int) -> tuple[int, int, int]:
        """First token, end, and how many are to be in the state then. Some of the log may come again."""
        start, count = dice.randint(self.folded, self.came), len(self.projected)
        end = min(count, start + dice.choice([1, 1, 2, 3, 33, 70]))
        return start, end, end if end == count else dice.randint(max(self.folded, end - most_logged), end)


@by_case
def test_steps_and_company_change_no_bit(sizes: Sizes) -> None:
    """Sequences come in steps of random lengths, among others or alone, into slots that others had."""
    dice, num_slots, most_logged = random.Random(sizes.key_dim), 5, 7
    made, alone = Made(sizes, num_slots, sizes.kernel - 1 + most_logged), Made(sizes, 1, ring=sizes.kernel - 1)
    waiting = []
    for number in range(8):
        projected = sequence(sizes, dice.choice([1, 2, 5, 40, 150]), seed=30 + number)
        waiting.append(Running(projected, whole(alone, projected, 0), alone.states[0].clone()))
    running: dict[int, Running] = {}
    while waiting or running:
        for slot in set(range(num_slots)) - set(running):
            if waiting and dice.random() < 0.5:
                running[slot] = waiting.pop()
        chosen = dice.sample(sorted(running), dice.randint(0, len(running)))
        if not chosen:
            continue
        parts = [running[slot].next_part(dice, most_logged) for slot in chosen]
        rows = StateRows(
            chosen,
            [end - start for start, end, _ in parts],
            [start for start, _, _ in parts],
            [running[slot].folded for slot in chosen],
            [fold_to for _, _, fold_to in parts],
        )
        inputs = [running[slot].projected[start:end] for slot, (start, end, _) in zip(chosen, parts, strict=True)]
        results = made.step(rows, inputs)
        for slot, (start, end, fold_to), found in zip(chosen, parts, results, strict=True):
            each = running[slot]
            assert torch.equal(found, each.expected[start:end])
            each.came, each.folded = end, fold_to
            if end == len(each.projected):
                assert sizes.kind == "convolution" or torch.equal(made.states[slot], each.state)
                del running[slot]


@pytest.mark.parametrize("sizes", [CASES[0], CASES[5], CASES[7], CASES[10]], ids=lambda sizes: sizes.kind)
def test_the_number_of_threads_changes_no_bit(sizes: Sizes) -> None:
    lengths = [1, 50, 2]
    projected = [sequence(sizes, length, seed=60 + length) for length in lengths]
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        made = Made(sizes, 3, ring=8)
        out = made.step(StateRows([2, 0, 1], lengths, [0, 0, 0], [0, 0, 0], [0, 49, 2]), projected)
        results.append([part.view(torch.int16) for part in (torch.cat(out), made.states, made.inputs)])
    for each in results[1:]:
        assert all(map(torch.equal, each, results[0]))


@pytest.mark.parametrize("sizes", CASES[:9], ids=lambda sizes: f"{sizes.kind}-{sizes.heads}")
def test_numbers_far_out(sizes: Sizes) -> None:
    """Gates of 0 and 1, and decays that leave nothing. A NaN is one of its own sequence only."""
    made = Made(sizes, 2, ring=8)
    projected = rand(40, sizes.width, seed=70, scale=60.0).bfloat16()
    found, expected = whole(made, projected, 0), exact(made, projected)
    assert torch.isfinite(found).all()
    assert error(found, expected) < 5e-3
    broken = projected.clone()
    broken[3, 0] = torch.nan
    both = made.step(StateRows([0, 1], [40, 40], [0, 0], [0, 0], [40, 40]), [broken, projected])
    assert torch.equal(both[1], found) and both[0][3].isnan().any()


def layer_of(config: RecurrenceConfig, seed: int, num_slots: int, ring: int) -> tuple[RecurrentWeights, StateLayer]:
    weights = RecurrentWeights(
        rand(config.kernel, config.channels, seed=seed, scale=0.5),
        -rand(config.num_heads, seed=seed + 1).exp(),
        rand(config.num_heads, seed=seed + 2),
        1 + rand(config.value_dim, seed=seed + 3, scale=0.2),
    )
    state = torch.full((num_slots, config.num_heads, config.key_dim, config.value_dim), torch.nan)
    return weights, StateLayer(state, torch.full((num_slots, ring, config.logged), torch.nan, dtype=torch.bfloat16))


@pytest.mark.parametrize(("is_tiled", "heads"), [(False, 6), (True, 6), (False, 3)])
def test_the_backend_s_recurrence_is_that_of_torch(is_tiled: bool, heads: int) -> None:
    """Its states after every step, and its results but for their rounding."""
    config = RecurrenceConfig("delta", heads, 3, 64, 96, 4, is_tiled)
    backend = native_backend()
    native, defined = backend.make_recurrence(config), TorchRecurrence(config, CPU)
    assert isinstance(native, NativeRecurrence)
    weights, cache = layer_of(config, 80, 3, 5)
    other = StateLayer(cache.state.clone(), cache.inputs.float())
    for rows in (
        StateRows([2, 0], [40, 3], [0, 0], [0, 0], [39, 3]),
        StateRows([0, 2, 1], [1, 1, 70], [3, 40, 0], [3, 39, 0], [3, 40, 69]),
        StateRows([1, 2], [2, 3], [70, 41], [69, 40], [70, 44]),
    ):
        projected = rand(sum(rows.query_lens), config.width, seed=90).bfloat16()
        found = native(projected, cache, native.plan(rows), weights, eps=EPS)
        expected = defined(projected.float(), other, defined.plan(rows), weights, eps=EPS)
        assert error(found, expected) < 5e-3
        for slot in rows.slots:
            torch.testing.assert_close(cache.state[slot], other.state[slot], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.inputs.float(), other.inputs, atol=0, rtol=0, equal_nan=True)


def test_sizes_that_native_code_does_not_know_are_torch_s() -> None:
    for config in (RecurrenceConfig("delta", 2, 1, 24, 64, 4), RecurrenceConfig("delta", 2, 1, 64, 64, 9)):
        assert isinstance(native_backend().make_recurrence(config), TorchRecurrence)


HYBRID = ModelConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=EPS,
    activation="silu",
    has_qkv_bias=False,
    has_output_bias=False,
    has_mlp_bias=False,
    is_tied=False,
    attention_scale=0.125,
    ropes=(Rope(rand(16, seed=1).abs()),),
    rope_of_layer=(0, 0, 0, 0),
    sliding_windows=(None,) * 4,
    has_qk_norm=True,
    has_attention_gate=True,
    recurrence=RecurrenceConfig("delta", 4, 2, 32, 48, 4),
    recurrent_layers=frozenset({0, 1, 3}),
)


def hybrid_decoder(backend: CpuBackend) -> tuple[Decoder, list[LayerCache]]:
    """With caches of three sequences of up to 640 tokens."""
    config = HYBRID
    hidden, dim = config.hidden_size, config.head_dim
    assert config.recurrence is not None

    def linear(n: int, k: int, seed: int, *, is_gated: bool = False) -> Linear:
        return backend.make_linear(Dense(rand(n, k, seed=seed, scale=0.1).bfloat16()), is_gated=is_gated)

    def norm(size: int) -> torch.Tensor:
        return (1 + rand(size, seed=size, scale=0.1)).bfloat16()

    layers: list[LayerWeights] = []
    caches: list[LayerCache] = []
    for number in range(config.num_layers):
        width, inner = 2 * (config.num_heads + config.num_kv_heads) * dim, config.num_heads * dim
        norms, weights = Norms(norm(hidden), None, norm(hidden), None, norm(dim), norm(dim)), None
        if number in config.recurrent_layers:
            width, inner = config.recurrence.width, config.recurrence.inner
            norms = Norms(norm(hidden), None, norm(hidden))
            weights, states = layer_of(config.recurrence, 100 * number, 3, 8)
            caches.append(states)
        else:
            caches.append(backend.make_kv_layer(120, 16, config.num_kv_heads, dim, group=0))
        gate_up = linear(2 * config.intermediate_size, hidden, 220 + number, is_gated=True)
        mlp = backend.make_mlp(gate_up, linear(hidden, config.intermediate_size, 230 + number))
        qkv, output = linear(width, hidden, 200 + number), linear(hidden, inner, 210 + number)
        layers.append(LayerWeights(norms, qkv, output, mlp, recurrent=weights))
    embedding = rand(config.vocab_size, hidden, seed=9).bfloat16()
    weights_of_all = ModelWeights(embedding, layers, norm(hidden), linear(config.vocab_size, hidden, 300))
    return Decoder(config, weights_of_all, backend), caches


@pytest.mark.parametrize("lengths", [[1], [5, 1, 33], [600, 1]])
def test_layers_in_one_call_are_the_same_as_one_by_one(lengths: list[int]) -> None:
    """Recurrent layers, and gated attention of which a part rotates: prompts, with many rows in panels, and
    then two tokens of each, with one in the log.
    """
    torch.set_num_threads(2)
    decoder, caches = hybrid_decoder(native_backend())
    stack, numbers = decoder.stack, range(len(lengths))
    assert stack is not None
    tables = [tuple(range(40 * number, 40 * number + 40)) for number in numbers]
    folded = [length - 1 for length in lengths]
    steps = ([0] * len(lengths), lengths, [0] * len(lengths), folded), (lengths, [2] * len(lengths), folded, lengths)
    results = []
    for decoder.stack in (stack, None):
        found = []
        for starts, query_lens, num_folded, fold_to in steps:
            ends = [start + count for start, count in zip(starts, query_lens, strict=True)]
            places = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
            batch = ForwardBatch(
                torch.arange(sum(query_lens)) % 100,
                torch.cat(places),
                torch.cat([640 * number + at for number, at in zip(numbers, places, strict=True)]),
                query_lens,
                ends,
                tables,
                torch.tensor([0]),
                states=StateRows(list(numbers), query_lens, starts, num_folded, fold_to),
            )
            found.append(decoder.forward(batch, decoder.plan(batch, 16), caches).clone())
        results.append(torch.cat(found))
    assert torch.isfinite(results[0]).all() and torch.equal(results[0], results[1])
