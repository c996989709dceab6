"""GGUF metadata as what config.json and generation_config.json would say of the same model."""

from typing import Any

from shared.model.gguf.families import find_family
from shared.model.gguf.family import count_layers, head_dim_of
from shared.model.gguf.reader import GgufHead
from shared.model.gguf.rope import F32, make_rope
from shared.process.errors import StartupError

CONTROL = 3  # a token's type
MAX_LAYERS = 4096
# What ends a turn, whatever a file calls its end token: instruct models have one token for the end
# of a text and another for the end of a turn.
END_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<|eot|>",
        "<EOT>",
        "<|end_of_turn|>",
        "<|return|>",
        "<|call|>",
    }
)


# Of generation_config.json, what a GGUF file calls the same
SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


# By pooling_type
POOLING = {1: "pooling_mode_mean_tokens", 2: "pooling_mode_cls_token", 3: "pooling_mode_lasttoken"}


def make_config(head: GgufHead) -> dict[str, Any]:
    """The file's config.json. Raises StartupError for an architecture that is not supported and for
    metadata that is missing or wrong."""
    family = find_family(head)
    prefix = head.text("general.architecture") + "."
    hidden, num_heads = (head.number(prefix + key) for key in ("embedding_length", "attention.head_count"))
    num_layers = count_layers(head, prefix)
    if num_layers > MAX_LAYERS:
        raise StartupError(f"{head.path}: {prefix}block_count is {num_layers}; at most {MAX_LAYERS} layers are read")
    head_dim = head_dim_of(head, prefix)
    if not family.has_other_values and head.number(prefix + "attention.value_length", head_dim) != head_dim:
        raise StartupError(f"{head.path}: heads whose keys and values differ in length are not supported")
    epsilon = head.real(
        prefix + "attention.layer_norm_rms_epsilon", _real_or_none(head, prefix + "attention.layer_norm_epsilon")
    )
    if epsilon <= 0:
        raise StartupError(f"{head.path}: the norms' epsilon is {epsilon:g}, not positive")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "float32" if all(info.type_id == F32 for info in head.tensors.values()) else "bfloat16",
        "vocab_size": _vocab_size(head),
        "hidden_size": hidden,
        "intermediate_size": head.number(
            prefix + "feed_forward_length", head.metadata.get(prefix + "expert_feed_forward_length")
        ),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": head.number(prefix + "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": head.number(prefix + "context_length"),
        "rms_norm_eps": epsilon,
        "rope_parameters": make_rope(head, prefix, head_dim),
        "tie_word_embeddings": "output.weight" not in head.tensors,
        "attention_bias": "blk.0.attn_q.bias" in head.tensors or "blk.0.attn_qkv.bias" in head.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in head.tensors,
        "bos_token_id": _token_id(head, "bos"),
        "eos_token_id": _token_id(head, "eos"),
        "pad_token_id": _token_id(head, "padding"),
    }
    sections = head.metadata.get(prefix + "rope.dimension_sections")
    if prefix == "qwen2vl." and isinstance(sections, list) and any(sections[:3]):  # positions in time, down and across
        config["rope_parameters"] = config["rope_parameters"] | {"mrope_section": sections[:3]}
    return config | family.extra(head, prefix)


def make_generation_config(head: GgufHead) -> dict[str, Any]:
    """The file's generation_config.json: every token that ends an answer, and how its makers say
    that it is to be sampled."""
    named = [_token_id(head, kind) for kind in ("eos", "eot", "eom")]
    tokens = head.items("tokenizer.ggml.tokens", str)
    kinds = head.items("tokenizer.ggml.token_type", int) if "tokenizer.ggml.token_type" in head.metadata else []
    by_text = [
        number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL and token in END_TOKENS
    ]
    sampling = {
        name: head.metadata[f"general.sampling.{key}"]
        for name, key in SAMPLING.items()
        if f"general.sampling.{key}" in head.metadata
    }
    ends = {each for each in [*named, *by_text] if each is not None}
    if "<|return|>" in tokens:  # gpt-oss' vocabulary, where <|end|> ends a message, and others follow
        ends -= {number for number in ends if tokens[number] == "<|end|>"}
    return {"eos_token_id": sorted(ends)} | sampling


def make_pooling(head: GgufHead) -> dict[str, bool]:
    """The file's 1_Pooling/config.json, where sentence-transformers says how a text's states become one
    vector; empty if the file says nothing of it."""
    number = head.metadata.get(f"{head.text('general.architecture')}.pooling_type")
    return {POOLING[number]: True} if isinstance(number, int) and number in POOLING else {}


def _vocab_size(head: GgufHead) -> int:
    """The embedding's rows, which may be more than there are tokens."""
    embedding = head.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise StartupError(f"{head.path} has no tensor token_embd.weight: is it a language model?")
    num_tokens = len(head.items("tokenizer.ggml.tokens", str))
    if num_tokens > embedding.shape[0]:
        raise StartupError(f"{head.path} has {num_tokens} tokens, but rows in the embedding for {embedding.shape[0]}")
    return embedding.shape[0]


def _real_or_none(head: GgufHead, key: str) -> float | None:
    return head.real(key) if key in head.metadata else None


def _token_id(head: GgufHead, kind: str) -> int | None:
    """A special token's id; None where the file has none, which some say by a number outside the
    vocabulary."""
    value = head.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return value if isinstance(value, int) and 0 <= value < _vocab_size(head) else None
