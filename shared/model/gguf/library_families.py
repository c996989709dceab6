"""The GGUF architectures whose tensors' names are those of the `gguf` package's own table; most run on
transformers' modules."""

import math
from typing import Any

from shared.model.gguf.family import (
    FULL,
    SIGMOID,
    SLIDING,
    SOFTMAX,
    Family,
    count_layers,
    head_dim_of,
    per_layer,
    read_experts,
    read_kinds,
    read_numbers,
)
from shared.model.gguf.hybrid_families import HYBRID_FAMILIES
from shared.model.gguf.reader import GgufHead
from shared.model.gguf.rope import make_rope, read_floats
from shared.process.errors import StartupError

STARCODER_WINDOW = 4096  # of all published models
LLAMA4_CHUNK, LLAMA4_WITHOUT_NORM = 8192, 128  # tokens; experts of the model without norms of queries and keys
STILL = 1e20  # what divides a frequency that rotates nothing, at least


def _deepseek2(head: GgufHead, prefix: str) -> dict[str, Any]:
    """DeepSeek V2; V3 where experts are chosen by sigmoid. Old files have a head's whole sizes where
    newer ones have those of the compressed keys, and `_mla` behind the name of the whole ones."""
    experts, num_rotated = read_experts(head, prefix), head.number(prefix + "rope.dimension_count")
    has_sigmoid = _has_sigmoid(head, prefix)
    is_normalized = bool(head.metadata.get(prefix + "expert_weights_norm", False))
    is_v3 = has_sigmoid and experts["num_experts"] == 256  # of which old files don't say that they have groups
    key_size = head.number(prefix + "attention.key_length_mla", head.number(prefix + "attention.key_length"))
    num_groups = head.number(prefix + "expert_group_count", 8 if is_v3 else 1)
    if key_size <= num_rotated:
        raise StartupError(
            f"{head.path}: heads of {key_size} dimensions, of which {num_rotated} are rotated, leave none for the rest"
        )
    config = {
        "hidden_act": "silu",
        "head_dim": num_rotated,
        "num_key_value_heads": head.number(prefix + "attention.head_count"),
        "q_lora_rank": head.number(prefix + "attention.q_lora_rank")
        if prefix + "attention.q_lora_rank" in head.metadata
        else None,
        "kv_lora_rank": head.number(prefix + "attention.kv_lora_rank"),
        "qk_rope_head_dim": num_rotated,
        "qk_nope_head_dim": key_size - num_rotated,
        "v_head_dim": head.number(
            prefix + "attention.value_length_mla", head.number(prefix + "attention.value_length")
        ),
        "rope_parameters": _deepseek_rope(head, prefix, num_rotated),
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "n_shared_experts": head.number(prefix + "expert_shared_count"),
        "first_k_dense_replace": len(experts["mlp_only_layers"]),
        "routed_scaling_factor": head.real(prefix + "expert_weights_scale", 1.0),
        "norm_topk_prob": is_normalized,
        "n_group": num_groups,
        "topk_group": head.number(prefix + "expert_group_used_count", 4 if is_v3 else 1),
    }
    if has_sigmoid:
        return config | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "rope_interleave": True,
        }
    if is_normalized:
        raise StartupError(
            f"{head.path}: {prefix}expert_weights_norm, with experts chosen by softmax, is not supported"
        )
    return config | {"topk_method": "group_limited_greedy" if num_groups > 1 else "greedy"}


def _has_sigmoid(head: GgufHead, prefix: str) -> bool:
    """Whether experts are chosen by sigmoid; old files say it by the biases of the choice only."""
    has_biases = any(name.endswith("exp_probs_b.bias") for name in head.tensors)
    gating = head.metadata.get(prefix + "expert_gating_func") or (SIGMOID if has_biases else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID) or (gating == SOFTMAX and has_biases):
        raise StartupError(f"{head.path}: {prefix}expert_gating_func is {str(gating)[:40]}; no model with it is read")
    return bool(gating == SIGMOID)


def _deepseek_rope(head: GgufHead, prefix: str, num_rotated: int) -> dict[str, Any]:
    """YaRN scales all scores by mscale_all_dim, a tenth of which is in the file. Of the rotated
    dimensions' own scale the file says nothing: in all published models it is the same."""
    rope = make_rope(head, prefix, num_rotated)
    if rope["rope_type"] == "yarn" and (scale := 10.0 * head.real(prefix + "rope.scaling.yarn_log_multiplier", 0.0)):
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    return rope


