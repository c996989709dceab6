"""A family of GGUF files, and the parts that its readers share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.model.gguf.reader import GgufHead
from shared.process.errors import StartupError

FULL, SLIDING = "full_attention", "sliding_attention"
SOFTMAX, SIGMOID = 1, 2  # of expert_gating_func


@dataclass(frozen=True, slots=True)
class Family:
    """The name of a GGUF architecture in a config.json, and what only this family has."""

    architecture: str
    model_type: str
    extra: Callable[[GgufHead, str], dict[str, Any]]  # of (head, prefix of the metadata's keys)
    reads: tuple[str, ...] = ()  # keys of NEUTRAL, whatever their values
    has_sigmoid_experts: bool = False  # chosen so by the class, whatever a file says
    has_other_values: bool = False  # keys and values of a head may differ in length
    others: tuple[str, ...] = ()  # architectures that `extra` finds in some of its files


def count_layers(head: GgufHead, prefix: str) -> int:
    """The number of layers, without those behind them that foresee tokens. Raises StartupError."""
    count = head.number(prefix + "block_count") - int(head.metadata.get(prefix + "nextn_predict_layers", 0))
    if count < 1:
        raise StartupError(f"{head.path}: all {prefix}block_count layers are {prefix}nextn_predict_layers")
    return count


def read_numbers(head: GgufHead, prefix: str, **keys: str) -> dict[str, int]:
    """Fields of a config.json by the keys that they have here. Raises StartupError."""
    return {field: head.number(prefix + key) for field, key in keys.items()}


def per_layer(head: GgufHead, prefix: str, key: str) -> list[int]:
    """A number for each layer, zero where it has none. Raises StartupError."""
    num_layers, value = count_layers(head, prefix), head.require(prefix + key)
    if not isinstance(value, list):
        return [int(head.number(prefix + key))] * num_layers
    if len(value) < num_layers:
        raise StartupError(f"{head.path}: {prefix}{key} has {len(value)} items for {num_layers} layers")
    return [int(each) for each in value[:num_layers]]


def head_dim_of(head: GgufHead, prefix: str) -> int:
    """The size of an attention head. Raises StartupError."""
    return head.number(
        prefix + "attention.key_length",
        head.number(prefix + "embedding_length") // head.number(prefix + "attention.head_count"),
    )


def read_experts(head: GgufHead, prefix: str) -> dict[str, Any]:
    """The mixtures' fields. The file does not say how wide experts are, if it is old: their tensors
    do. Raises StartupError."""
    first = next((name for name in head.tensors if name.endswith((".ffn_down_exps.weight"))), None)
    if first is None or len(head.tensors[first].shape) != 3:
        raise StartupError(f"{head.path}: it has no tensors of experts (ffn_down_exps), or not all in one")
    return {
        "num_experts": head.number(prefix + "expert_count"),
        "num_experts_per_tok": head.number(prefix + "expert_used_count"),
        "moe_intermediate_size": head.number(prefix + "expert_feed_forward_length", head.tensors[first].shape[2]),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            number
            for number in range(count_layers(head, prefix))
            if f"blk.{number}.ffn_gate_inp.weight" not in head.tensors
        ],
    }


def read_kinds(head: GgufHead, prefix: str, *, every: int) -> list[str]:
    """The kind of each layer, listed in the file, or by a period: its last layer attends to
    everything. Raises StartupError."""
    key, num_layers = prefix + "attention.sliding_window_pattern", count_layers(head, prefix)
    pattern = head.metadata.get(key, every)
    if not isinstance(pattern, list):
        every = head.number(key, every)
        return [FULL if (number + 1) % every == 0 else SLIDING for number in range(num_layers)]
    if len(pattern) != num_layers:
        raise StartupError(f"{head.path}: {key} has {len(pattern)} items for {num_layers} layers")
    return [SLIDING if each else FULL for each in pattern]
