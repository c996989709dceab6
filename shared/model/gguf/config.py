"""GGUF metadata as what config.json and generation_config.json would say of the same model."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.model.gguf.reader import GgufHead
from shared.process.errors import StartupError

F32 = 0  # ggml's number of the type
CONTROL = 3  # a token's type
MAX_LAYERS = 4096
# What ends a turn, whatever a file calls its end token: instruct models have one token for the end
# of a text and another for the end of a turn.
END_TOKENS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<|eot|>", "<EOT>", "<|end_of_turn|>",
        "<|return|>",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """The name of a GGUF architecture in a config.json, and what only this family has."""

    architecture: str
    model_type: str
    extra: Callable[[GgufHead, str], dict[str, Any]]  # of (head, prefix of the metadata's keys)


# Of generation_config.json, what a GGUF file calls the same
SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}


def make_config(head: GgufHead) -> dict[str, Any]:
    """The file's config.json. Raises StartupError for an architecture that is not supported and for
    metadata that is missing or wrong."""
    name = head.text("general.architecture")
    family = FAMILIES.get(name)
    if family is None:
        raise StartupError(f"{head.path}: the GGUF architecture {name!r} is not supported; these are: {', '.join(sorted(FAMILIES))}")
    prefix = name + "."
    if head.metadata.get(prefix + "expert_count"):
        raise StartupError(f"{head.path} is a mixture of experts; of these, no GGUF files are read")
    hidden, num_heads, num_layers = (head.number(prefix + key) for key in ("embedding_length", "attention.head_count", "block_count"))
    if num_layers > MAX_LAYERS:
        raise StartupError(f"{head.path}: {prefix}block_count is {num_layers}; at most {MAX_LAYERS} layers are read")
    head_dim = head.number(prefix + "attention.key_length", hidden // num_heads)
    if head.number(prefix + "attention.value_length", head_dim) != head_dim:
        raise StartupError(f"{head.path}: heads whose keys and values differ in length are not supported")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "float32" if all(info.type_id == F32 for info in head.tensors.values()) else "bfloat16",
        "vocab_size": _vocab_size(head),
        "hidden_size": hidden,
        "intermediate_size": head.number(prefix + "feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": head.number(prefix + "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": head.number(prefix + "context_length"),
        "rms_norm_eps": head.real(prefix + "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(head, prefix, head_dim),
        "tie_word_embeddings": "output.weight" not in head.tensors,
        "attention_bias": "blk.0.attn_q.bias" in head.tensors or "blk.0.attn_qkv.bias" in head.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in head.tensors,
        "bos_token_id": _token_id(head, "bos"),
        "eos_token_id": _token_id(head, "eos"),
        "pad_token_id": _token_id(head, "padding"),
    }
    return config | family.extra(head, prefix)


def make_generation_config(head: GgufHead) -> dict[str, Any]:
    """The file's generation_config.json: every token that ends an answer, and how its makers say
    that it is to be sampled."""
    named = [_token_id(head, kind) for kind in ("eos", "eot", "eom")]
    tokens = head.items("tokenizer.ggml.tokens", str)
    kinds = head.items("tokenizer.ggml.token_type", int) if "tokenizer.ggml.token_type" in head.metadata else []
    by_text = [number for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == CONTROL and token in END_TOKENS]
    sampling = {name: head.metadata[f"general.sampling.{key}"] for name, key in SAMPLING.items() if f"general.sampling.{key}" in head.metadata}
    return {"eos_token_id": sorted({each for each in [*named, *by_text] if each is not None})} | sampling


def read_floats(head: GgufHead, name: str) -> list[float]:
    """A small tensor of float32 in one dimension. Raises StartupError."""
    info = head.tensors[name]
    if info.type_id != F32 or len(info.shape) != 1:
        raise StartupError(f"{head.path}: {name} is not one row of float32")
    with info.path.open("rb") as file:
        file.seek(info.offset)
        data = file.read(min(info.shape[0] * 4, 1 << 20))
    if len(data) < info.shape[0] * 4:
        raise StartupError(f"{info.path} ends in the middle of {name}: is it complete?")
    return list(struct.unpack(f"<{info.shape[0]}f", data))


def _vocab_size(head: GgufHead) -> int:
    """The embedding's rows, which may be more than there are tokens."""
    embedding = head.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise StartupError(f"{head.path} has no tensor token_embd.weight: is it a language model?")
    num_tokens = len(head.items("tokenizer.ggml.tokens", str))
    if num_tokens > embedding.shape[0]:
        raise StartupError(f"{head.path} has {num_tokens} tokens, but rows in the embedding for {embedding.shape[0]}")
    return embedding.shape[0]