def _gemma3n(head: GgufHead, prefix: str) -> dict[str, Any]:
    """An activation's sparsity is in the file as the quantile of a normal distribution."""
    num_layers = head.number(prefix + "block_count")
    num_shared = int(head.metadata.get(prefix + "attention.shared_kv_layers", 0))
    local_base = head.real(prefix + "rope.freq_base_swa", 10000.0)
    if not 0 <= num_shared < num_layers or local_base <= 0:
        raise StartupError(
            f"{head.path}: {num_shared} of {num_layers} layers take keys from others, RoPE's base is {local_base:g}: "
            "no model is so"
        )
    quantiles = head.items(prefix + "activation_sparsity_scale", float)
    laurel, per_layer = head.tensors.get("blk.0.laurel_l.weight"), head.tensors.get("per_layer_token_embd.weight")
    if laurel is None or per_layer is None or len(quantiles) != num_layers:
        raise StartupError(
            f"{head.path}: it lacks a tensor laurel_l or per_layer_token_embd, or says the sparsity of "
            f"{len(quantiles)} layers of {num_layers}"
        )
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": head.number(prefix + "attention.sliding_window"),
        "layer_types": read_kinds(head, prefix, every=5),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": local_base},
            FULL: make_rope(head, prefix, head_dim_of(head, prefix)),
        },
        "final_logit_softcapping": head.real(prefix + "final_logit_softcapping", 30.0),
        "vocab_size_per_layer_input": per_layer.shape[0],
        "hidden_size_per_layer_input": head.number(prefix + "embedding_length_per_layer_input"),
        "altup_active_idx": int(head.metadata.get(prefix + "altup.active_idx", 0)),
        "altup_num_inputs": head.number(prefix + "altup.num_inputs"),
        "num_kv_shared_layers": num_shared,
        "laurel_rank": laurel.shape[0],
        "activation_sparsity_pattern": [
            round((1 + math.erf(quantile / math.sqrt(2))) / 2, 6) for quantile in quantiles
        ],
    }


def _glm4(head: GgufHead, prefix: str) -> dict[str, Any]:
    return {"hidden_act": "silu", "rope_parameters": _rope_in_part(head, prefix)}


def _rope_in_part(head: GgufHead, prefix: str) -> dict[str, Any]:
    """The rotary parameters of families of which the library takes half, or a quarter, if nobody says
    how many dimensions are rotated."""
    return {"partial_rotary_factor": 1.0} | make_rope(head, prefix, head_dim_of(head, prefix))


def _cohere(head: GgufHead, prefix: str) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "layer_norm_eps": head.real(prefix + "attention.layer_norm_epsilon"),
        "logit_scale": head.real(prefix + "logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in head.tensors,
    }


def _cohere2(head: GgufHead, prefix: str) -> dict[str, Any]:
    windows = {
        "sliding_window": head.number(prefix + "attention.sliding_window"),
        "layer_types": read_kinds(head, prefix, every=4),
    }
    return _cohere(head, prefix) | windows


def _starcoder2(head: GgufHead, prefix: str) -> dict[str, Any]:
    """The window is not in the file."""
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": head.real(prefix + "attention.layer_norm_epsilon"),
        "use_bias": True,
        "sliding_window": STARCODER_WINDOW if head.number(prefix + "context_length") > STARCODER_WINDOW else None,
    }


def _stablelm(head: GgufHead, prefix: str) -> dict[str, Any]:
    if "blk.0.attn_q_norm.weight" in head.tensors:
        raise StartupError(f"{head.path}: StableLM's norms of each head's queries and keys are not supported")
    return {
        "hidden_act": "silu",
        "layer_norm_eps": head.real(prefix + "attention.layer_norm_epsilon"),
        "use_qkv_bias": "blk.0.attn_q.bias" in head.tensors,
        "rope_parameters": _rope_in_part(head, prefix),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in head.tensors,
    }


