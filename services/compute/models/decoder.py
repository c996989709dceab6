"""The decoder of every supported family (config.py lists them). Their differences are fields of ModelConfig.

It works on a ragged batch: the tokens of all sequences of a step in one row of T, no padding. Attention alone tells sequences apart.
"""

from dataclasses import dataclass

import torch

from services.compute.backends.dispatch import AttentionInputs, CosSin, Heads, Linear, Mlp, Plan, Scores, make_attention, make_row_math
from services.compute.models.config import ModelConfig

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ScheduledBatch as tensors."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    query_lens: list[int]  # of each sequence, in the order of their tokens
    context_lens: list[int]
    block_tables: list[tuple[int, ...]]
    logit_rows: Tensor  # [R] int64, rising: the tokens whose logits will be asked for


@dataclass(frozen=True, slots=True)
class Norms:
    """A layer's RMSNorms: what they multiply by, [hidden] unless it says otherwise. A family has some of them."""

    before_attention: Tensor | None = None
    after_attention: Tensor | None = None
    before_mlp: Tensor | None = None
    after_mlp: Tensor | None = None
    q: Tensor | None = None  # [head_dim], or of all heads together
    k: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    norms: Norms
    qkv: Linear  # to (heads + 2 * kv_heads) * head_dim
    output: Linear  # from heads * head_dim
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Linear


class Decoder:
    implementation = "native"

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self.inv_freqs = [rope.inv_freq.to(device) for rope in config.ropes]
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, 2 * len(config.ropes[0].inv_freq))
        self.attention = make_attention(heads, dtype, device, Scores(config.attention_scale, config.attention_cap))
        self.row_math = make_row_math(dtype, device)
        self.embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype, device=device)  # rounded, as where the models were trained
        self.adds_in_layers = not config.has_post_norms and config.residual_multiplier == 1.0

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_layers: tuple[Tensor, ...]) -> Tensor:
        """Write the step's K and V. kv_layers: KVCache.layers. Returns what the last layer makes of each token, [T, hidden]: `logits` of it is the head's."""
        plan = self.plan(batch, kv_layers[0].shape[3])
        x = self.embed(batch.input_ids)
        for number, (layer, kv) in enumerate(zip(self.weights.layers, kv_layers, strict=True)):
            x = self.run_layer(number, layer, x, kv, plan)
        return x

    def plan(self, batch: ForwardBatch, block_size: int) -> Plan:
        """What attention needs to know of the batch, the same for every layer."""
        ropes = self._rotary_tables(batch.positions)
        inputs = AttentionInputs(batch.query_lens, batch.context_lens, batch.block_tables, batch.slot_mapping, ropes)
        return self.attention.plan(inputs, block_size)

    def run_layer(self, number: int, layer: LayerWeights, x: Tensor, kv: Tensor, plan: Plan) -> Tensor:
        """One layer of a step. x: [T, hidden]; kv: the layer's cache. Returns [T, hidden]."""
        eps, norms, window, rope = self.config.rms_norm_eps, layer.norms, self.config.sliding_windows[number], self.config.rope_of_layer[number]
        qkv = layer.qkv(x, norm=norms.before_attention, eps=eps)
        h = self.attention(qkv, kv, plan, window=window, norms=(norms.q, norms.k), eps=eps, rope=rope)  # type: ignore[arg-type]
        if self.adds_in_layers:
            x = layer.output(h, residual=x)
            return layer.mlp(x, norm=norms.before_mlp, eps=eps)
        x = self._add(x, layer.output(h), norms.after_attention)
        return self._add(x, layer.mlp(x, norm=norms.before_mlp, eps=eps, has_residual=False), norms.after_mlp)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The logits of some tokens, rows [R] of what `forward` returned. Returns [R, vocab] float32, good until the next call."""
        return self._finish(self.weights.lm_head.logits(hidden[rows], norm=self.weights.norm, eps=self.config.rms_norm_eps))

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids: [T]. Returns [T, hidden]."""
        x = self.weights.embedding[input_ids]
        return x if self.config.embedding_multiplier == 1.0 else x * self.embedding_multiplier

    def _add(self, x: Tensor, h: Tensor, norm: Tensor | None) -> Tensor:
        return self.row_math.add(x, h, norm=norm, eps=self.config.rms_norm_eps, multiplier=self.config.residual_multiplier)

    def _finish(self, logits: Tensor) -> Tensor:
        multiplier, cap = self.config.logits_multiplier, self.config.logits_cap
        return logits if multiplier == 1.0 and cap == 0.0 else self.row_math.finish_logits(logits, multiplier=multiplier, cap=cap)

    def _rotary_tables(self, positions: Tensor) -> tuple[CosSin, ...]:
        """cos and sin of the step's positions, of each of the model's ropes."""
        tables = []
        for rope, inv_freq in zip(self.config.ropes, self.inv_freqs, strict=True):
            angles = positions[:, None].float() * inv_freq[None, :]
            tables.append((angles.cos() * rope.scale, angles.sin() * rope.scale))
        return tuple(tables)
