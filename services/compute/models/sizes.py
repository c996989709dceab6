"""How large the sizes of a config.json may be. What no model has would fill the memory, or
overflow, before the checkpoint's tensors contradict it."""

from typing import Any

LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 4096,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 40,
}
# null is as if they were not there
OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
LARGEST_WINDOW = 2**31 - 1
LARGEST_MIXTURE = 1 << 16  # experts


def check_sizes(config: dict[str, Any]) -> None:
    """Raises ValueError for a size that is not a positive integer, or larger than any model's."""
    for name, largest in LARGEST.items():
        if name in config and not (config[name] is None and name in OPTIONAL):
            check_size(name, config[name], largest)


def check_size(name: str, value: object, largest: int) -> None:
    if type(value) is not int or not 0 < value <= largest:
        raise ValueError(f"{name} is {value!r}, not an integer from 1 to {largest}")
