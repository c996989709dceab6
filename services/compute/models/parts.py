"""ModelParts: as much of a model as a rank has. None: no part of it."""

from dataclasses import dataclass

from torch import Tensor

from services.compute.backends.backend import Backend, LayerWeights, Linear, Mlp, Norms, PerLayerProducts
from services.compute.backends.torch.recurrent import RecurrentWeights
from services.compute.models.config import ModelConfig
from services.compute.models.decoder import EmbeddingRows, PerLayerWeights
from services.compute.models.moe import Expert, MlpBesideMixture, MoeMlp, Router, SharedExpert


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
    recurrent: RecurrentWeights | None = None  # whole
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


def whole_layer(parts: LayerParts, config: ModelConfig, backend: Backend) -> LayerWeights:
    """The layer of a rank that has all of it."""
    assert parts.qkv is not None and parts.output is not None
    mlp: Mlp
    if isinstance(parts.mlp, MlpParts):
        mlp = backend.make_mlp(*_both(parts.mlp))
    else:
        mlp = whole_mixture(parts.mlp, parts.norms, config, backend)
    return LayerWeights(
        parts.norms, parts.qkv, parts.output, mlp, parts.sinks, parts.recurrent, parts.scalar, parts.per_layer
    )


def whole_mixture(parts: MixtureParts, norms: Norms, config: ModelConfig, backend: Backend) -> Mlp:
    """The mixture of a layer, of a rank that has all of it; norms: the layer's."""
    shared, moe = None, config.moe
    assert moe is not None
    if parts.shared is not None:
        shared = SharedExpert(Expert(*_both(parts.shared)), parts.shared_gate)
    grouped = backend.group_experts([(each.gate_up, each.down) for each in parts.experts], moe.num_experts)
    mixture = MoeMlp(backend.row_math, parts.router, parts.experts, shared, grouped)
    if parts.dense is None:
        return mixture
    return MlpBesideMixture(backend.row_math, backend.make_mlp(*_both(parts.dense)), mixture, norms)


def _both(mlp: MlpParts) -> tuple[Linear, Linear]:
    assert mlp.gate_up is not None and mlp.down is not None
    return mlp.gate_up, mlp.down