def _gemma4(head: GgufHead, prefix: str) -> dict[str, Any]:
    """Layers with a window have heads, and some models key and value heads, of their own number and
    size. Of RoPE in layers without, a part of the frequencies is infinitely slow."""
    kinds, num_kv_heads = read_kinds(head, prefix, every=6), per_layer(head, prefix, "attention.head_count_kv")
    sizes = dict(zip(kinds, num_kv_heads, strict=True))
    num_shared = int(head.metadata.get(prefix + "attention.shared_kv_layers", 0))
    own = kinds[: len(kinds) - num_shared]
    has_values = all(f"blk.{number}.attn_v.weight" in head.tensors for number in range(len(own)))
    factors = read_floats(head, "rope_freqs.weight") if "rope_freqs.weight" in head.tensors else [1.0]
    per_layer_rows = head.tensors.get("per_layer_token_embd.weight")
    experts = read_experts(head, prefix) if head.metadata.get(prefix + "expert_count") else {}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head.number(prefix + "attention.key_length_swa"),
        "global_head_dim": head_dim_of(head, prefix),
        "num_key_value_heads": sizes.get(SLIDING, num_kv_heads[0]),
        "num_global_key_value_heads": sizes.get(FULL),
        "attention_k_eq_v": not has_values,
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": len(set(per_layer(head, prefix, "feed_forward_length"))) > 1,
        "sliding_window": head.number(prefix + "attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": head.real(prefix + "rope.freq_base_swa", 10000.0)},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": head.real(prefix + "rope.freq_base"),
                "partial_rotary_factor": sum(each < STILL for each in factors) / len(factors),
            },
        },
        "final_logit_softcapping": head.real(prefix + "final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": int(head.metadata.get(prefix + "embedding_length_per_layer_input", 0)),
        "vocab_size_per_layer_input": per_layer_rows.shape[0] if per_layer_rows is not None else 0,
        "enable_moe_block": bool(experts),
        "num_experts": experts.get("num_experts"),
        "top_k_experts": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": experts.get("moe_intermediate_size"),
    }


