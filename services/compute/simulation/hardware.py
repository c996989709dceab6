"""How long a step would take: from a GPU's data sheet, or from steps that were measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.compute.scheduling.step_cost import StepCost
from services.compute.simulation.reading import reason
from shared.process.errors import StartupError

BANDWIDTH_SHARE, FLOPS_SHARE = 0.8, 0.6  # of the data sheet that good kernels reach
HOST_S = 1.5e-3  # a step costs this beside its bytes and operations
USABLE_SHARE, ACTIVATIONS = 0.94, 2e9  # of the memory, and bytes that are neither weights nor KV


class Cost(Protocol):
    """Seconds of a step."""

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's shape, from which a step's bytes and operations follow. 16-bit weights and KV."""

    num_parameters: float
    num_layers: int
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        return 2.0 * self.num_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_operations(self) -> int:
        """Operations of a token's attention to another: a multiplication and an addition for each
        number of a query, and again for each of a value."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Hardware:
    memory: float  # bytes
    bandwidth: float  # bytes/s
    flops: float  # dense 16-bit operations/s


MODELS = {
    "llama-2-7b": ModelShape(6.74e9, 32, 32, 32, 128),
    "llama-2-13b": ModelShape(13.02e9, 40, 40, 40, 128),
    "llama-3-8b": ModelShape(8.03e9, 32, 32, 8, 128),
    "llama-3-70b": ModelShape(70.6e9, 80, 64, 8, 128),
    "qwen2.5-0.5b": ModelShape(0.494e9, 24, 14, 2, 64),
    "qwen2.5-7b": ModelShape(7.62e9, 28, 28, 4, 128),
}
HARDWARE = {
    "a100-80g": Hardware(80e9, 2.04e12, 312e12),
    "h100-80g": Hardware(80e9, 3.35e12, 989e12),
    "h200-141g": Hardware(141e9, 4.8e12, 989e12),
    "l4-24g": Hardware(24e9, 0.30e12, 121e12),
    "rtx4090-24g": Hardware(24e9, 1.01e12, 165e12),
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """The larger of the time for the step's bytes (weights once, all KV that attention reads) and
    for its operations, plus the host's."""

    model: ModelShape
    hardware: Hardware

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        num_bytes = self.model.weight_bytes + num_context_tokens * self.model.kv_bytes_per_token
        operations = 2.0 * self.model.num_parameters * num_tokens
        return max(num_bytes / (BANDWIDTH_SHARE * self.hardware.bandwidth), operations / (FLOPS_SHARE * self.hardware.flops)) + HOST_S


def kv_tokens(model: ModelShape, hardware: Hardware) -> int:
    """Tokens whose KV fits beside the weights. Raises StartupError if there is no room."""
    left = hardware.memory * USABLE_SHARE - model.weight_bytes - ACTIVATIONS
    if left < model.kv_bytes_per_token:
        raise StartupError(f"--model: its weights take {model.weight_bytes / 1e9:.0f} GB, the hardware has {hardware.memory / 1e9:.0f}")
    return int(left // model.kv_bytes_per_token)


def find_model(name: str) -> ModelShape:
    """A known shape, or that of a checkpoint folder. Raises StartupError."""
    if name in MODELS:
        return MODELS[name]
    try:
        config = json.loads((Path(name) / "config.json").read_text())
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
        layer = hidden * head_dim * 2 * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
        embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise StartupError(f"--model {name}: no checkpoint folder ({reason(error)}), and not one of {', '.join(MODELS)}") from None
    return ModelShape(layers * layer + embeddings, layers, heads, kv_heads, head_dim)


def find_hardware(name: str, model: ModelShape) -> tuple[Cost, int]:
    """A known GPU, or a .json with the cost of measured steps. Returns the cost and the KV cache's
    tokens. Raises StartupError."""
    if name in HARDWARE:
        return Roofline(model, HARDWARE[name]), kv_tokens(model, HARDWARE[name])
    try:
        fields = json.loads(Path(name).read_text())
        fixed_s, *others = costs = [float(fields[key]) for key in ("fixed_s", "per_token_s", "per_context_token_s")]
        if fixed_s <= 0 or min(others) < 0:
            raise ValueError("costs must not be negative, fixed_s not 0")
        return StepCost(*costs), int(fields["kv_tokens"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"--hardware {name}: not one of {', '.join(HARDWARE)}, nor a file with fixed_s, per_token_s, per_context_token_s and kv_tokens"
        raise StartupError(f"{text} ({reason(error)})") from None
