"""The GGUF architectures that are read: what their metadata say of a model beyond what all say, in
the words of its config.json.

The reference is what llama.cpp's converter writes and what its loader takes for granted.
"""

from typing import Any

from shared.model.gguf.family import FULL, SIGMOID, SLIDING, Family, head_dim_of, read_experts, read_kinds
from shared.model.gguf.library_families import LIBRARY_FAMILIES
from shared.model.gguf.reader import GgufHead
from shared.model.gguf.rope import make_rope
from shared.process.errors import StartupError

# What changes every answer, by the end of its key, and the values that say that there is none of
# it. A family that knows of it names it as read.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_shared_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.dimension_sections": ([], [0, 0, 0, 0]),
}
# Of architectures that people ask for, what no executor here does
LACKS = {
    "mamba": "state spaces",
    "olmo": "norms without weights",
    "phi2": "layers whose attention and MLP run side by side",
    "phimoe": "experts chosen by sparsemixer",
}


def find_family(head: GgufHead) -> Family:
    """Raises StartupError for an architecture that is not supported, and for a model that has what
    its family here has not."""
    name = head.text("general.architecture")
    family = FAMILIES.get(name)
    if family is None:
        lack = f": it has {LACKS[name]}" if name in LACKS else ""
        raise StartupError(
            f"{head.path}: the GGUF architecture {name!r} is not supported{lack}; these are: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    gating = {"expert_gating_func": (SIGMOID, 0)} if family.has_sigmoid_experts else {}
    for key, values in (NEUTRAL | gating).items():
        value = head.metadata.get(f"{name}.{key}", values[0])
        if key not in family.reads and value not in values:
            raise StartupError(
                f"{head.path}: {name}.{key} is {str(value)[:40]}; no model with it is read, of {family.architecture} "
                f"those with {' or '.join(map(str, values))}"
            )
    return family


def _llama(head: GgufHead, prefix: str) -> dict[str, Any]:
    """Mistral's files are Llama's, with a sliding window where the model has one; Mixtral's are,
    with experts."""
    extra: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": _has_mlp_bias(head)}
    window = (
        head.number(prefix + "attention.sliding_window")
        if head.metadata.get(prefix + "attention.sliding_window")
        else None
    )
    if head.metadata.get(prefix + "expert_count"):
        experts = read_experts(head, prefix)
        names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": window}
        return (
            extra
            | names
            | {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}
        )
    if window is not None:
        extra |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return extra


def _mistral3(head: GgufHead, prefix: str) -> dict[str, Any]:
    """Mistral Small 3 is a Llama; Ministral 3 scales queries by their position."""
    key = prefix + "attention.temperature_scale"
    if not head.metadata.get(key):
        return _llama(head, prefix)
    rope = make_rope(head, prefix, head_dim_of(head, prefix))
    scale = head.real(prefix + "rope.scaling.yarn_log_multiplier", 1.0)
    beta = {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": head.real(key)}
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "hidden_act": "silu",
        "sliding_window": None,
        "rope_parameters": rope | beta,
    }


def _qwen(_head: GgufHead, _prefix: str) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen2_moe(head: GgufHead, prefix: str) -> dict[str, Any]:
    shared = next((info.shape[0] for name, info in head.tensors.items() if name.endswith(".ffn_up_shexp.weight")), None)
    size = head.number(prefix + "expert_shared_feed_forward_length", shared)
    return (
        _qwen(head, prefix)
        | read_experts(head, prefix)
        | {"shared_expert_intermediate_size": size, "norm_topk_prob": False, "qkv_bias": True}
    )


def _qwen3_moe(head: GgufHead, prefix: str) -> dict[str, Any]:
    return _qwen(head, prefix) | read_experts(head, prefix) | {"norm_topk_prob": True}


def _gpt_oss(head: GgufHead, prefix: str) -> dict[str, Any]:
    """The borders of its YaRN are not rounded: no file says it."""
    experts = read_experts(head, prefix)
    return {
        "hidden_act": "silu",
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": experts["moe_intermediate_size"],
        "sliding_window": head.number(prefix + "attention.sliding_window"),
        "layer_types": read_kinds(head, prefix, every=2),
        "rope_parameters": make_rope(head, prefix, head_dim_of(head, prefix)) | {"truncate": False},
    }


def _phi3(head: GgufHead, prefix: str) -> dict[str, Any]:
    rope = make_rope(head, prefix, head_dim_of(head, prefix))
    window = prefix + "attention.sliding_window"
    return {
        "hidden_act": "silu",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", head.number(prefix + "context_length")
        ),
        "sliding_window": head.number(window) if head.metadata.get(window) else None,
    }


def _gemma(_head: GgufHead, _prefix: str) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma_windows(head: GgufHead, prefix: str, *, every: int) -> dict[str, Any]:
    """The configuration that Gemma 2 and 3 share; each `every`-th layer attends to everything.
    Their largest models scale queries by hidden / heads, not by head_dim."""
    num_layers = head.number(prefix + "block_count")
    hidden, num_heads = head.number(prefix + "embedding_length"), head.number(prefix + "attention.head_count")
    is_largest = num_layers == (46 if every == 2 else 62)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": head.number(prefix + "attention.sliding_window"),
        "layer_types": read_kinds(head, prefix, every=every),
        "query_pre_attn_scalar": hidden // num_heads
        if is_largest
        else head.number(prefix + "attention.key_length", 256),
    }