def _glm4moe(head: GgufHead, prefix: str) -> dict[str, Any]:
    experts = read_experts(head, prefix)
    return _glm4(head, prefix) | {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "n_shared_experts": head.number(prefix + "expert_shared_count", 1),
        "first_k_dense_replace": int(head.metadata.get(prefix + "leading_dense_block_count", 0)),
        "routed_scaling_factor": head.real(prefix + "expert_weights_scale", 1.0),
        "norm_topk_prob": bool(head.metadata.get(prefix + "expert_weights_norm", False)),
        "n_group": head.number(prefix + "expert_group_count", 1),
        "topk_group": head.number(prefix + "expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in head.tensors,
    }


def _ernie4_5(head: GgufHead, prefix: str) -> dict[str, Any]:  # noqa: ARG001
    return {"hidden_act": "silu", "use_bias": "blk.0.attn_q.bias" in head.tensors}


def _ernie4_5_moe(head: GgufHead, prefix: str) -> dict[str, Any]:
    experts = read_experts(head, prefix)
    return _ernie4_5(head, prefix) | {
        "moe_num_experts": experts["num_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "moe_num_shared_experts": int(head.metadata.get(prefix + "expert_shared_count", 0)),
        "moe_layer_interval": head.number(prefix + "interleave_moe_layer_step", 1),
        "moe_layer_start_index": int(head.metadata.get(prefix + "leading_dense_block_count", 0)),
        "moe_layer_end_index": count_layers(head, prefix) - 1,
    }


def _minimax_m2(head: GgufHead, prefix: str) -> dict[str, Any]:
    experts = read_experts(head, prefix)
    return _glm4(head, prefix) | {
        "intermediate_size": experts["moe_intermediate_size"],
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
    }


def _olmoe(head: GgufHead, prefix: str) -> dict[str, Any]:
    return {"hidden_act": "silu"} | read_experts(head, prefix) | {"norm_topk_prob": False}


def _llama4(head: GgufHead, prefix: str) -> dict[str, Any]:
    """A file does not say what all published models share: three of four layers rotate, and attend to
    chunks of 8,192 tokens. A window of 0 means that all layers rotate and see everything."""
    experts, num_layers = read_experts(head, prefix), count_layers(head, prefix)
    is_plain = head.metadata.get(prefix + "attention.sliding_window") == 0
    chunks = {
        "attention_chunk_size": None if is_plain else LLAMA4_CHUNK,
        "no_rope_layers": [int(is_plain or (number + 1) % 4 != 0) for number in range(num_layers)],
        "attn_temperature_tuning": not is_plain,
    }
    return chunks | {
        "hidden_act": "silu",
        "intermediate_size": experts["moe_intermediate_size"],
        "intermediate_size_mlp": head.number(prefix + "feed_forward_length"),
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "interleave_moe_layer_step": head.number(prefix + "interleave_moe_layer_step"),
        "use_qk_norm": experts["num_experts"] != LLAMA4_WITHOUT_NORM,
    }


def _gpt2(head: GgufHead, prefix: str) -> dict[str, Any]:
    sizes = read_numbers(
        head,
        prefix,
        n_embd="embedding_length",
        n_layer="block_count",
        n_head="attention.head_count",
        n_inner="feed_forward_length",
        n_positions="context_length",
    )
    return sizes | {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": head.real(prefix + "attention.layer_norm_epsilon"),
    }


def _encoder(head: GgufHead, prefix: str) -> dict[str, Any]:
    if head.metadata.get(prefix + "attention.causal", False):
        raise StartupError(f"{head.path}: {prefix}attention.causal is true; only encoders of both directions are read")
    pooling = head.metadata.get(prefix + "pooling_type", 0)
    if pooling not in (0, 1, 2, 3):
        raise StartupError(
            f"{head.path}: {prefix}pooling_type is {str(pooling)[:40]}; of encoders these are read: 0 (none), 1 "
            "(mean), 2 (cls), 3 (last token)"
        )
    return {
        "layer_norm_eps": head.real(prefix + "attention.layer_norm_epsilon"),
        "type_vocab_size": head.number("tokenizer.ggml.token_type_count"),
    }


def _bert(head: GgufHead, prefix: str) -> dict[str, Any]:
    """The activation is not in the file: all published models have the exact GELU."""
    return {"hidden_act": "gelu"} | _encoder(head, prefix)


def _nomic_bert(head: GgufHead, prefix: str) -> dict[str, Any]:
    return {"hidden_act": "silu"} | _encoder(head, prefix)


_OF_DEEPSEEK = ("expert_count", "expert_group_count", "expert_weights_scale", "expert_shared_count")
LIBRARY_FAMILIES = {
    **HYBRID_FAMILIES,
    "bert": Family("BertModel", "bert", _bert, ("attention.causal",)),
    "cohere2": Family("Cohere2ForCausalLM", "cohere2", _cohere2, ("logit_scale",)),
    "command-r": Family("CohereForCausalLM", "cohere", _cohere, ("logit_scale",)),
    "deepseek2": Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _deepseek2,
        (*_OF_DEEPSEEK, "expert_gating_func"),
        has_other_values=True,
        others=("DeepseekV3ForCausalLM",),
    ),
    "gemma3n": Family("Gemma3nForCausalLM", "gemma3n_text", _gemma3n, ("final_logit_softcapping",)),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", _ernie4_5),
    "ernie4_5-moe": Family(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ernie4_5_moe, ("expert_count", "expert_shared_count")
    ),
    "gemma4": Family("Gemma4ForCausalLM", "gemma4_text", _gemma4, ("expert_count", "final_logit_softcapping")),
    "glm4moe": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        _glm4moe,
        (*_OF_DEEPSEEK, "nextn_predict_layers"),
        has_sigmoid_experts=True,
    ),
    "gpt2": Family("GPT2LMHeadModel", "gpt2", _gpt2),
    "llama4": Family("Llama4ForCausalLM", "llama4_text", _llama4, ("expert_count",), has_sigmoid_experts=True),
    "minimax-m2": Family(
        "MiniMaxM2ForCausalLM", "minimax_m2", _minimax_m2, ("expert_count",), has_sigmoid_experts=True
    ),
    "nomic-bert": Family("NomicBertModel", "nomic_bert", _nomic_bert, ("attention.causal",)),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", _olmoe, ("expert_count",)),
    "glm4": Family("Glm4ForCausalLM", "glm4", _glm4),
    "stablelm": Family("StableLmForCausalLM", "stablelm", _stablelm),
    "starcoder2": Family("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
}
