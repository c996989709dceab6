"""The decoder of every supported family (config.py lists them). Their differences are fields of
ModelConfig.

It works on a ragged batch: the tokens of all sequences of a step in one row of T, no padding.
Attention alone tells sequences apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from services.compute.backends.backend import (
    Backend,
    LargestStep,
    LayerCache,
    LayerWeights,
    Linear,
    LogitsProduct,
    Wiring,
    Workspace,
)
from services.compute.backends.buffers import Taps
from services.compute.backends.gathered import ELSEWHERE, GatheredHead, own_of
from services.compute.backends.torch.attention import AttentionInputs, CosSin, Heads
from services.compute.backends.torch.recurrent import StateLayer, StateRows
from services.compute.backends.torch.reference import Scores, gated, rms_norm
from services.compute.models.config import HeadShape, ModelConfig
from services.compute.ranks.parallel.ranks import Cut
from services.compute.ranks.parallel.sharded import Receiver, Sender
from services.compute.ranks.parallel.stage import PipelineStage, Returning


@dataclass(frozen=True, slots=True)
class Overlay:
    """Embeddings that stand in for those of tokens."""

    rows: Tensor  # [I] int64, of the step's tokens
    values: Tensor  # [I, hidden]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ScheduledBatch as tensors, which are in the backend's buffers."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64; [3, T] in time, down and across, if a token has different ones
    slot_mapping: Tensor  # [T] int64; empty for a model that finds_slots
    query_lens: list[int]  # of each sequence, in the order of their tokens
    context_lens: list[int]
    block_tables: list[tuple[int, ...]]
    logit_rows: Tensor  # [R] int64, rising: the tokens whose logits will be asked for
    block_lens: list[tuple[int, ...]] | None = None  # see AttentionInputs
    overlay: Overlay | None = None  # of the embeddings of input_ids
    last_seen: list[int] | None = None  # see AttentionInputs
    handles: list[int] | None = None  # see AttentionInputs
    states: StateRows | None = None  # of a model that keeps some


class EmbeddingRows(Protocol):
    """A matrix that is read by rows: a tensor, or one in a file."""

    def __getitem__(self, ids: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """A token's embedding for each layer: a row of a table, and a projection of the token's own."""

    embedding: EmbeddingRows  # [vocab, layers * size]
    projection: Linear  # of the model's embedding, to layers * size
    norm: Tensor  # [size], of what is projected


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: EmbeddingRows  # [vocab, hidden]; ELSEWHERE: another rank has it
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: LogitsProduct  # or ELSEWHERE
    per_layer: PerLayerWeights | None = None


def per_layer_products(layer: LayerWeights) -> dict[str, Linear]:
    """The products around a layer's embeddings of tokens, by the names that a packed checkpoint has for them."""
    own = layer.per_layer
    return {} if own is None else {"per_layer_input_gate.": own.gate, "per_layer_projection.": own.projection}


def heads_of_rope(config: ModelConfig, rope: int) -> Heads:
    """The heads of the layers that turn by one of the configuration's ropes."""
    layers = [layer for layer, number in enumerate(config.rope_of_layer) if number == rope]
    shape = config.shape_of(layers[0]) if layers else HeadShape(config.num_kv_heads, config.head_dim)
    # a rank without heads plans its steps like one with a head
    return Heads(
        config.num_heads or 1,
        shape.num_kv_heads or 1,
        shape.head_dim,
        2 * len(config.ropes[rope].inv_freq),
        norms_after_rotation=config.norms_after_rotation,
        has_gate=config.has_attention_gate,
        kv_projections=shape.kv_projections,
        has_value_norm=config.has_value_norm,
    )


