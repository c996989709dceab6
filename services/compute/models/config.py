"""ModelConfig: what the executor needs of a config.json (architectures.py reads them)."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from services.compute.backends.torch.recurrent import RecurrenceConfig
from services.compute.models.moe import MoeConfig
from services.compute.models.rope import Rope
from services.compute.models.sizes import LARGEST, LARGEST_WINDOW, check_size

PACKED_METHOD = "penstock"  # quantization_config's quant_method

IN_EIGHT_BITS = {"w4": "w8a8", "nf4": "w8a8"}  # for layers that cost more than others


@dataclass(frozen=True, slots=True)
class Packed:
    """How a checkpoint's layers are quantized and packed; what `penstock quantize` writes into
    config.json as quantization_config."""

    quantization: str
    group: int
    attention_output: bool = False  # whether it has four bits, where other layers have, and not eight
    lm_head: bool = False  # the same

    @property
    def option(self) -> str:
        """The first option of the command line that asks for it; empty: nothing is quantized."""
        if self.quantization != "none":
            return f"--quantization {self.quantization}"
        return "--quantize-attention-output" * self.attention_output or "--quantize-lm-head" * self.lm_head

    @property
    def of_output(self) -> str:
        return self.quantization if self.attention_output else IN_EIGHT_BITS.get(self.quantization, self.quantization)

    @property
    def of_head(self) -> str:
        return self.quantization if self.lm_head else IN_EIGHT_BITS.get(self.quantization, self.quantization)


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries grow with their positions: by 1 + weight * log(1 + floor(position / length)) (Llama 4, Ministral 3)."""

    weight: float
    length: int


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a layer's keys and values."""

    num_kv_heads: int
    head_dim: int
    kv_projections: int = 2  # as those of attention's Heads


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of attention and a gated MLP, layer on layer. What has a default here is Llama's
    way; other families set it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str  # of reference.ACTIVATIONS: of the MLP's gate
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    is_tied: bool  # the LM head is the embedding
    attention_scale: float  # multiplies q . k
    ropes: tuple[Rope, ...]  # that some layer has
    rope_of_layer: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]  # per layer: how many tokens back attention sees
    full_shape: HeadShape | None = None  # of layers without a window; None: as num_kv_heads and head_dim say
    # the last layers have no keys and values: of each the layer whose they read
    shared_caches: tuple[int, ...] = ()
    shared_intermediate_size: int | None = None  # of the MLPs of those layers; None: as of others
    per_layer_size: int = 0  # of a token's embedding for each layer; 0: there is none
    per_layer_vocab_size: int = 0  # tokens that have one
    has_qk_norm: bool = False  # RMSNorm of q and of k
    has_value_norm: bool = False  # RMSNorm of each head of v, without a weight
    is_qk_norm_joint: bool = False  # over all heads together, not over each
    norms_after_rotation: bool = False  # of q and k; else before
    has_pre_norms: bool = True  # of what goes into attention and MLP
    has_post_norms: bool = False  # of what comes out, before it is added to the residual
    has_layer_scalar: bool = False  # a number that multiplies what leaves a layer
    norm_offset: float = 0.0  # a norm multiplies by this + its weight
    has_fused_projections: bool = False  # q, k and v are one tensor of the checkpoint, gate and up another
    rotates_neighbours: bool = False  # a head's dimensions 2i and 2i + 1 of the checkpoint; else i and i + half
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual
    logits_multiplier: float = 1.0
    has_sinks: bool = False  # a score of each head in each softmax, without a value
    temperature: QueryTemperature | None = None  # None: of all sequences that are taken it is 1
    attention_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: no cap
    logits_cap: float = 0.0
    is_bare: bool = False  # the checkpoint has no head: it makes embeddings, and no text
    moe: MoeConfig | None = None
    has_attention_gate: bool = False  # a column of q_proj for each of q, a head's behind its own: Heads' gate
    recurrence: RecurrenceConfig | None = None
    recurrent_layers: frozenset[int] = frozenset()  # which keep states, and no keys and values
    packed: Packed | None = None
    quantization_config: dict[str, Any] | None = None  # config.json's, of a format of weights/formats/

    def shape_of(self, layer: int) -> HeadShape:
        """The heads of a layer's keys and values."""
        is_full = self.full_shape is not None and self.sliding_windows[layer] is None
        shape = self.full_shape if is_full else HeadShape(self.num_kv_heads, self.head_dim)
        assert shape is not None
        return replace(shape, kv_projections=0) if layer >= self.num_own else shape

    @property
    def num_own(self) -> int:
        """The layers before those that read others' keys and values."""
        return self.num_layers - len(self.shared_caches)

    def intermediate_size_of(self, layer: int) -> int:
        return (
            self.intermediate_size if layer < self.num_own else self.shared_intermediate_size or self.intermediate_size
        )

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """The KV heads of each layer that has keys and values, and their dimensions."""
        shapes = [self.shape_of(layer) for layer in range(self.num_own) if layer not in self.recurrent_layers]
        return tuple((shape.num_kv_heads, shape.head_dim) for shape in shapes)

    def __post_init__(self) -> None:
        """Raises ValueError for what no model can be."""
        for name in (each.name for each in fields(self) if each.type is float):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}, not a number")
        if self.rms_norm_eps <= 0:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps}, not positive")
        for window in set(self.sliding_windows) - {None}:
            check_size("sliding_window", window, LARGEST_WINDOW)
        if not all(isinstance(number, int) and 0 <= number < len(self.ropes) for number in set(self.rope_of_layer)):
            raise ValueError("what it says of the layers that rotate (no_rope_layers) is not a 0 or 1 for each")
        if self.full_shape is not None:
            check_size("the KV heads of layers without a window", self.full_shape.num_kv_heads, self.num_heads)
            check_size("the dimensions of heads without a window", self.full_shape.head_dim, LARGEST["head_dim"])
        widest = max(self.head_dim, self.full_shape.head_dim if self.full_shape is not None else 0)
        for rope in self.ropes:
            if (
                2 * len(rope.inv_freq) > widest
                or not bool(rope.inv_freq.isfinite().all())
                or not math.isfinite(rope.scale)
            ):
                raise ValueError(
                    f"its RoPE has frequencies that are not finite, or more than a head of {widest} dimensions turns by"
                )
