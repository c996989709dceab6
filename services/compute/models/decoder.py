"""The decoder of the Llama family: Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3. Their differences are fields of ModelConfig.

It works on a ragged batch: the tokens of all sequences of a step in one row of T, no padding. Attention alone tells sequences apart.
"""

from dataclasses import dataclass

import torch

from services.compute.backends.dispatch import AttentionInputs, Heads, Linear, Mlp, Plan, make_attention
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
    sampled_rows: Tensor  # [R] int64: the tokens whose logits are wanted


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor  # [hidden]
    qkv: Linear  # to (heads + 2 * kv_heads) * head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Linear  # from heads * head_dim
    post_norm: Tensor  # [hidden]
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Linear


class Decoder:
    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.inv_freq = config.inv_freq.to(weights.embedding.device)
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.attention = make_attention(heads, weights.embedding.dtype, weights.embedding.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_layers: tuple[Tensor, ...]) -> Tensor:
        """Write the step's K and V and return the logits of the sampled rows. kv_layers: KVCache.layers. Returns [R, vocab] float32,
        good until the next call."""
        plan = self.plan(batch, kv_layers[0].shape[3])
        x = self.embed(batch.input_ids)
        for number, (layer, kv) in enumerate(zip(self.weights.layers, kv_layers, strict=True)):
            x = self.run_layer(number, layer, x, kv, plan)
        return self.weights.lm_head.logits(x[batch.sampled_rows], norm=self.weights.norm, eps=self.config.rms_norm_eps)

    def plan(self, batch: ForwardBatch, block_size: int) -> Plan:
        """What attention needs to know of the batch, the same for every layer."""
        cos, sin = self._rotary_table(batch.positions)
        inputs = AttentionInputs(batch.query_lens, batch.context_lens, batch.block_tables, batch.slot_mapping, cos, sin)
        return self.attention.plan(inputs, block_size)

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids: [T]. Returns [T, hidden]."""
        return self.weights.embedding[input_ids]

    def run_layer(self, number: int, layer: LayerWeights, x: Tensor, kv: Tensor, plan: Plan) -> Tensor:
        """One layer of a step. x: [T, hidden]; kv: the layer's cache. Returns [T, hidden]."""
        eps = self.config.rms_norm_eps
        qkv = layer.qkv(x, norm=layer.input_norm, eps=eps)
        norms = (layer.q_norm, layer.k_norm)
        h = self.attention(qkv, kv, plan, window=self.config.sliding_windows[number], norms=norms, eps=eps)  # type: ignore[arg-type]
        x = layer.output(h, residual=x)
        return layer.mlp(x, norm=layer.post_norm, eps=eps)

    def _rotary_table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the step's positions, [T, head_dim / 2] float32."""
        angles = positions[:, None].float() * self.inv_freq[None, :]
        return angles.cos() * self.config.rotary_scale, angles.sin() * self.config.rotary_scale
