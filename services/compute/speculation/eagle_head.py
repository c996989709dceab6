"""The layer of an EAGLE-3 head (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large
Language Models via Training-Time Test", 2025, section 3.1) on a backend.

Its input at a place is the state there, and the token behind it. The state is `fc` of what enters
three of the target's layers; or, where the target has not been yet, the layer's own result at the
place before. Embedding and state are normed apart and stand side by side, so q, k and v read twice
the width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.compute.backends.backend import Backend, LargestStep, LogitsProduct, Workspace
from services.compute.backends.gathered import own_of
from services.compute.backends.matrix import Dense
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.models.decoder import EmbeddingRows
from services.compute.speculation.eagle_file import EagleWeights
from services.compute.speculation.medusa import AT_ONCE


@dataclass(frozen=True, slots=True)
class EagleChunk:
    """A sequence's part of a step of the layer: the tokens behind some of its places."""

    first: int  # of the places, in the sequence
    token_ids: Sequence[int]  # behind each of them
    block_table: Sequence[int]


class EagleHead:
    """A head on a backend. Its cache has the target's blocks, of one layer."""

    def __init__(
        self,
        weights: EagleWeights,
        embedding: EmbeddingRows,
        own_head: LogitsProduct,
        vocab_size: int,
        backend: Backend,
    ) -> None:
        """embedding, own_head: the target's, for a head that brings none; vocab_size: of the
        latter."""
        self.config, self.backend = weights.config, backend
        self.taps = weights.taps
        self.has_normed_residual, self.has_normed_output = weights.has_normed_residual, weights.has_normed_output
        tensors, find = weights.tensors, weights.tensors.get
        biases = [find(f"self_attn.{name}_proj.bias") for name in "qkv"]
        bias = None if all(each is None for each in biases) else torch.cat([_bias(tensors, name) for name in "qkv"])
        self.fc = backend.make_linear(Dense(tensors["fc.weight"]))
        self.qkv = backend.make_linear(
            Dense(torch.cat([tensors[f"self_attn.{name}_proj.weight"] for name in "qkv"])), bias
        )
        self.output = backend.make_linear(Dense(tensors["self_attn.o_proj.weight"]), find("self_attn.o_proj.bias"))
        gate_up = Dense(torch.cat([tensors["mlp.gate_proj.weight"], tensors["mlp.up_proj.weight"]]))
        self.mlp = backend.make_mlp(
            backend.make_linear(gate_up, is_gated=True, activation=self.config.activation),
            backend.make_linear(Dense(tensors["mlp.down_proj.weight"])),
        )
        self.lm_head = (
            backend.make_linear(Dense(tensors["lm_head.weight"])) if "lm_head.weight" in tensors else own_head
        )
        self.num_rows = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else vocab_size
        self.token_ids = None if weights.token_ids is None else weights.token_ids.numpy()
        own = find("embed_tokens.weight")
        self.embedding = embedding if own is None or _are_equal(own, embedding) else own
        self.norms = {name.removesuffix(".weight"): each for name, each in tensors.items() if "norm" in name}
        self.attention = backend.make_attention(
            Heads(self.config.num_heads, self.config.num_kv_heads, self.config.head_dim)
        )
        self.inv_freq = self.config.ropes[0].inv_freq.to(backend.device)

    def workspace(self, num_tokens: int, max_model_len: int) -> Workspace:
        """Bytes that a step of so many tokens needs, with twice the logits of AT_ONCE of them: the
        search needs as much again."""
        linears = [self.fc, self.qkv, self.output, *self.mlp.linears.values()]
        step = LargestStep(
            linears,
            [self.mlp],
            own_of(self.lm_head),
            self.attention,
            None,
            self.config.hidden_size,
            num_tokens,
            AT_ONCE,
            max_model_len,
        )
        for name in ("eagle tokens", "eagle slots", "eagle positions"):
            self.backend.buffers.reserve(name, num_tokens)
        found = self.backend.workspace(step)
        return replace(found, own=found.own + AT_ONCE * self.num_rows * 4)

    @torch.inference_mode()
    def fuse(self, states: Tensor) -> Tensor:
        """states: [T, taps * hidden of the target]. Returns the layer's states, [T, hidden]."""
        if "input_norm" in self.norms:
            states = self._norm(states, "input_norm")
        parts = [
            self._norm(part.contiguous(), f"fc_norm.{number}") if f"fc_norm.{number}" in self.norms else part
            for number, part in enumerate(states.chunk(len(self.taps), -1))
        ]
        return self.fc(torch.cat(parts, -1))

    @torch.inference_mode()
    def write(self, places: Sequence[EagleChunk], states: Tensor, kv: Tensor, block_size: int) -> None:
        """Write keys and values of these places, and compute nothing else of them. states: [T,
        hidden]; kv: the cache."""
        # attention writes all that it is given; each place looks at one key, for it has to look
        self._attend(places, self._beside(places, states)[0], kv, block_size, looks=False)

    @torch.inference_mode()
    def run(self, places: Sequence[EagleChunk], states: Tensor, kv: Tensor, block_size: int) -> Tensor:
        """The layer's results, [T, hidden], on all that the cache has of each sequence up to each
        place. states: [T, hidden]; kv: the cache, where theirs is written."""
        qkv, residual = self._beside(places, states)
        x = self.output(self._attend(places, qkv, kv, block_size), residual=residual)
        return self.mlp(x, norm=self.norms["post_attention_layernorm"], eps=self.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, results: Tensor) -> Tensor:
        """Logits of the tokens that the head knows, [R, V] float32, good until the next call.
        results: those of `run`, [R, hidden]."""
        return self.lm_head.logits(results, norm=self.norms["norm"], eps=self.config.rms_norm_eps)

    @torch.inference_mode()
    def next_states(self, results: Tensor) -> Tensor:
        """The states of the places behind those of some results, [R, hidden]."""
        return self._norm(results, "norm") if self.has_normed_output else results

    def _beside(self, places: Sequence[EagleChunk], states: Tensor) -> tuple[Tensor, Tensor]:
        """q, k and v of the places, and what the layer adds to."""
        token_ids = self.backend.buffers.fill(
            "eagle tokens", [token_id for place in places for token_id in place.token_ids]
        )
        self.backend.buffers.upload()
        normed = self._norm(states, "hidden_norm")
        x = torch.cat([self._norm(self.embedding[token_ids], "input_layernorm"), normed], -1)
        return self.qkv(x), normed if self.has_normed_residual else states

    def _attend(
        self, places: Sequence[EagleChunk], qkv: Tensor, kv: Tensor, block_size: int, *, looks: bool = True
    ) -> Tensor:
        positions = [each.first + number for each in places for number in range(len(each.token_ids))]
        slots = [
            each.block_table[place // block_size] * block_size + place % block_size
            for each in places
            for place in range(each.first, each.first + len(each.token_ids))
        ]
        buffers = self.backend.buffers
        filled_slots, filled = buffers.fill("eagle slots", slots), buffers.fill("eagle positions", positions)
        buffers.upload()
        angles = filled[:, None].float() * self.inv_freq[None, :]
        rope = angles.cos().mul_(self.config.ropes[0].scale), angles.sin().mul_(self.config.ropes[0].scale)
        lens = [len(each.token_ids) for each in places] if looks else [1] * len(slots)
        contexts = [each.first + len(each.token_ids) for each in places] if looks else lens
        tables: list[tuple[int, ...]] = [tuple(each.block_table) for each in places] if looks else [(0,)] * len(slots)
        plan = self.attention.plan(AttentionInputs(lens, contexts, tables, filled_slots, (rope,)), block_size)
        buffers.upload()
        norms = self.norms.get("self_attn.q_norm"), self.norms.get("self_attn.k_norm")
        return self.attention(
            qkv, kv, plan, window=self.config.sliding_windows[0], norms=norms, eps=self.config.rms_norm_eps
        )

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.backend.row_math.norm(x, weight=self.norms[name], eps=self.config.rms_norm_eps)


def _bias(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The bias of q, k or v; zeros if it has none."""
    weight = tensors[f"self_attn.{name}_proj.weight"]
    return tensors.get(f"self_attn.{name}_proj.bias", weight.new_zeros(len(weight)))


def _are_equal(own: Tensor, embedding: EmbeddingRows) -> bool:
    """Whether a head's embedding need not be kept, because it is the target's."""
    return isinstance(embedding, Tensor) and own.dtype == embedding.dtype and torch.equal(own, embedding)