def _gemma2(head: GgufHead, prefix: str) -> dict[str, Any]:
    caps = {
        name: head.real(f"{prefix}{name}", default)
        for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
    }
    return _gemma_windows(head, prefix, every=2) | caps


def _gemma3(head: GgufHead, prefix: str) -> dict[str, Any]:
    """Two RoPE bases; scaling is of the layers that attend to everything."""
    local = {"rope_type": "default", "rope_theta": head.real(prefix + "rope.freq_base_swa", 10000.0)}
    rope = {SLIDING: local, FULL: make_rope(head, prefix, head.number(prefix + "attention.key_length", 256))}
    cap = head.real(prefix + "final_logit_softcapping", 0.0) or None
    return _gemma_windows(head, prefix, every=6) | {
        "rope_parameters": rope,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": cap,
    }


def _olmo2(head: GgufHead, prefix: str) -> dict[str, Any]:
    """OLMo 3's files are OLMo 2's with windows; what scales its RoPE is of the layers that attend
    to everything."""
    window = prefix + "attention.sliding_window"
    if not head.metadata.get(window):
        return {"hidden_act": "silu"}
    full = make_rope(head, prefix, head_dim_of(head, prefix))
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "hidden_act": "silu",
        "sliding_window": head.number(window),
        "layer_types": read_kinds(head, prefix, every=4),
        "rope_parameters": {
            SLIDING: {
                "rope_type": "default",
                "rope_theta": head.real(prefix + "rope.freq_base_swa", full["rope_theta"]),
            },
            FULL: full,
        },
    }


def _exaone4(head: GgufHead, prefix: str) -> dict[str, Any]:
    window = prefix + "attention.sliding_window"
    if not head.metadata.get(window):
        return {"hidden_act": "silu", "sliding_window": None}
    return {
        "hidden_act": "silu",
        "sliding_window": head.number(window),
        "layer_types": read_kinds(head, prefix, every=4),
    }


def _granite(head: GgufHead, prefix: str) -> dict[str, Any]:
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {"hidden_act": "silu", "mlp_bias": _has_mlp_bias(head)} | {
        name: head.real(prefix + key) for name, key in keys.items()
    }


def _smollm3(head: GgufHead, prefix: str) -> dict[str, Any]:
    """Every fourth layer does not rotate: no file says it."""
    return {
        "hidden_act": "silu",
        "mlp_bias": _has_mlp_bias(head),
        "use_sliding_window": False,
        "no_rope_layers": [int((number + 1) % 4 != 0) for number in range(head.number(prefix + "block_count"))],
    }


def _seed_oss(head: GgufHead, _prefix: str) -> dict[str, Any]:
    return {"hidden_act": "silu", "mlp_bias": _has_mlp_bias(head)}


def _hunyuan(_head: GgufHead, _prefix: str) -> dict[str, Any]:
    return {"hidden_act": "silu"}


def _hunyuan_moe(head: GgufHead, prefix: str) -> dict[str, Any]:
    experts = read_experts(head, prefix)
    return {
        "hidden_act": "silu",
        "intermediate_size": experts["moe_intermediate_size"],
        "num_experts": experts["num_experts"],
        "moe_topk": experts["num_experts_per_tok"],
    }


def _has_mlp_bias(head: GgufHead) -> bool:
    return "blk.0.ffn_gate.bias" in head.tensors


FAMILIES = {
    **LIBRARY_FAMILIES,
    "exaone4": Family("Exaone4ForCausalLM", "exaone4", _exaone4),
    "gemma": Family("GemmaForCausalLM", "gemma", _gemma),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _gemma2, ("attn_logit_softcapping", "final_logit_softcapping")),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", _gemma3, ("final_logit_softcapping",)),
    "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", _gpt_oss, ("expert_count",)),
    "granite": Family(
        "GraniteForCausalLM",
        "granite",
        _granite,
        ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    ),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _hunyuan),
    "hunyuan-moe": Family(
        "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _hunyuan_moe, ("expert_count", "expert_shared_count")
    ),
    "llama": Family(
        "LlamaForCausalLM", "llama", _llama, ("expert_count",), others=("MistralForCausalLM", "MixtralForCausalLM")
    ),
    "mistral3": Family(
        "LlamaForCausalLM",
        "llama",
        _mistral3,
        ("attention.temperature_scale",),
        others=("Ministral3ForCausalLM", "MistralForCausalLM"),
    ),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", _olmo2, others=("Olmo3ForCausalLM",)),
    "phi3": Family("Phi3ForCausalLM", "phi3", _phi3),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen2moe": Family("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe, ("expert_count", "expert_shared_count")),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _qwen),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe, ("expert_count",)),
    # without images, whose positions have three parts, these are the text models
    "qwen2vl": Family("Qwen2ForCausalLM", "qwen2", _qwen, ("rope.dimension_sections",)),
    "qwen3vl": Family("Qwen3ForCausalLM", "qwen3", _qwen, ("rope.dimension_sections",)),
    "qwen3vlmoe": Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe, ("expert_count", "rope.dimension_sections")),
    "seed_oss": Family("SeedOssForCausalLM", "seed_oss", _seed_oss),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", _smollm3),
}
