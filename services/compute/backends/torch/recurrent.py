"""Layers that keep a state of fixed size in place of keys and values, in plain torch: the definition.

A sequence's state, in its slot, stands behind its first num_folded tokens. The projected inputs of the
tokens behind these are kept as well, and those of the tokens before that a convolution still reads: the
log. A step computes the log's tokens again, then its own, token by token; the state that it stores
stands behind `fold_to` tokens, from where on the inputs are the log of the next step. So the last tokens
can be computed again, or go, without a copy of the state.

The bits of a token depend on the tokens before it alone: not on the step's other sequences, nor on where
a step begins, nor on how much of it was the log's.
"""

import math
from dataclasses import dataclass, fields
from itertools import accumulate

import torch
from torch import Tensor

from services.compute.backends.host_memory import mapped_zeros
from services.compute.backends.torch.reference import silu

L2_EPS = 1e-6  # of the norms of q and k
MOST_NUMBERS = 1 << 24  # of states that are scanned at once
LARGEST_SIZE = 1 << 16
LOG_LENGTH = 1  # tokens: the one whose row of logits decides the next may be computed again
NUM_SCALARS = {"delta": 2, "mamba2": 1, "convolution": 0}  # of a head and a token, by kind
LINEAR_FROM = 20.0  # softplus is x from here on, as in torch


@dataclass(frozen=True, slots=True)
class RecurrenceConfig:
    """The sizes of a model's recurrent layers, which all have the same.

    kind: `delta`, gated delta-net. A token's projected row is [q | k | v | b | a | z]: the convolution
    runs over q, k and v, b and a are the gates of the state, a number a head, and z is the gate of what
    is read from it. `convolution`, a short convolution alone: of [B | C | x] it runs over B * x, which
    the log has, and C multiplies the result. It is one head without a state, of value_dim channels.
    `mamba2`: of [x | B | C | dt | z] it runs over x, B and C; heads of x are those of values, and groups
    of B and C the heads of k and q.
    """

    kind: str
    num_heads: int  # of values, each with a state
    num_key_heads: int  # of q and k, each of num_heads / num_key_heads heads of values
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # tokens that the convolution reads, this one included
    # the heads of values that share a key's stand num_key_heads apart, as in GGUF; else next to each other
    is_tiled: bool = False
    norm_group: int | None = None  # columns of the result that share a mean square; None: a head's
    is_gate_first: bool = False  # z multiplies before the norm, not behind it
    step_limit: tuple[float, float] = (0.0, math.inf)  # of Mamba-2's dt

    def __post_init__(self) -> None:
        """Raises ValueError for what no model can be."""
        for field in fields(self):
            size = getattr(self, field.name)
            if field.type is not int:
                continue
            if type(size) is not int or not 0 < size <= LARGEST_SIZE:
                raise ValueError(
                    f"{field.name} of a recurrent layer is {size!r}, not an integer from 1 to {LARGEST_SIZE}"
                )
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"{self.num_heads} heads of values in recurrent layers are no multiple of {self.num_key_heads} heads "
                "of keys"
            )

    @property
    def channels(self) -> int:
        """Columns that go through the convolution."""
        if not self.has_state:
            return self.value_dim
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def logged(self) -> int:
        """Columns that the log keeps: of a projected row with a state, the first ones."""
        return self.channels + NUM_SCALARS[self.kind] * self.num_heads

    @property
    def has_state(self) -> bool:
        return self.kind != "convolution"

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.num_heads, self.key_dim, self.value_dim) if self.has_state else (0, 0, 0)

    @property
    def ring(self) -> int:
        """Tokens whose logged columns a slot has room for."""
        return self.kernel - 1 + LOG_LENGTH

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """A sequence's in one layer. dtype: of activations."""
        return 4 * math.prod(self.state_shape) + self.ring * self.logged * dtype.itemsize

    @property
    def inner(self) -> int:
        """Columns of the result."""
        return self.num_heads * self.value_dim

    @property
    def width(self) -> int:
        """Columns of a projected row."""
        return self.logged + self.inner if self.has_state else 3 * self.value_dim


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The weights of a recurrent layer in addition to its projections, float32."""

    convolution: Tensor  # [kernel, channels]: the last tap is the token's own
    # None: the recurrence has no state
    decay: Tensor | None = None  # [heads]: rates, negative
    dt_bias: Tensor | None = None  # [heads]
    norm: Tensor | None = None  # [norm_group], or of all columns
    # None: there is none
    convolution_bias: Tensor | None = None  # [channels]
    skip: Tensor | None = None  # [heads]: multiplies x, which is added to what is read


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer's states and logs, by slot."""

    state: Tensor  # [slots, heads, key_dim, value_dim] float32
    # [slots, ring, logged], in the dtype of activations: the token at position p of a sequence at
    # p % ring. It holds a kernel's tokens less one, and the log's
    inputs: Tensor


