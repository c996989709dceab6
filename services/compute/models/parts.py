"""ModelParts: as much of a model as a rank has. None: no part of it."""

from dataclasses import dataclass

from torch import Tensor

from services.compute.backends.backend import Linear, Norms, PerLayerProducts
from services.compute.models.decoder import EmbeddingRows, PerLayerWeights
from services.compute.models.moe import Expert, Router


@dataclass(frozen=True, slots=True)
class MlpParts:
    """Columns of a gated MLP: gate and up of the same numbers, and other numbers of down."""

    gate_up: Linear | None  # gated
    down: Linear | None


@dataclass(frozen=True, slots=True)
class MixtureParts:
    """Some of a mixture's experts, each whole, and columns of the expert that all tokens have."""

    router: Router  # whole
    numbers: range  # of the experts that are here
    experts: tuple[Expert, ...]
    shared: MlpParts | None  # None: the model has none
    shared_gate: Linear | None  # whole; None: it is added as it is
    dense: MlpParts | None = None  # of the MLP beside it


@dataclass(frozen=True, slots=True)
class LayerParts:
    """backend.py's LayerWeights, in parts."""

    norms: Norms  # whole
    qkv: Linear | None  # of the rank's query heads, and of the KV heads that these read
    output: Linear | None
    mlp: MlpParts | MixtureParts
    sinks: Tensor | None  # of the rank's query heads, float32
    scalar: float = 1.0
    per_layer: PerLayerProducts | None = None


@dataclass(frozen=True, slots=True)
class ModelParts:
    """decoder.py's ModelWeights, in parts."""

    embedding: EmbeddingRows | None  # whole: only one rank has it
    layers: list[LayerParts]  # of the stage
    norm: Tensor  # the last one, whole
    lm_head: Linear | None
    per_layer: PerLayerWeights | None = None
