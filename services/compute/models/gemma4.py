"""The reader of Gemma 4's config.json: of the dense forms and of the mixtures. Those with embeddings of each layer
run on transformers' modules."""

import math
from dataclasses import replace
from typing import Any

from services.compute.backends.backend import RouterConfig
from services.compute.models.config import HeadShape, ModelConfig
from services.compute.models.moe import MoeConfig
from services.compute.models.rope import read_rope
from services.compute.models.sizes import check_sizes
from shared.process.errors import StartupError

Config = dict[str, Any]  # a parsed config.json

FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types
DEFAULTS: Config = {
    "head_dim": 256,
    "global_head_dim": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}


def is_native_gemma4(config: Config) -> bool:
    """Whether our own executor has all that the model is made of. config: with the defaults of its class."""
    return not any(config.get(name) for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"))


def gemma4(read: ModelConfig, config: Config, max_model_len: int) -> ModelConfig:
    """read: of the fields that all families have. Layers without a window have heads of another size, and
    perhaps number, whose frequencies are those of all their dimensions, of which the last ones are zero. Raises
    StartupError."""
    if not is_native_gemma4(config):
        raise StartupError(
            "this form of Gemma 4 (embeddings of each layer, or layers that read others' keys) is not supported "
            "natively: --model-impl transformers"
        )
    kinds = list(
        config.get("layer_types") or [FULL if (number + 1) % 6 == 0 else SLIDING for number in range(read.num_layers)]
    )
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise StartupError(f"layers of the type {unknown[0]} are not supported; these are: {FULL}, {SLIDING}")
    if kinds:
        kinds[-1] = FULL  # as the class has it, whatever the file says
    shape = full_shape(config, kinds, read.num_kv_heads)
    ropes = tuple(
        read_rope(config, head_dim, max_model_len, kind)
        for kind, head_dim in ((SLIDING, read.head_dim), (FULL, shape.head_dim))
    )
    return replace(
        read,
        has_qk_norm=True,
        has_value_norm=True,
        has_post_norms=True,
        has_layer_scalar=True,
        attention_scale=1.0,
        embedding_multiplier=math.sqrt(read.hidden_size),
        logits_cap=config.get("final_logit_softcapping") or 0.0,
        full_shape=shape,
        moe=mixture_of(config) if config.get("enable_moe_block") else None,
        ropes=ropes,
        rope_of_layer=tuple(int(kind == FULL) for kind in kinds),
        sliding_windows=tuple(config["sliding_window"] if kind == SLIDING else None for kind in kinds),
    )


def mixture_of(config: Config) -> MoeConfig:
    """Beside the MLP of each layer."""
    return MoeConfig(
        num_experts=config["num_experts"],
        router=RouterConfig(config["top_k_experts"], has_normalized_weights=True),
        intermediate_size=config["moe_intermediate_size"],
        sparse_layers=frozenset(range(config["num_hidden_layers"])),
        is_beside_mlp=True,
    )


def full_shape(config: Config, kinds: list[str], num_kv_heads: int) -> HeadShape:
    """The heads of layers without a window: as published models say it, or as transformers writes it, layer by
    layer. Raises StartupError."""
    are_keys = bool(config.get("attention_k_eq_v", False))
    own = config.get("per_layer_config")
    if own is None:
        of_full = config.get("num_global_key_value_heads") if are_keys else None
        sizes = {"head_dim": config["global_head_dim"], "num_key_value_heads": of_full or num_kv_heads}
    else:
        layers = {number for number, kind in enumerate(kinds) if kind == FULL}
        found = list(own.values())
        if set(map(int, own)) != layers or not found or any(each != found[0] for each in found):
            raise StartupError(
                f"config.json: per_layer_config must have the same sizes for each {FULL} layer, and for no other"
            )
        sizes = {"num_key_value_heads": num_kv_heads} | dict(found[0])
        if unknown := sorted(set(sizes) - {"head_dim", "num_key_value_heads"}):
            raise StartupError(f"config.json: {unknown[0]} in per_layer_config is not supported")
    check_sizes(sizes)
    return HeadShape(sizes["num_key_value_heads"], sizes["head_dim"], are_keys)
