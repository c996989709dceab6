"""The GGUF architectures whose layers keep a state: linear attention, Mamba 2, short convolutions.
transformers' modules compute them, and our own executor those that are native."""

from typing import Any

from shared.model.gguf.family import FULL, Family, count_layers, per_layer, read_experts, read_numbers
from shared.model.gguf.reader import GgufHead
from shared.process.errors import StartupError

LINEAR = "linear_attention"
INTERVAL = 4  # each of so many layers attends to everything, where a file does not say which


def _qwen35(head: GgufHead, prefix: str) -> dict[str, Any]:
    """Gated DeltaNet."""
    num_layers, sizes = count_layers(head, prefix), _read_state(head, prefix)
    recurrent = head.metadata.get(prefix + "attention.recurrent_layers")
    if not isinstance(recurrent, list) or len(recurrent) < num_layers:
        every = head.number(prefix + "full_attention_interval", INTERVAL)
        recurrent = [(number + 1) % every != 0 for number in range(num_layers)]
    return {
        "hidden_act": "silu",
        "linear_conv_kernel_dim": sizes["conv_kernel"],
        "linear_key_head_dim": sizes["state_size"],
        "linear_value_head_dim": sizes["head_dim"],
        "linear_num_key_heads": sizes["num_groups"],
        "linear_num_value_heads": sizes["num_heads"],
        "layer_types": [LINEAR if each else FULL for each in recurrent[:num_layers]],
        "linear_value_heads_tiled": prefix != "qwen3next.",  # see RecurrenceConfig.is_tiled
    }


def _qwen35moe(head: GgufHead, prefix: str) -> dict[str, Any]:
    shared = read_numbers(head, prefix, shared_expert_intermediate_size="expert_shared_feed_forward_length")
    return _qwen35(head, prefix) | read_experts(head, prefix) | shared | {"norm_topk_prob": True}


def _lfm2(head: GgufHead, prefix: str) -> dict[str, Any]:
    if head.metadata.get(prefix + "attention.sliding_window"):
        raise StartupError(f"{head.path}: {prefix}attention.sliding_window is not 0; no model with it is read")
    return {
        "norm_eps": head.real(prefix + "attention.layer_norm_rms_epsilon"),
        "conv_L_cache": head.number(prefix + "shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in head.tensors),
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if each else "conv" for each in per_layer(head, prefix, "attention.head_count_kv")],
    }


def _lfm2moe(head: GgufHead, prefix: str) -> dict[str, Any]:
    dense = {"num_dense_layers": int(head.metadata.get(prefix + "leading_dense_block_count", 0))}
    return _lfm2(head, prefix) | read_experts(head, prefix) | dense | {"norm_topk_prob": True, "use_expert_bias": True}


def _granitehybrid(head: GgufHead, prefix: str) -> dict[str, Any]:
    sizes, num_experts = _read_state(head, prefix), int(head.metadata.get(prefix + "expert_count", 0))
    shared = head.number(
        prefix + "expert_shared_feed_forward_length",
        None if num_experts else head.number(prefix + "feed_forward_length"),
    )
    rotates = bool(head.metadata.get(prefix + "rope.scaling.finetuned", False))
    return _mamba2(head, prefix) | {
        "hidden_act": "silu",
        "mamba_expand": sizes["inner_size"] // head.number(prefix + "embedding_length"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": int(head.metadata.get(prefix + "expert_used_count", 0)),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if rotates else "nope",
        "layer_types": [FULL if each else LINEAR for each in per_layer(head, prefix, "attention.head_count_kv")],
        "attention_multiplier": head.real(prefix + "attention.scale"),
        "embedding_multiplier": head.real(prefix + "embedding_scale", 1.0),
        "residual_multiplier": head.real(prefix + "residual_scale", 1.0),
        "logits_scaling": head.real(prefix + "logit_scale", 1.0),
    }


def _falcon_h1(head: GgufHead, prefix: str) -> dict[str, Any]:
    """All multipliers are in the file's weights."""
    return _mamba2(head, prefix) | {
        "hidden_act": "silu",
        "mamba_d_ssm": _read_state(head, prefix)["inner_size"],
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in head.tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": "blk.0.ssm_out.bias" in head.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in head.tensors,
    }


