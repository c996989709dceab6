"""Backend: what a model is made of. One is chosen at load (choose.py), and handed to all that make
a part of the model or run one.

`torch/` is the definition and runs anywhere, in any dtype; `cpu/` is native code for bfloat16;
`cuda/` is Triton's kernels, for GPUs. Parts are objects that were made once: a linear layer with
its weights in the form that it reads, an MLP, attention. All backends' parts have the same methods.

A step is prepared once: all that depends on its batch goes into the backend's buffers, attention's
plan among it. The forward pass then reads those only.

x: [T, k], a row a token. Where a norm is given, x is normalized first; where a residual is given,
the result is added to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from services.compute.backends.buffers import Buffers, Taps
from services.compute.backends.matrix import Matrix
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.backends.torch.recurrent import RecurrenceConfig, RecurrentWeights, StateLayer, StateRows
from services.compute.backends.torch.reference import Scores
from services.compute.ranks.parallel.ranks import Cut
from shared.model.arrays import Array
from shared.model.decision import Draws
from shared.model.sampling_params import SamplingParams

QUANTIZATIONS = ("none", "w8a8", "w4", "nf4", "fp8")


class Product(Protocol):
    """The product with a layer's matrix, on this rank or over several."""

    def __call__(
        self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None
    ) -> Tensor:
        """Returns [T, n], or [T, n / 2] of a gated layer, in x's dtype."""
        ...


class LogitsProduct(Protocol):
    def logits(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None) -> Tensor:
        """The product in float32, of the last layer or a router. out: columns of a matrix, to which it
        is written; else the result is good until the next call."""
        ...


class Linear(Product, LogitsProduct, Protocol):
    """A matrix that is here."""


class Mlp(Protocol):
    @property
    def linears(self) -> dict[str, Linear]:
        """The MLP's layers, by the names that a packed checkpoint has for them."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Whether a call asks the host nothing, so that a GPU's recording of a step can hold it."""
        ...

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        """down(activation(gate) * up), with gate and up of x, normalized where there is a norm;
        with has_residual, x is added. Returns [T, hidden]."""
        ...


class GroupedExperts(Protocol):
    """A mixture's experts, or a range of them, in launches that take all: the host need not know how
    many rows each gets. Numbers of experts are those of the whole mixture."""

    def run(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Each row's results of its experts, [T, num_active, hidden]. x: [T, hidden]; chosen: [T,
        num_active] int64. Results of experts that are not in the range are 0."""
        ...


class Attention(Protocol):
    @property
    def finds_slots(self) -> bool:
        """Whether `plan` needs no slots: it finds them from the block tables."""
        ...

    def plan(self, inputs: AttentionInputs, block_size: int) -> Any:
        """Prepare the layers' calls for a step. Good until the next plan. It has the inputs' `states`."""
        ...

    def __call__(
        self,
        qkv: Tensor,
        kv: Tensor,
        plan: Any,
        *,
        window: int | None,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        rope: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Normalize and rotate q and k, write K and V, attend: see TorchAttention. The result is
        good until the plan's next call."""
        ...


class Recurrence(Protocol):
    """The middle of layers that keep a state in place of keys and values: see TorchRecurrence."""

    def plan(self, rows: StateRows) -> Any:
        """Prepare the layers' calls for a step: AttentionInputs' `states`. Good until the next plan."""
        ...

    def __call__(
        self, projected: Tensor, cache: StateLayer, states: Any, weights: RecurrentWeights, *, eps: float
    ) -> Tensor:
        """states: of the step's `plan`. The result is good until the next call."""
        ...


LayerCache = Tensor | StateLayer  # of make_kv_layer, or of a recurrent layer


