"""`penstock make-model`: a checkpoint of random weights in a real model's shape, with a tokenizer
that has a text for every id.

For benchmarks and tests: speed does not depend on what the weights are. The tokenizer is the demo
model's, filled up with made-up words to the shape's vocabulary.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from services.compute.models.config import ModelConfig
from services.modeltools.out_folder import open_out_folder, write_model
from shared.model.files import DEMO_MODEL


@dataclass(frozen=True, slots=True)
class Shape:
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: dict[str, Any]
    has_qkv_bias: bool = False


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default"} | scaling


LLAMA, QWEN2 = ("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2")
LLAMA_3_2_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES = {
    "qwen2.5-0.5b": Shape(*QWEN2, 151_936, 896, 4864, 24, 14, 2, 64, 32_768, rope(1e6), True),
    "llama-3.2-1b": Shape(*LLAMA, 128_256, 2048, 8192, 16, 32, 8, 64, 131_072, rope(5e5, **LLAMA_3_2_ROPE)),
    "llama-3-8b": Shape(*LLAMA, 128_256, 4096, 14_336, 32, 32, 8, 128, 8192, rope(5e5)),
    "qwen2.5-7b": Shape(*QWEN2, 152_064, 3584, 18_944, 28, 28, 4, 128, 32_768, rope(1e6), True),
    "smollm2-135m": Shape(*LLAMA, 49_152, 576, 1536, 30, 9, 3, 64, 8192, rope(1e5)),
    "tiny": Shape(*LLAMA, 2048, 64, 128, 2, 4, 2, 16, 2048, rope(1e4)),
}


def make_model(out: Path, *, shape: str, dtype: str, seed: int, force: bool = False) -> None:
    """Write config.json, model.safetensors and the tokenizer's files to `out`, with force in the
    stead of a model that is there. Raises StartupError."""
    chosen = SHAPES[shape]
    open_out_folder(out, force=force)
    if not sys.stderr.isatty():  # where there are no bars
        sys.stderr.write(f"making a model of shape {shape}\n")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(name, size, generator).to(getattr(torch, dtype))
        for name, size in tqdm(list(tensor_sizes(chosen)), desc="making weights", unit="tensor")
    }
    write_model(out, tensors, lambda: write_config(out, chosen, dtype))


def write_config(out: Path, shape: Shape, dtype: str) -> None:
    """Write config.json, generation_config.json and the tokenizer's files."""
    (out / "config.json").write_text(json.dumps(config_json(shape, dtype), indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}) + "\n")
    write_tokenizer(out, shape.vocab_size)


def config_json(shape: Shape, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "dtype": dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": shape.rope,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }


def tensor_sizes(shape: Shape | ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint, by the names that transformers gives them."""
    hidden, inter = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (shape.vocab_size, hidden)),
        ("model.norm.weight", (hidden,)),
    ]
    for number in range(shape.num_layers):
        prefix = f"model.layers.{number}."
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            sizes.append((f"{prefix}self_attn.{name}_proj.weight", (size, hidden)))
            if shape.has_qkv_bias:
                sizes.append((f"{prefix}self_attn.{name}_proj.bias", (size,)))
        sizes += [
            (f"{prefix}self_attn.o_proj.weight", (hidden, q_size)),
            (f"{prefix}mlp.gate_proj.weight", (inter, hidden)),
            (f"{prefix}mlp.up_proj.weight", (inter, hidden)),
            (f"{prefix}mlp.down_proj.weight", (hidden, inter)),
            (f"{prefix}input_layernorm.weight", (hidden,)),
            (f"{prefix}post_attention_layernorm.weight", (hidden,)),
        ]
    return sizes


def _random(name: str, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms are ones, the rest normal with the usual spread of 0.02."""
    return torch.ones(size) if name.endswith("norm.weight") else torch.randn(size, generator=generator) * 0.02


def write_tokenizer(out: Path, vocab_size: int) -> None:
    """The demo's tokenizer with enough made-up words that every id below vocab_size has a text."""
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    for number in range(len(vocab), vocab_size):
        vocab[f"Ġw{number}"] = number  # Ġ: a space in the byte-level alphabet
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (out / name).write_text((DEMO_MODEL / name).read_text(encoding="utf-8"), encoding="utf-8")