class Decoder:
    implementation = "native"
    splits_prompts = True
    is_row_invariant = has_kv = True
    longest_text = None

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        backend: Backend,
        cut: Cut | None = None,
        stage: PipelineStage | None = None,
        whole: ModelConfig | None = None,
        shards: Receiver | Sender | None = None,
    ) -> None:
        """backend: which made the weights' layers; cut, stage: of weights that are a rank's part, as
        config is then (rank.py); whole: the configuration of all ranks together; shards: by which parts
        of the layers come, or go to the rank that computes."""
        self.config = config
        self.whole = config if whole is None else whole
        self.weights = weights
        self.backend = backend
        self.cut = cut
        self.stage = stage
        self.shards = shards
        self.inv_freqs = [rope.inv_freq.to(backend.device) for rope in config.ropes]
        heads = [heads_of_rope(config, number) for number in range(len(config.ropes))]
        if cut is not None:
            own, sharing = cut.heads[cut.rank], self.whole.num_heads // self.whole.num_kv_heads
            before = own.queries.start - own.kv.start * sharing
            heads = [replace(each, per_kv_head=sharing, num_before=before) for each in heads]
        scores = Scores(config.attention_scale, config.attention_cap)
        self.attention = backend.make_attention(heads[0], scores, heads[1:])
        self.recurrence = None if config.recurrence is None else backend.make_recurrence(config.recurrence)
        multiplier = config.embedding_multiplier
        # rounded, as where the models were trained
        self.embedding_multiplier = torch.tensor(multiplier, dtype=backend.dtype, device=backend.device)
        self.per_layer_multiplier = torch.tensor(config.per_layer_size**0.5, dtype=backend.dtype, device=backend.device)
        self.wiring = Wiring(
            config.hidden_size,
            config.rms_norm_eps,
            config.residual_multiplier,
            config.has_post_norms,
            config.sliding_windows,
            config.rope_of_layer,
            self.recurrence,
        )
        # layers whose parts come one after the other are called one by one
        self.stack = None if shards is not None else backend.stack(weights.layers, self.attention, self.wiring, cut)
        self._shared: tuple[Sequence[LayerCache], list[LayerCache]] | None = None  # see _with_shared
        self.taps: Taps | None = None  # of the layers that are here
        self.tapped_layers: tuple[int, ...] = ()  # of the whole model

    @property
    def finds_slots(self) -> bool:
        return self.attention.finds_slots

    @property
    def takes_segments(self) -> bool:
        return self.recurrence is None

    @property
    def state_bytes(self) -> int:
        recurrence = self.config.recurrence
        return (
            0 if recurrence is None else len(self.config.recurrent_layers) * recurrence.slot_bytes(self.backend.dtype)
        )

    @property
    def cache_of_all_ranks(self) -> ModelConfig:
        """The configuration of the KV cache that they have together: a KV head may be on several."""
        return (
            self.whole
            if self.cut is None
            else replace(self.whole, num_kv_heads=sum(len(each.kv) for each in self.cut.heads))
        )

    @property
    def cached_part(self) -> str:
        """The layers and KV heads whose keys and values are here, as a part of a file's name; empty: all
        are."""
        if self.cut is None and self.stage is None:
            return ""
        layers = range(self.whole.num_layers) if self.stage is None else self.stage.layers[self.stage.number]
        heads = range(self.whole.num_kv_heads) if self.cut is None else self.cut.heads[self.cut.rank].kv
        return f"-layers-{layers.start}-{layers.stop}-heads-{heads.start}-{heads.stop}"

    @property
    def num_cached_parts(self) -> int:
        """The different parts, of all ranks, that are not empty."""
        of_heads = 1 if self.cut is None else len({each.kv for each in self.cut.heads if each.kv})
        return of_heads * (1 if self.stage is None else self.stage.count)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Keep a copy of what enters these layers of the whole model, in each later step; see Taps.
        Ranks that don't speak with other stages keep nothing."""
        self.tapped_layers, own, stage = layers, layers, self.stage
        if stage is not None:
            own = tuple(number for each, number in map(stage.place_of, layers) if each == stage.number)
        if stage is None or stage.pipe is not None:
            self.taps = Taps(own, self.config.hidden_size, self.backend.dtype, self.backend.buffers)

    def tapped_states(self, hidden: Any, num_tokens: int) -> Tensor:
        """The inputs of the tapped layers, of a step of so many tokens, [num_tokens, layers * hidden].
        hidden: what `forward` returned, of the last step; of any, with stages."""
        if isinstance(hidden, Returning):
            assert hidden.tapped is not None
            return hidden.tapped.take()
        assert self.taps is not None
        return self.taps.take(num_tokens)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, plan: Any, caches: Sequence[LayerCache]) -> Any:
        """Write the step's K and V, and states. plan: of this batch; caches: a layer's each. Returns
        what the last layer makes of each token, [T, hidden]: `logits` of it is the head's. All that
        differs from step to step is read from the backend's buffers."""
        first = self.first_states(batch)
        per_layer = self.embed_per_layer(batch.input_ids, first)
        x = self.run_layers(first, plan, caches, self.temperatures(batch), per_layer)
        if self.stage is None:
            return x
        return self.stage.pass_on(
            x, batch.logit_rows, None if self.taps is None else self.taps.take(len(x)), self.tapped_layers
        )

    def temperatures(self, batch: ForwardBatch) -> Tensor | None:
        """The factor of each token's queries, [T, 1] float32; None: all are 1."""
        temperature = self.config.temperature
        if temperature is None or max(batch.context_lens) <= temperature.length:
            return None
        steps = (batch.positions[:, None] // temperature.length).float()
        return 1.0 + temperature.weight * torch.log1p(steps)

    def run_layers(
        self,
        x: Tensor,
        plan: Any,
        caches: Sequence[LayerCache],
        temperatures: Tensor | None = None,
        per_layer: Tensor | None = None,
    ) -> Tensor:
        """All layers that are here. x: [T, hidden], as it enters the first; temperatures: of the queries;
        per_layer: of embed_per_layer."""
        caches = self._with_shared(caches)
        if self.stack is not None and temperatures is None:
            return self.stack(x, caches, plan, self.taps)
        if isinstance(self.shards, Receiver):
            self.shards.begin()
        for number, (layer, cache) in enumerate(zip(self.weights.layers, caches, strict=True)):
            if isinstance(self.shards, Receiver):
                self.shards.await_layer(number)
            if self.taps is not None:
                self.taps.keep(number, x)
            own = None if per_layer is None else per_layer[:, number]
            x = self.run_layer(number, layer, x, cache, plan, temperatures, own)
        if self.taps is not None:
            self.taps.keep(self.config.num_layers, x)
        return x

    def _with_shared(self, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """A cache for each layer: one object for each object that comes."""
        if not self.config.shared_caches:
            return caches
        if self._shared is None or self._shared[0] is not caches:
            self._shared = caches, [*caches, *(caches[number] for number in self.config.shared_caches)]
        return self._shared[1]

    def embed_per_layer(self, input_ids: Tensor, x: Tensor) -> Tensor | None:
        """The tokens' embeddings for each layer, [T, layers, size]; None: the model has none. x: [T, hidden],
        the model's own."""
        weights, size = self.weights.per_layer, self.config.per_layer_size
        if weights is None:
            return None
        found = (weights.embedding[input_ids] * self.per_layer_multiplier).view(-1, size)
        # a norm of what is divided by sqrt(hidden) is a norm with a larger eps
        eps = self.config.rms_norm_eps * self.config.hidden_size
        total = self.backend.row_math.add(
            found, weights.projection(x).view(-1, size), norm=weights.norm, eps=eps, scale=0.5**0.5
        )
        return total.view(len(x), -1, size)

    def first_states(self, batch: ForwardBatch) -> Tensor:
        """The input of the first layer that is here, [T, hidden]: rank 0 alone has the embedding."""
        x = None
        if self.weights.embedding is not ELSEWHERE:
            x = self.embed(batch.input_ids)
            if batch.overlay is not None:
                x[batch.overlay.rows] = batch.overlay.values
        elif self.stage is not None and not self.stage.is_first:
            x = self.stage.receive(len(batch.input_ids), self.config.hidden_size, self.backend.dtype)
        if self.cut is not None:
            return self.cut.ranks.broadcast("x", x, (len(batch.input_ids), self.config.hidden_size), self.backend.dtype)
        assert x is not None
        return x

    @torch.inference_mode()
    def plan(self, batch: ForwardBatch, block_size: int) -> Any:
        """Prepare attention for the batch, the same for every layer. Good until the backend's next
        plan."""
        ropes = self._take_rotary_tables(len(batch.input_ids))
        inputs = AttentionInputs(
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            batch.slot_mapping,
            ropes,
            batch.block_lens,
            batch.last_seen,
            batch.handles,
            None if batch.states is None or self.recurrence is None else self.recurrence.plan(batch.states),
        )
        plan = self.attention.plan(inputs, block_size)
        self.backend.buffers.upload()
        self._fill_rotary_tables(ropes, batch.positions)
        return plan

    def run_layer(
        self,
        number: int,
        layer: LayerWeights,
        x: Tensor,
        cache: LayerCache,
        plan: Any,
        temperatures: Tensor | None = None,
        per_layer: Tensor | None = None,
    ) -> Tensor:
        """Run one layer of a step. x: [T, hidden]; temperatures: [T, 1] float32; per_layer: [T, size], the
        tokens' embeddings for this layer. Returns [T, hidden]."""
        eps, norms, window, rope = (
            self.config.rms_norm_eps,
            layer.norms,
            self.config.sliding_windows[number],
            self.config.rope_of_layer[number],
        )
        h = x[:, :0]
        if layer.qkv is not ELSEWHERE:
            qkv = layer.qkv(x, norm=norms.before_attention, eps=eps)
            if temperatures is not None:  # as good before the rotation as behind it
                qkv[:, : self.config.num_heads * self.config.shape_of(number).head_dim] *= temperatures
            if isinstance(cache, StateLayer):
                assert self.recurrence is not None and layer.recurrent is not None
                h = self.recurrence(qkv, cache, plan.states, layer.recurrent, eps=eps)
            else:
                h = self.attention(
                    qkv, cache, plan, window=window, norms=(norms.q, norms.k), eps=eps, rope=rope, sinks=layer.sinks
                )
        if self.wiring.adds_in_layers:
            x = layer.output(h, residual=x)
            return layer.mlp(x, norm=norms.before_mlp, eps=eps)
        x = self._add(x, layer.output(h), norms.after_attention)
        h = layer.mlp(x, norm=norms.before_mlp, eps=eps, has_residual=False)
        if layer.per_layer is None:
            return self._add(x, h, norms.after_mlp, layer.scalar)
        assert per_layer is not None
        x = self._add(x, h, norms.after_mlp)
        h = gated(torch.cat([layer.per_layer.gate(x), per_layer], dim=1), self.config.activation)
        return self._add(x, layer.per_layer.projection(h), norms.after_per_layer, layer.scalar)

    @torch.inference_mode()
    def logits(self, hidden: Any, rows: Tensor) -> Tensor:
        """The logits of some tokens, rows [R] of what `forward` returned. Returns [R, vocab]
        float32, good until the next call."""
        return self._finish(
            self.weights.lm_head.logits(hidden[rows], norm=self.weights.norm, eps=self.config.rms_norm_eps)
        )

    @torch.inference_mode()
    def serve_head(self, num_rows: int, *, is_normed: bool) -> None:
        """This rank's part of a call of the head on rank 0, which has a GatheredHead."""
        if isinstance(self.weights.lm_head, GatheredHead):
            self.weights.lm_head.serve(
                num_rows, norm=self.weights.norm if is_normed else None, eps=self.config.rms_norm_eps
            )

    @torch.inference_mode()
    def states(self, hidden: Any, rows: Tensor) -> Tensor:
        """The last hidden states of some tokens, behind the last norm: rows [R] of what `forward`
        returned. Returns [R, hidden] float32."""
        return rms_norm(hidden[rows], self.weights.norm, self.config.rms_norm_eps).float()

    def workspace(self, num_tokens: int, num_logits: int, max_model_len: int) -> Workspace:
        """Bytes that a step of so many tokens needs. num_logits: rows that get logits."""
        self._take_rotary_tables(max(num_tokens, num_logits))
        if self.taps is not None:
            self.taps.take(max(num_tokens, num_logits))
        mlps = [layer.mlp for layer in self.weights.layers]
        found = [
            own_of(each)
            for layer in self.weights.layers
            for each in (layer.qkv, layer.output, *layer.mlp.linears.values(), *per_layer_products(layer).values())
        ]
        if self.weights.per_layer is not None:
            found.append(self.weights.per_layer.projection)
        linears = [each for each in found if each is not None]
        step = LargestStep(
            linears,
            mlps,
            own_of(self.weights.lm_head),
            self.attention,
            self.stack,
            self.config.hidden_size,
            num_tokens,
            num_logits,
            max_model_len,
            self.recurrence,
        )
        return self.backend.workspace(step)

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids: [T]. Returns [T, hidden]."""
        x = self.weights.embedding[input_ids]
        return x if self.config.embedding_multiplier == 1.0 else x * self.embedding_multiplier

    def _add(self, x: Tensor, h: Tensor, norm: Tensor | None, scale: float = 1.0) -> Tensor:
        return self.backend.row_math.add(
            x, h, norm=norm, eps=self.config.rms_norm_eps, multiplier=self.config.residual_multiplier, scale=scale
        )

    def _finish(self, logits: Tensor) -> Tensor:
        multiplier, cap = self.config.logits_multiplier, self.config.logits_cap
        return (
            logits
            if multiplier == 1.0 and cap == 0.0
            else self.backend.row_math.finish_logits(logits, multiplier=multiplier, cap=cap)
        )

    def _take_rotary_tables(self, num_tokens: int) -> tuple[CosSin, ...]:
        """Room for cos and sin of the step's positions, of each of the model's ropes."""
        take = self.backend.buffers.take
        shapes = [(num_tokens, len(inv_freq)) for inv_freq in self.inv_freqs]
        return tuple(
            (take(f"cos {number}", shape, torch.float32), take(f"sin {number}", shape, torch.float32))
            for number, shape in enumerate(shapes)
        )

    def _fill_rotary_tables(self, tables: tuple[CosSin, ...], positions: Tensor) -> None:
        for (cos, sin), rope, inv_freq in zip(tables, self.config.ropes, self.inv_freqs, strict=True):
            # of equal positions both are the same numbers
            turned = (
                positions[:, None]
                if positions.dim() == 1
                else positions[rope.axes.to(positions.device) if rope.axes is not None else 0].T
            )
            angles = turned.float() * inv_freq[None, :]
            torch.cos(angles, out=cos).mul_(rope.scale)
            torch.sin(angles, out=sin).mul_(rope.scale)