@dataclass(frozen=True, slots=True)
class Norms:
    """A layer's RMSNorms: what they multiply by, [hidden] unless it says otherwise. A family has
    some of them."""

    before_attention: Tensor | None = None
    after_attention: Tensor | None = None
    before_mlp: Tensor | None = None
    after_mlp: Tensor | None = None
    q: Tensor | None = None  # [head_dim], or of all heads together
    k: Tensor | None = None
    # of a mixture beside an MLP: of the MLP's result, of what goes into the experts, of their result, and of the router
    after_dense: Tensor | None = None
    before_experts: Tensor | None = None
    after_experts: Tensor | None = None
    router: Tensor | None = None
    after_per_layer: Tensor | None = None  # of what a token's embedding for this layer adds


@dataclass(frozen=True, slots=True)
class PerLayerProducts:
    """How a token's embedding for a layer comes into it: behind the MLP, times a gate."""

    gate: Linear  # hidden to the embedding's size
    projection: Linear  # and back


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer of attention, or of a recurrence: then another call stands between its first two products."""

    norms: Norms
    # to (heads + 2 * kv_heads) * head_dim, and where Heads has a gate, heads * head_dim more; or to a recurrence's
    # width; ELSEWHERE: this rank has no heads
    qkv: Product
    output: Product  # from heads * head_dim
    mlp: Mlp
    sinks: Tensor | None = None  # attention's, [heads] float32
    recurrent: RecurrentWeights | None = None  # None: it is attention's
    scalar: float = 1.0  # multiplies what leaves the layer
    per_layer: PerLayerProducts | None = None


@dataclass(frozen=True, slots=True)
class Wiring:
    """How a decoder's layers are put together: the same for all, but for the lists, which have an
    entry for each."""

    hidden_size: int
    eps: float
    residual_multiplier: float
    has_post_norms: bool
    windows: Sequence[int | None]
    ropes: Sequence[int]
    recurrence: Recurrence | None = None  # of the layers that have one

    @property
    def adds_in_layers(self) -> bool:
        """Whether attention's output projection and the MLP add to the residual themselves."""
        return not self.has_post_norms and self.residual_multiplier == 1.0


class Stack(Protocol):
    def __call__(self, x: Tensor, caches: Sequence[LayerCache], plan: Any, taps: Taps | None = None) -> Tensor:
        """Run all layers of a step. x: [T, hidden], of the embedding; it may be overwritten, and
        returned. caches: a layer's each; plan: attention's, of this step; taps: receive copies of hidden
        states between layers, the same in all calls."""
        ...

    def reserve(self, num_tokens: int) -> None:
        """Grow the backend's buffers to what a step of so many tokens takes."""
        ...


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How the experts of a mixture are chosen by a row's logits, and weighted."""

    num_active: int  # experts of a row
    has_normalized_weights: bool  # the weights of a row's experts are made to sum to 1
    has_sigmoid_scores: bool = False  # of each logit; else the softmax over all
    has_correction: bool = False  # a number for each expert, added to its score for the choice only
    # DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1.2: neighbours are a group, and the
    # groups with the highest sums of their two best scores are those that a row chooses from
    num_groups: int = 1
    num_active_groups: int = 1
    scaling: float = 1.0  # multiplies the weights