def _token_id(head: GgufHead, kind: str) -> int | None:
    """A special token's id; None where the file has none, which some say by a number outside the
    vocabulary."""
    value = head.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return value if isinstance(value, int) and 0 <= value < _vocab_size(head) else None


def _rope(head: GgufHead, prefix: str, head_dim: int) -> dict[str, Any]:
    """rope_parameters. Frequencies that a file scales one by one (Llama 3.1 and later, as
    rope_freqs) are longrope's, with one list for all lengths."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": head.real(prefix + "rope.freq_base", 10000.0)}
    num_rotated = head.number(prefix + "rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        rope["partial_rotary_factor"] = num_rotated / head_dim
    kind = head.text(prefix + "rope.scaling.type", "none")
    original = head.number(prefix + "rope.scaling.original_context_length", head.number(prefix + "context_length"))
    if "rope_freqs.weight" in head.tensors:
        factors = read_floats(head, "rope_freqs.weight")
        return rope | _longrope(factors, factors, original, 1.0)
    if "rope_factors_long.weight" in head.tensors and "rope_factors_short.weight" in head.tensors:
        long, short = read_floats(head, "rope_factors_long.weight"), read_floats(head, "rope_factors_short.weight")
        key = prefix + "rope.scaling.attn_factor"
        return rope | _longrope(long, short, original, head.real(key) if key in head.metadata else None)
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise StartupError(f"{head.path}: rope scaling {kind!r} is not supported")
    rope |= {"rope_type": kind, "factor": head.real(prefix + "rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (key := f"{prefix}rope.scaling.yarn_{name}") in head.metadata:
                rope[name] = head.real(key)
    return rope


def _longrope(long: list[float], short: list[float], original: int, attention_factor: float | None) -> dict[str, Any]:
    """attention_factor: None: it follows from the lengths."""
    rope = {"rope_type": "longrope", "long_factor": long, "short_factor": short, "original_max_position_embeddings": original}
    return rope if attention_factor is None else rope | {"attention_factor": attention_factor}


def _llama(head: GgufHead, prefix: str) -> dict[str, Any]:
    """Mistral's files are Llama's, with a sliding window where the model has one."""
    extra: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": "blk.0.ffn_gate.bias" in head.tensors}
    if prefix + "attention.sliding_window" in head.metadata:
        extra |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": head.number(prefix + "attention.sliding_window")}
    return extra


def _qwen(_head: GgufHead, _prefix: str) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _phi3(head: GgufHead, prefix: str) -> dict[str, Any]:
    rope = _rope(head, prefix, head.number(prefix + "embedding_length") // head.number(prefix + "attention.head_count"))
    window = prefix + "attention.sliding_window"
    return {
        "hidden_act": "silu",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", head.number(prefix + "context_length")),
        "sliding_window": head.number(window) if head.metadata.get(window) else None,
    }


def _gemma(head: GgufHead, prefix: str, *, every: int) -> dict[str, Any]:
    """The configuration that Gemma 2 and 3 share; each `every`-th layer attends to everything.
    Their largest models scale queries by hidden / heads, not by head_dim."""
    num_layers = head.number(prefix + "block_count")
    hidden, num_heads = head.number(prefix + "embedding_length"), head.number(prefix + "attention.head_count")
    is_largest = num_layers == (46 if every == 2 else 62)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": head.number(prefix + "attention.sliding_window"),
        "layer_types": ["full_attention" if number % every == every - 1 else "sliding_attention" for number in range(num_layers)],
        "query_pre_attn_scalar": hidden // num_heads if is_largest else head.number(prefix + "attention.key_length", 256),
    }


def _gemma2(head: GgufHead, prefix: str) -> dict[str, Any]:
    caps = {name: head.real(f"{prefix}{name}", default) for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))}
    return _gemma(head, prefix, every=2) | caps


def _gemma3(head: GgufHead, prefix: str) -> dict[str, Any]:
    """Two RoPE bases; scaling is of the layers that attend to everything."""
    every = head.number(prefix + "attention.sliding_window_pattern", 6)
    local = {"rope_type": "default", "rope_theta": head.real(prefix + "rope.freq_base_swa", 10000.0)}
    rope = {"sliding_attention": local, "full_attention": _rope(head, prefix, head.number(prefix + "attention.key_length", 256))}
    return _gemma(head, prefix, every=every) | {"rope_parameters": rope, "attn_logit_softcapping": None, "final_logit_softcapping": None}


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", _llama),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _qwen),
    "phi3": Family("Phi3ForCausalLM", "phi3", _phi3),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", _gemma3),
}
