"""Shapes of models, and which part of one is a rank's."""

import json
from dataclasses import dataclass
from pathlib import Path

from services.compute.ranks.parallel.heads import divide_heads
from services.compute.ranks.parallel.share import Share, layers_of_stage
from services.simulator.reading import reason
from shared.process.errors import StartupError


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder's shape, from which a step's bytes and operations follow. Norms, biases and a
    mixture's router are too small to count."""

    num_layers: int
    hidden_size: int
    intermediate_size: int  # of an MLP, or of each expert
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool = False  # the LM head's weights are the embedding's
    num_experts: int = 1  # in each layer
    num_active: int = 1  # experts that a token goes through

    @property
    def attention_weights(self) -> int:
        """Numbers in a layer's projections to q, k, v, and back."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_in_layers(self) -> float:
        """How many layers the LM head is worth in a step of a few tokens, as place.py counts them."""
        return self.head_weights / (self.attention_weights + self.num_active * self.expert_weights)

    @property
    def num_parameters(self) -> int:
        layer = self.attention_weights + self.num_experts * self.expert_weights
        return self.num_layers * layer + self.head_weights * (1 if self.is_tied else 2)

    @property
    def kv_values(self) -> int:
        """Numbers that the KV cache keeps for a token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_operations(self) -> int:
        """Operations of a token's attention to another: a multiplication and an addition for each
        number of a query, and again for each of a value."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Part:
    """Numbers that a rank holds, and its heads."""

    num_layers: int
    attention_weights: int  # of a layer
    mlp_weights: int  # of a layer; of a mixture, all its experts that are the rank's
    head_weights: int
    embedding_weights: int  # without the head's
    num_heads: int  # of queries
    num_kv_heads: int

    @property
    def num_parameters(self) -> int:
        return (
            self.num_layers * (self.attention_weights + self.mlp_weights) + self.head_weights + self.embedding_weights
        )


def part_of(model: DecoderShape, share: Share, stage: Share) -> Part:
    """The part of a rank. share: its place among those that divide every layer; stage: among those that
    divide the layers."""
    heads = divide_heads(model.num_heads, model.num_kv_heads, share.size)[share.rank]
    num_heads, num_kv_heads = len(heads.queries), len(heads.kv)
    hidden, q_size = len(share.part(model.hidden_size)), model.num_heads * model.head_dim
    if model.num_experts > 1:
        mlp = len(share.part(model.num_experts, 1)) * model.expert_weights
    else:
        mlp = 2 * len(share.part(model.intermediate_size)) * model.hidden_size + hidden * model.intermediate_size
    has_head, layers = stage.rank == 0, layers_of_stage(stage.rank, stage.size, model.num_layers, model.head_in_layers)
    head = len(share.part(model.vocab_size)) * model.hidden_size if has_head else 0
    embedding = model.head_weights - (head if model.is_tied else 0) if has_head and share.rank == 0 else 0
    qkv = (num_heads + 2 * num_kv_heads) * model.head_dim * model.hidden_size
    return Part(len(layers), qkv + hidden * q_size, mlp, head, embedding, num_heads, num_kv_heads)


# as in the config.json that their makers published
MODELS = {
    "llama-2-7b": DecoderShape(32, 4096, 11_008, 32, 32, 128, 32_000),
    "llama-2-13b": DecoderShape(40, 5120, 13_824, 40, 40, 128, 32_000),
    "llama-2-70b": DecoderShape(80, 8192, 28_672, 64, 8, 128, 32_000),
    "llama-3-8b": DecoderShape(32, 4096, 14_336, 32, 8, 128, 128_256),
    "llama-3-70b": DecoderShape(80, 8192, 28_672, 64, 8, 128, 128_256),
    "codellama-34b": DecoderShape(48, 8192, 22_016, 64, 8, 128, 32_000),
    "mixtral-8x7b": DecoderShape(32, 4096, 14_336, 32, 8, 128, 32_000, num_experts=8, num_active=2),
    "qwen2.5-0.5b": DecoderShape(24, 896, 4864, 14, 2, 64, 151_936, is_tied=True),
    "qwen2.5-7b": DecoderShape(28, 3584, 18_944, 28, 4, 128, 152_064),
    "smollm2-135m": DecoderShape(30, 576, 1536, 9, 3, 64, 49_152, is_tied=True),
}


def find_model(name: str) -> DecoderShape:
    """A known shape, or that of a checkpoint folder. Raises StartupError."""
    if name in MODELS:
        return MODELS[name]
    try:
        config = json.loads((Path(name) / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        num_experts = config.get("num_local_experts") or config.get("num_experts") or 1
        return DecoderShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"]
            if num_experts == 1
            else config.get("moe_intermediate_size") or config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=config["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings")),
            num_experts=num_experts,
            num_active=config["num_experts_per_tok"] if num_experts > 1 else 1,
        )
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise StartupError(
            f"--model {name}: no checkpoint folder ({reason(error)}), and not one of {', '.join(MODELS)}"
        ) from None