class RowMath(Protocol):
    """The work on rows between layers that a layer can't do itself."""

    def norm(self, x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm, for what several layers read. Returns [T, k]."""
        ...

    def add(
        self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        """scale * (x + multiplier * norm(h)), x and h [T, hidden]; the sum is rounded before it is scaled.
        Returns [T, hidden]."""
        ...

    def choose_experts(
        self, logits: Tensor, router: RouterConfig, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The experts of each row, the highest first, and their weights. logits: [T, experts] float32, of
        a `Linear.logits`; correction: [experts] float32, the router's. Returns [T, num_active] int64
        and float32.

        The softmax is over all experts, before the choice (Jiang et al., "Mixtral of Experts", 2024,
        section 2.1, chooses first: after normalization that is the same). The sum has a fixed order.
        """
        ...

    def add_experts(
        self,
        x: Tensor,
        results: Tensor,
        weights: Tensor,
        *,
        shared: tuple[Tensor, Tensor | None] | None,
        has_residual: bool,
    ) -> Tensor:
        """The weighted sum of experts' results, in float32, a row's first expert's first; with
        has_residual, x is added. results: [T, num_active, hidden]; weights: [T, num_active] float32;
        shared: the results of the expert that all rows have, [T, hidden], and the scores whose sigmoid
        they are weighted by, [T, 1] float32, if they are. Returns [T, hidden]."""
        ...

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        """multiplier * logits, and then cap * tanh(it / cap) if there is a cap. logits: [R, vocab]
        float32, overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The values wanted of rows of logits [R, vocab], which are edited already, and the rest of
    what decides the draw from each."""

    params: Sequence[SamplingParams]  # [R]: of the draws
    seeds: Array  # [R] uint64
    positions: Array  # [R] int32: in the token log, of the tokens to be decided
    num_listed: Array  # [R] int32, from 1: how many of its largest logits are wanted
    scored: Array  # [n] int64, rising: rows whose mass at temperature 1 is wanted, for logprobs
    whole: Array  # [m] int64, rising: rows whose draw depends on the mass of all tokens

    @property
    def width(self) -> int:
        """The most that a row lists."""
        return int(self.num_listed.max(initial=1))

    @property
    def mass_rows(self) -> Array:
        """[n + m] int64: the rows whose masses are wanted, `scored` before `whole`."""
        return np.concatenate((self.scored, self.whole))

    @property
    def mass_temperatures(self) -> Array:
        """[n + m] float32."""
        temperatures = [self.params[row].temperature for row in self.whole]
        return np.concatenate((np.ones(len(self.scored), np.float32), np.array(temperatures, np.float32)))


class RunningSearch(Protocol):
    """A row search that the device runs."""

    @property
    def drawn(self) -> Tensor | None:
        """[R] int64, on the device, where the next step can read it before the host does: each
        row's token, unless that is in the tail, or the border of a truncation is so near that the
        device's exponentials and the host's fall on two sides. None: only the host draws."""
        ...

    def wait(self) -> None:
        """Wait until the device has finished the search."""
        ...

    def read(self) -> tuple[Array, Array, Array]:
        """The values and token ids of each row's largest logits, [R, width] float32 and int64, as
        find_largest finds them: those beyond a row's num_listed mean nothing; and the masses of
        mass_rows, [n + m] float64. Waits, too."""
        ...

    def read_drawn(self) -> Array | None:
        """`drawn`, copied to the host; None if only the host draws."""
        ...


class RowSearch(Protocol):
    """Logits [R, vocab] float32 to what candidates are made of."""

    def ban(self, logits: Tensor, rows: Array, masks: Sequence[Array]) -> None:
        """Add minus infinity to the logits that masks leave out, in place: a NaN stays one, so that its
        row still fails. rows: [n] int64; masks: of each, [whole words of 32 bits] uint8, bit i of byte b
        for token 8 b + i. Does not wait for the device."""
        ...

    def start(self, logits: Tensor, wanted: SearchRequest) -> RunningSearch:
        """Begin the search, and do not wait for the device. The logits stay as they are until it is
        read."""
        ...

    def find_largest(self, logits: Tensor, k: int) -> tuple[Array, Array]:
        """The k largest of each row, by falling value, ties by rising token id. Returns values and
        ids, [R, k]. Of a row with a NaN anywhere, the first value is NaN."""
        ...

    def total_masses(self, logits: Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
        """Sum exp((logit - largest) / temperature) over each of some rows [n] int64; largest,
        temperatures: float32 [n]. Returns [n] float64."""
        ...

    def decide(self, draws: Draws) -> Array:
        """shared/model/decision.py's, to the same columns."""
        ...


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that a workspace is sized for."""

    linears: list[Linear]  # that get all of its tokens
    mlps: list[Mlp]  # which they are parts of, in part
    head: Linear | None  # that gets num_logits of them; None: it is elsewhere
    attention: Attention
    stack: Stack | None
    hidden_size: int
    num_tokens: int
    num_logits: int
    max_model_len: int
    recurrence: Recurrence | None = None


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that the largest step of a model, or of heads, takes in addition to weights and KV cache."""

    shared: int  # that the models and heads on this backend use in turn
    own: int  # not shared


def total_bytes(workspaces: Sequence[Workspace]) -> int:
    """The bytes of models and heads that run one after the other on one backend. Each must have
    reserved its own."""
    return max((workspace.shared for workspace in workspaces), default=0) + sum(
        workspace.own for workspace in workspaces
    )


class Backend(Protocol):
    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def block_multiple(self) -> int:
        """The tokens of a block of the KV cache are a multiple of this."""
        ...

    @property
    def arithmetic(self) -> str:
        """The hardware and the libraries that a result's bits depend on. Equal on two machines:
        equal bits."""
        ...

    @property
    def buffers(self) -> Buffers: ...

    @property
    def row_math(self) -> RowMath: ...

    @property
    def row_search(self) -> RowSearch: ...

    def is_kept(self, matrix: Matrix) -> bool:
        """Whether a layer keeps the form in which the file holds its weights; else it is widened to
        dtype."""
        ...

    def make_linear(
        self,
        matrix: Matrix,
        bias: Tensor | None = None,
        *,
        quantization: str = "none",
        group: int = 32,
        is_gated: bool = False,
        activation: str = "silu",
        whole_n: int | None = None,
    ) -> Linear:
        """A linear layer of a matrix [n, k] and bias [n]. With is_gated the first half of n is a
        gate, and the result reference.gated's, with one of its ACTIVATIONS.

        quantization: of QUANTIZATIONS, for what is not quantized already, or in a form that is not
        kept; group: inputs that share a scale, with four bits; whole_n: of the whole layer, where the
        matrix is a rank's part of it. Raises StartupError for a
        quantization that can't run here.
        """
        ...

    def restore_linear(
        self,
        parts: dict[str, Tensor],
        n: int,
        k: int,
        *,
        is_gated: bool,
        has_bias: bool,
        activation: str,
        outputs: Sequence[range] | None = None,
    ) -> Linear:
        """A layer of a checkpoint that `penstock quantize` packed, or some of its outputs. parts: of the
        whole layer, as n and k are. Raises ValueError for parts of another layer, StartupError where
        nothing reads them."""
        ...

    def make_mlp(self, gate_up: Linear, down: Linear) -> Mlp:
        """The MLP of two of this backend's layers. The first is gated."""
        ...

    def group_experts(
        self, experts: Sequence[tuple[Linear, Linear]], num_experts: int, first: int = 0
    ) -> GroupedExperts | None:
        """Experts of a mixture of num_experts, from number `first` on, as one; None: they have to be called
        one by one. experts: gate_up and down of each, of this backend's layers, which still can be
        called."""
        ...

    def make_attention(self, heads: Heads, scores: Scores | None = None, others: Sequence[Heads] = ()) -> Attention:
        """Attention over make_kv_layer's caches; scores: Scores.of(heads.head_dim) if there are none; others: of
        layers that turn by the second rope, and so on: as many query heads as the first."""
        ...

    def make_recurrence(self, config: RecurrenceConfig) -> Recurrence: ...

    def stack(
        self, layers: Sequence[LayerWeights], attention: Attention, wiring: Wiring, cut: Cut | None = None
    ) -> Stack | None:
        """Make one call of these layers; None: they have to be called one by one. attention: of
        make_attention; cut: of layers that are a rank's part."""
        ...

    def kv_token_bytes(self, num_kv_heads: int, head_dim: int, *, group: int) -> int:
        """Bytes of a token's keys and values in a layer's cache; group: dimensions that share a
        scale in a cache of int8, 0: a cache of dtype."""
        ...

    def make_kv_layer(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, group: int
    ) -> Tensor:
        """A layer's cache, [2, num_blocks, ...] of keys and of values, zeros."""
        ...

    def copy_blocks(self, layers: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to), of make_kv_layer's caches of one shape, one after the other. No block
        is a source after it was a target."""
        ...

    def workspace(self, step: LargestStep) -> Workspace:
        """Reserve what the largest step takes. `shared` counts all that has been reserved so far,
        by any model or head."""
        ...