def make_state_layer(config: RecurrenceConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> StateLayer:
    """A layer's, for as many sequences. On a CPU they take memory when they are written."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return mapped_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    return StateLayer(
        make((num_slots, *config.state_shape), torch.float32), make((num_slots, config.ring, config.logged), dtype)
    )


@dataclass(frozen=True, slots=True)
class StateRows:
    """A step's sequences, in the order of their tokens, with a number for each."""

    slots: list[int]
    query_lens: list[int]  # tokens of the step
    starts: list[int]  # position of the first of them
    num_folded: list[int]  # tokens that the state stands behind as the step begins; 0: there is none yet
    fold_to: list[int]  # and as it ends: from num_folded to the last of the step


@dataclass(frozen=True, slots=True)
class TorchStatePlan:
    """A step's sequences by falling number of tokens, the log's included. Tensors are int64, of indices."""

    slots: Tensor  # [sequences]
    is_new: Tensor  # [sequences, 1, 1, 1] bool: it begins with a state of zeros
    kept: tuple[Tensor, Tensor]  # slot and position of each input that is read from the rings
    # [rows]: the inputs of each sequence in turn, first those that only the convolution reads; 0 is a row of
    # zeros, those in `kept` follow, then the step's
    arranged: Tensor
    windows: Tensor  # [tokens]: of each sequence's tokens in turn, the first row of `arranged` that it reads
    firsts: Tensor  # [sequences]: the first of its tokens
    active: list[int]  # for each token of the longest sequence, how many sequences have as many
    # by number of tokens: the sequences whose state is stored behind as many, with their places and slots
    stored: dict[int, list[tuple[int, int]]]
    results: Tensor  # [T]: of the step's tokens, their places among all
    written: tuple[Tensor, Tensor, Tensor]  # tokens of the step that go into the rings, their slots and positions


class TorchRecurrence:
    """`plan` once a step, then a call for each layer."""

    def __init__(self, config: RecurrenceConfig, device: torch.device) -> None:
        self.config = config
        self.device = device

    def plan(self, rows: StateRows) -> TorchStatePlan:
        """Prepare the layers' calls for a step."""

        def indices(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        before = self.config.kernel - 1
        first_rows = list(accumulate(rows.query_lens, initial=0))
        ends = [start + count for start, count in zip(rows.starts, rows.query_lens, strict=True)]
        lens = [end - folded for end, folded in zip(ends, rows.num_folded, strict=True)]
        order = sorted(range(len(lens)), key=lambda number: -lens[number])
        kept = [
            (rows.slots[number], position)
            for number in order
            for position in range(max(0, rows.num_folded[number] - before), rows.starts[number])
        ]
        arranged: list[int] = []
        windows: list[int] = []
        firsts: list[int] = []
        results = [0] * first_rows[-1]
        written: list[tuple[int, int, int]] = []
        stored: dict[int, list[tuple[int, int]]] = {}
        next_kept = 1
        for place, number in enumerate(order):
            folded, start, first_row = rows.num_folded[number], rows.starts[number], first_rows[number]
            num_kept = start - max(0, folded - before)
            firsts.append(len(windows))
            windows.extend(range(len(arranged), len(arranged) + lens[number]))
            arranged += [0] * max(0, before - folded)
            arranged += range(next_kept, next_kept + num_kept)
            arranged += range(1 + len(kept) + first_row, 1 + len(kept) + first_row + rows.query_lens[number])
            next_kept += num_kept
            for index in range(rows.query_lens[number]):
                results[first_row + index] = firsts[-1] + start - folded + index
            slot, fold_to = rows.slots[number], rows.fold_to[number]
            if fold_to > folded:
                stored.setdefault(fold_to - folded, []).append((place, slot))
            written += [
                (first_row + position - start, slot, position)
                for position in range(max(start, fold_to - before), ends[number])
            ]
        return TorchStatePlan(
            slots=indices([rows.slots[number] for number in order]),
            is_new=torch.tensor([rows.num_folded[number] == 0 for number in order], device=self.device).view(
                -1, 1, 1, 1
            ),
            kept=(indices([slot for slot, _ in kept]), indices([position for _, position in kept])),
            arranged=indices(arranged),
            windows=indices(windows),
            firsts=indices(firsts),
            active=[sum(length > at for length in lens) for at in range(max(lens))],
            stored=stored,
            results=indices(results),
            written=(
                indices([token for token, _, _ in written]),
                indices([slot for _, slot, _ in written]),
                indices([position for _, _, position in written]),
            ),
        )

    def __call__(
        self, projected: Tensor, cache: StateLayer, states: TorchStatePlan, weights: RecurrentWeights, *, eps: float
    ) -> Tensor:
        """Compute the step's tokens, store the states and the inputs. projected: [T, width]; eps: of the gated
        norm. Returns [T, inner], in projected's dtype."""
        config, ring = self.config, cache.inputs.shape[1]
        new = projected[:, : config.logged]
        if not config.has_state:
            b, c, x = (each.float() for each in projected.chunk(3, 1))
            new = (b * x).to(projected.dtype)
        slots, positions = states.kept
        zeros = new.new_zeros(1, config.logged)
        inputs = torch.cat([zeros, cache.inputs[slots, positions % ring], new])[states.arranged]
        tokens, slots, positions = states.written
        cache.inputs[slots, positions % ring] = new[tokens]
        convolved = convolve(inputs[:, : config.channels], states.windows, weights)
        if not config.has_state:
            return (c * convolved[states.results]).to(projected.dtype)
        own = inputs[states.windows + config.kernel - 1, config.channels :].float()
        split = self._split_delta if config.kind == "delta" else self._split_mamba2
        q, k, v, share, stays = split(silu(convolved), own, weights)
        read = self._scan(q, k, v, share, stays, cache, states)[states.results]
        if weights.skip is not None:
            read = read + weights.skip[:, None] * v[states.results]
        gate = silu(projected[:, config.logged :].float())
        return self._norm(read.flatten(1), gate, weights, eps).to(projected.dtype)

    def _split_delta(
        self, convolved: Tensor, scalars: Tensor, weights: RecurrentWeights
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k and v of each head, [tokens, heads, dim], the share of what is new in a state, and the share
        that stays, [tokens, heads]. scalars: [tokens, 2 * heads], b and a."""
        config = self.config
        assert weights.decay is not None and weights.dt_bias is not None
        size = config.num_key_heads * config.key_dim
        q, k, v = torch.split(convolved, [size, size, config.inner], 1)
        q, k = (self._of_heads(unit(each.view(-1, config.num_key_heads, config.key_dim))) for each in (q, k))
        b, a = scalars.chunk(2, 1)
        stays = torch.exp(weights.decay * softplus(a + weights.dt_bias))
        v = v.view(-1, config.num_heads, config.value_dim)
        return q * config.key_dim**-0.5, k, v, 1.0 / (1.0 + torch.exp(-b)), stays

    def _split_mamba2(
        self, convolved: Tensor, scalars: Tensor, weights: RecurrentWeights
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same of Mamba-2: C, B and x, dt, and what stays of a state. scalars: [tokens, heads], dt."""
        config = self.config
        assert weights.decay is not None and weights.dt_bias is not None
        size = config.num_key_heads * config.key_dim
        x, b, c = torch.split(convolved, [config.inner, size, size], 1)
        b, c = (self._of_heads(each.view(-1, config.num_key_heads, config.key_dim)) for each in (b, c))
        step = softplus(scalars + weights.dt_bias).clamp(*config.step_limit)
        return c, b, x.view(-1, config.num_heads, config.value_dim), step, torch.exp(weights.decay * step)

    def _norm(self, read: Tensor, gate: Tensor, weights: RecurrentWeights, eps: float) -> Tensor:
        """The gated norm. read, gate: [T, inner]; without a norm the gate multiplies alone."""
        if weights.norm is None:
            return read * gate
        read = read * gate if self.config.is_gate_first else read
        groups = read.view(len(read), -1, self.config.norm_group or self.config.value_dim)
        means = tree_sum(groups * groups, -1)[..., None] / groups.shape[-1]
        normed = (groups * torch.rsqrt(means + eps) * weights.norm.view(-1, groups.shape[-1])).flatten(1)
        return normed if self.config.is_gate_first else normed * gate

    def _of_heads(self, x: Tensor) -> Tensor:
        """The key of each head of values. x: [tokens, num_key_heads, key_dim]."""
        sharing = self.config.num_heads // self.config.num_key_heads
        return x.repeat(1, sharing, 1) if self.config.is_tiled else x.repeat_interleave(sharing, 1)

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, share: Tensor, stays: Tensor, cache: StateLayer, plan: TorchStatePlan
    ) -> Tensor:
        """The gated delta rule, token by token (Yang et al. 2025, "Gated Delta Networks", section 3.1); Mamba-2's
        leaves out what a key reads before (Dao and Gu 2024, "Transformers are SSMs", equation 16). Returns what
        each token reads, [tokens, heads, value_dim]."""
        read = torch.empty_like(v)
        at_once = self._at_once
        for first in range(0, len(plan.slots), at_once):
            self._scan_some(range(first, first + at_once), (q, k, v, share, stays), read, cache, plan)
        return read

    @property
    def _at_once(self) -> int:
        """Sequences that are scanned together."""
        return max(1, MOST_NUMBERS // math.prod(self.config.state_shape))

    def _scan_some(
        self, group: range, parts: tuple[Tensor, ...], read: Tensor, cache: StateLayer, plan: TorchStatePlan
    ) -> None:
        """The same for some of the plan's sequences. parts: q, k, v, share and stays; read: is written."""
        q, k, v, share, stays = parts
        places = slice(group.start, group.stop)
        state = cache.state[plan.slots[places]].masked_fill_(plan.is_new[places], 0.0)
        for at, num_active in enumerate(plan.active):
            count = min(num_active - group.start, len(state))
            if count <= 0:
                break
            tokens, some = plan.firsts[places][:count] + at, state[:count]
            some *= stays[tokens][..., None, None]
            keys = k[tokens][..., None]
            known = tree_sum(some * keys, -2) if self.config.kind == "delta" else 0.0
            change = share[tokens][..., None] * (v[tokens] - known)
            some += keys * change[..., None, :]
            read[tokens] = tree_sum(some * q[tokens][..., None], -2)
            for place, slot in plan.stored.get(at + 1, ()):
                if place in group:
                    cache.state[slot] = state[place - group.start]

    def workspace(self, num_tokens: int) -> int:
        """Bytes that a step of so many tokens takes, about: the states with what is made of them, and the columns
        of tokens several times in float32."""
        config = self.config
        states = 3 * min(self._at_once, num_tokens) * math.prod(config.state_shape) if config.has_state else 0
        of_token = 4 * config.width + 2 * config.num_heads * config.key_dim + 4 * config.inner
        return 4 * (states + num_tokens * of_token)


def convolve(inputs: Tensor, windows: Tensor, weights: RecurrentWeights) -> Tensor:
    """The causal convolution of each channel. inputs: [rows, channels]; windows: [tokens] int64, the first row
    that each token reads. Returns [tokens, channels] float32."""
    total = inputs[windows].float() * weights.convolution[0]
    for tap in range(1, len(weights.convolution)):
        total = total + inputs[windows + tap].float() * weights.convolution[tap]
    return total if weights.convolution_bias is None else total + weights.convolution_bias


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    return x * torch.rsqrt(tree_sum(x * x, -1)[..., None] + L2_EPS)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)). torch's own takes other instructions for the last few of many numbers than for the
    others."""
    return torch.where(x > LINEAR_FROM, x, torch.log1p(torch.exp(x)))


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, half added to half: in an order that does not depend on the other dimensions, as
    that of torch's own may."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        rest = x.narrow(dim, 2 * half, size - 2 * half)
        x = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        if size % 2:
            x = torch.cat([x, rest], dim)
    return x.squeeze(dim)
