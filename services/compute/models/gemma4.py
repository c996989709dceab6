"""The reader of Gemma 4's config.json."""

import math
from dataclasses import replace
from typing import Any

from services.compute.backends.backend import RouterConfig
from services.compute.models.config import HeadShape, ModelConfig
from services.compute.models.moe import MoeConfig
from services.compute.models.rope import read_rope
from services.compute.models.sizes import LARGEST, check_size, check_sizes
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


def gemma4(read: ModelConfig, config: Config, max_model_len: int) -> ModelConfig:
    """read: of the fields that all families have. Layers without a window have heads of another size, and
    perhaps number, whose frequencies are those of all their dimensions, of which the last ones are zero. Raises
    StartupError."""
    kinds = list(
        config.get("layer_types") or [FULL if (number + 1) % 6 == 0 else SLIDING for number in range(read.num_layers)]
    )
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise StartupError(f"layers of the type {unknown[0]} are not supported; these are: {FULL}, {SLIDING}")
    if kinds:
        kinds[-1] = FULL  # as the class has it, whatever the file says
    shape, shared = full_shape(config, kinds, read.num_kv_heads), shared_caches(config, kinds)
    per_layer_size, num_own = config.get("hidden_size_per_layer_input") or 0, len(kinds) - len(shared)
    if per_layer_size:
        check_size("hidden_size_per_layer_input", per_layer_size, LARGEST["hidden_size"])
        check_size("vocab_size_per_layer_input", config["vocab_size_per_layer_input"], LARGEST["vocab_size"])
        if config["vocab_size_per_layer_input"] < read.vocab_size:
            raise StartupError(
                f"config.json: vocab_size_per_layer_input {config['vocab_size_per_layer_input']} is less than "
                f"vocab_size, {read.vocab_size}: some tokens would have no embedding for the layers"
            )
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
        ropes=ropes * 2 if shared else ropes,  # for each the heads of a layer, and then of one without keys
        rope_of_layer=tuple(int(kind == FULL) + 2 * (layer >= num_own) for layer, kind in enumerate(kinds)),
        shared_caches=shared,
        shared_intermediate_size=2 * read.intermediate_size if config.get("use_double_wide_mlp") else None,
        per_layer_size=per_layer_size,
        per_layer_vocab_size=config["vocab_size_per_layer_input"] if per_layer_size else 0,
        sliding_windows=tuple(config["sliding_window"] if kind == SLIDING else None for kind in kinds),
    )


def mixture_of(config: Config) -> MoeConfig:
    """Beside the MLP of each layer."""
    return MoeConfig(
        num_experts=config["num_experts"],
        router=RouterConfig(config["top_k_experts"], has_normalized_weights=True),
        intermediate_size=config["moe_intermediate_size"],
        sparse_layers=frozenset(range(config["num_hidden_layers"])),
        router_name="router.proj",
        is_beside_mlp=True,
    )


def shared_caches(config: Config, kinds: list[str]) -> tuple[int, ...]:
    """For each of the last layers, the last one before them that is of its kind. Raises StartupError."""
    count = config.get("num_kv_shared_layers") or 0
    if type(count) is not int or not 0 <= count < len(kinds):
        raise StartupError(f"config.json: num_kv_shared_layers is {count!r}, of {len(kinds)} layers")
    last = {kind: layer for layer, kind in enumerate(kinds[: len(kinds) - count])}
    if missing := [kind for kind in kinds[len(kinds) - count :] if kind not in last]:
        raise StartupError(
            f"config.json: num_kv_shared_layers is {count}, and no layer before those has keys that a {missing[0]} "
            "layer could read"
        )
    return tuple(last[kind] for kind in kinds[len(kinds) - count :])


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
    return HeadShape(sizes["num_key_value_heads"], sizes["head_dim"], 1 if are_keys else 2)