def _nemotron_h(head: GgufHead, prefix: str) -> dict[str, Any]:
    """A layer is Mamba, attention or MLP."""
    sizes, num_kv_heads = _read_state(head, prefix), per_layer(head, prefix, "attention.head_count_kv")
    widths, mlp = per_layer(head, prefix, "feed_forward_length"), "moe" if prefix == "nemotron_h_moe." else "mlp"
    return {
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": sizes["num_heads"],
        "mamba_head_dim": sizes["head_dim"],
        "ssm_state_size": sizes["state_size"],
        "n_groups": sizes["num_groups"],
        "conv_kernel": sizes["conv_kernel"],
        "use_conv_bias": _has_any(head, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has_any(head, "ssm_in.bias"),
        "mlp_bias": _has_any(head, "ffn_up.bias"),
        "attention_bias": _has_any(head, "attn_q.bias"),
        "layer_norm_epsilon": head.real(
            prefix + "attention.layer_norm_rms_epsilon", head.metadata.get(prefix + "attention.layer_norm_epsilon")
        ),
        "layers_block_type": [
            FULL if heads else mlp if width else LINEAR for heads, width in zip(num_kv_heads, widths, strict=True)
        ],
    }


def _nemotron_h_moe(head: GgufHead, prefix: str) -> dict[str, Any]:
    experts = read_experts(head, prefix)
    latent = head.metadata.get(prefix + "moe_latent_size")
    return _nemotron_h(head, prefix) | {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": head.number(prefix + "expert_shared_feed_forward_length"),
        "n_shared_experts": head.number(prefix + "expert_shared_count", 1),
        "moe_latent_size": latent,
        "n_group": head.number(prefix + "expert_group_count", 1),
        "topk_group": head.number(prefix + "expert_group_used_count", 1),
        "norm_topk_prob": bool(head.metadata.get(prefix + "expert_weights_norm", True)),
        "routed_scaling_factor": head.real(prefix + "expert_weights_scale", 1.0),
    }


def _read_state(head: GgufHead, prefix: str) -> dict[str, int]:
    """The sizes of a state, under names of our own; head_dim: of a head of values."""
    sizes = read_numbers(
        head,
        prefix + "ssm.",
        conv_kernel="conv_kernel",
        state_size="state_size",
        num_groups="group_count",
        num_heads="time_step_rank",
        inner_size="inner_size",
    )
    if sizes["inner_size"] % sizes["num_heads"] or sizes["num_heads"] % sizes["num_groups"]:
        raise StartupError(
            f"{head.path}: {prefix}ssm.inner_size is {sizes['inner_size']}, of {sizes['num_heads']} heads in "
            f"{sizes['num_groups']} groups, which do not divide it"
        )
    return sizes | {"head_dim": sizes["inner_size"] // sizes["num_heads"]}


def _mamba2(head: GgufHead, prefix: str) -> dict[str, Any]:
    sizes = _read_state(head, prefix)
    return {
        "mamba_n_heads": sizes["num_heads"],
        "mamba_d_head": sizes["head_dim"],
        "mamba_n_groups": sizes["num_groups"],
        "mamba_d_state": sizes["state_size"],
        "mamba_d_conv": sizes["conv_kernel"],
        "mamba_conv_bias": _has_any(head, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has_any(head, "ssm_in.bias"),
    }


def _has_any(head: GgufHead, end: str) -> bool:
    """Whether a layer has such a tensor."""
    return any(name.endswith("." + end) for name in head.tensors)


_SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
_OF_NEMOTRON = (
    "expert_count",
    "expert_group_count",
    "expert_shared_count",
    "expert_weights_scale",
    "nextn_predict_layers",
)
HYBRID_FAMILIES = {
    "falcon-h1": Family("FalconH1ForCausalLM", "falcon_h1", _falcon_h1),
    "granitehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        _granitehybrid,
        ("expert_count", *_SCALES),
    ),
    "lfm2": Family("Lfm2ForCausalLM", "lfm2", _lfm2),
    "lfm2moe": Family("Lfm2MoeForCausalLM", "lfm2_moe", _lfm2moe, ("expert_count",), has_sigmoid_experts=True),
    "nemotron_h": Family("NemotronHForCausalLM", "nemotron_h", _nemotron_h),
    "nemotron_h_moe": Family(
        "NemotronHForCausalLM", "nemotron_h", _nemotron_h_moe, _OF_NEMOTRON, has_sigmoid_experts=True
    ),
    "qwen35": Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        _qwen35,
        ("nextn_predict_layers", "rope.dimension_sections"),
    ),
    "qwen35moe": Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _qwen35moe,
        ("expert_count", "nextn_predict_layers", "rope.dimension_sections"),
    ),
    "qwen3next": Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        _qwen35moe,
        ("expert_count", "nextn_predict_layers"),
    ),
}
