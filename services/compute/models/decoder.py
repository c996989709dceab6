"""The decoder of the Llama family: Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3. Their differences are fields of ModelConfig.

It works on a ragged batch: the tokens of all sequences of a step in one row of T, no padding. Attention alone tells sequences apart.
"""

from dataclasses import dataclass, field

import torch

from services.compute.kernels import decode_attention, linear, prefill_attention, rms_norm, rotary, silu_mul, write_kv
from services.compute.models.config import ModelConfig

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token sequences of similar length, whose attention is one call."""

    rows: slice  # of the step's tokens
    block_tables: Tensor  # [n, blocks] int64
    context_lens: Tensor  # [n] int64
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window: [n, blocks * block_size] bool

    def mask(self, window: int | None, block_size: int) -> Tensor:
        """Which cached positions each sequence's token sees; made once a step, shared by the layers."""
        if window not in self.masks:
            positions = torch.arange(self.block_tables.shape[1] * block_size, device=self.context_lens.device)
            ends = self.context_lens[:, None]
            self.masks[window] = (positions < ends) & (positions >= (ends - window if window is not None else 0))
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's chunk of several tokens."""

    rows: slice
    block_table: Tensor  # [blocks] int64
    num_context: int  # tokens whose KV is written after this step


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ScheduledBatch as tensors."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    decode_groups: list[DecodeGroup]
    prefill_chunks: list[PrefillChunk]
    sampled_rows: Tensor  # [R] int64: the tokens whose logits are wanted


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Tensor  # [hidden, heads * head_dim]
    output_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; the embedding itself if tied


class Decoder:
    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.inv_freq = config.inv_freq.to(weights.embedding.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """Write the step's K and V and return the logits of the sampled rows. kv_cache: KVCache.tensor. Returns [R, vocab] float32."""
        config, eps = self.config, self.config.rms_norm_eps
        cos, sin = self._rotary_table(batch.positions)
        x = self.weights.embedding[batch.input_ids]
        for number, layer in enumerate(self.weights.layers):
            h = rms_norm(x, layer.input_norm, eps)
            x = x + self._attention(h, layer, batch, kv_cache[number], config.sliding_windows[number], cos, sin)
            h = rms_norm(x, layer.post_norm, eps)
            x = x + linear(silu_mul(linear(h, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)
        sampled = rms_norm(x[batch.sampled_rows], self.weights.norm, eps)
        return linear(sampled, self.weights.lm_head).float()

    def _attention(self, h: Tensor, layer: LayerWeights, batch: ForwardBatch, kv: Tensor, window: int | None, cos: Tensor, sin: Tensor) -> Tensor:
        config, num_tokens = self.config, len(h)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = linear(h, layer.qkv, layer.qkv_bias).view(num_tokens, -1, config.head_dim).split_with_sizes(sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        write_kv(kv, k, v, batch.slot_mapping)
        out = torch.empty_like(q)
        for group in batch.decode_groups:
            out[group.rows] = decode_attention(q[group.rows], kv, group.block_tables, group.mask(window, kv.shape[2]))
        for chunk in batch.prefill_chunks:
            out[chunk.rows] = prefill_attention(q[chunk.rows], kv, chunk.block_table, chunk.num_context, window)
        return linear(out.flatten(1), layer.output, layer.output_bias)

    def _rotary_table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the step's positions, [T, 1, head_dim / 2] float32."""
        angles = positions[:, None].float() * self.inv_freq[None, :]
        return (angles.cos() * self.config.rotary_scale)[:, None, :], (angles.sin() * self.config.rotary_scale)[:, None, :]
