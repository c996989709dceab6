"""Readers of what a config.json says of mixtures of experts, for those of architectures.py."""

from dataclasses import replace
from typing import Any

from services.compute.backends.backend import RouterConfig
from services.compute.models.moe import MoeConfig
from services.compute.models.sizes import LARGEST, check_size
from shared.process.errors import StartupError

Config = dict[str, Any]  # a parsed config.json


def mixture_of_all_layers(config: Config, **router: Any) -> MoeConfig:
    """The same in each layer, with experts as large as config.json's MLP. router: the rest of RouterConfig."""
    return MoeConfig(
        num_experts=num_experts_of(config),
        router=RouterConfig(config["num_experts_per_tok"], **router),
        intermediate_size=config["intermediate_size"],
        sparse_layers=frozenset(range(config["num_hidden_layers"])),
    )


def qwen_mixture(config: Config) -> MoeConfig:
    """Every decoder_sparse_step-th layer has a mixture, but for mlp_only_layers."""
    plain, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    return MoeConfig(
        num_experts=num_experts_of(config),
        router=RouterConfig(
            config["num_experts_per_tok"], has_normalized_weights=bool(config.get("norm_topk_prob", False))
        ),
        intermediate_size=config["moe_intermediate_size"],
        sparse_layers=frozenset(
            layer for layer in range(config["num_hidden_layers"]) if layer not in plain and (layer + 1) % step == 0
        ),
    )


def gated_qwen_mixture(config: Config) -> MoeConfig:
    """The same with an expert that all tokens have, weighted by a score."""
    size = config["shared_expert_intermediate_size"]
    return replace(
        qwen_mixture(config), shared_intermediate_size=size, has_shared_gate=size != 0, shared_name="shared_expert"
    )


def deepseek_mixture(config: Config) -> MoeConfig:
    """DeepSeek V3's router, in the layers after the first ones."""
    return MoeConfig(
        num_experts=config["n_routed_experts"],
        router=RouterConfig(
            config["num_experts_per_tok"],
            has_normalized_weights=bool(config.get("norm_topk_prob", False)),
            has_sigmoid_scores=True,
            has_correction=True,
            num_groups=config.get("n_group") or 1,
            num_active_groups=config.get("topk_group") or 1,
            scaling=config.get("routed_scaling_factor", 1.0),
        ),
        intermediate_size=config["moe_intermediate_size"],
        sparse_layers=frozenset(range(config["first_k_dense_replace"], config["num_hidden_layers"])),
        shared_intermediate_size=_shared_size(config, "n_shared_experts"),
    )


def lfm2_mixture(config: Config) -> MoeConfig:
    """The layers after the first ones, with experts scored by sigmoid."""
    return MoeConfig(
        num_experts=num_experts_of(config),
        router=RouterConfig(
            config["num_experts_per_tok"],
            has_normalized_weights=bool(config["norm_topk_prob"]),
            has_sigmoid_scores=True,
            has_correction=bool(config["use_expert_bias"]),
            scaling=config.get("routed_scaling_factor", 1.0),
        ),
        intermediate_size=config["moe_intermediate_size"],
        sparse_layers=frozenset(range(config["num_dense_layers"], config["num_hidden_layers"])),
    )


def ernie_mixture(config: Config) -> MoeConfig:
    """ERNIE's: every moe_layer_interval-th layer's from moe_layer_start_index to moe_layer_end_index."""
    num_layers, step = config["num_hidden_layers"], config["moe_layer_interval"]
    first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
    layers = range(first, num_layers if last == -1 else last + 1)
    return MoeConfig(
        num_experts=config["moe_num_experts"],
        router=RouterConfig(config["moe_k"], has_normalized_weights=True, has_correction=True),
        intermediate_size=config["moe_intermediate_size"],
        sparse_layers=frozenset(layer for layer in range(num_layers) if layer in layers and (layer + 1) % step == 0),
        shared_intermediate_size=_shared_size(config, "moe_num_shared_experts"),
    )


def hunyuan_mixture(config: Config) -> MoeConfig:
    """Hunyuan's: in each layer, with an expert that all tokens have, as large as the others. Raises
    StartupError."""
    counts = config["moe_topk"]
    counts = counts[: config["num_hidden_layers"]] if isinstance(counts, list) else [counts]
    if len(set(counts)) != 1:
        raise StartupError(f"config.json: moe_topk {counts} is not supported; one number for all layers is")
    moe = mixture_of_all_layers(config | {"num_experts_per_tok": counts[0]}, has_normalized_weights=True)
    return replace(moe, shared_intermediate_size=moe.intermediate_size, router_name="gate.wg", shared_name="shared_mlp")


def _shared_size(config: Config, name: str) -> int:
    """The size of experts that all tokens have, which together are one larger. name: of their number."""
    if config[name] == 0:
        return 0
    for each in ("moe_intermediate_size", name):
        check_size(each, config[each], LARGEST["intermediate_size"])
    return int(config["moe_intermediate_size"] * config[name])


def num_experts_of(config: Config) -> Any:
    """transformers 5 writes num_experts as num_local_experts."""
    return config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
