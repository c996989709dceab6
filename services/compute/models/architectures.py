"""A reader of config.json for each architecture."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.compute.backends.torch.reference import SWIGLU_ALPHA, SWIGLU_LIMIT
from services.compute.models.config import PACKED_METHOD, ModelConfig, Packed, QueryTemperature
from services.compute.models.gemma4 import DEFAULTS as GEMMA4
from services.compute.models.gemma4 import gemma4
from services.compute.models.hybrid import HYBRID_DEFAULTS, HYBRIDS
from services.compute.models.library_errors import first_line
from services.compute.models.llama import FULL, SLIDING, Config, granite, layer_kinds, llama, rotary_share
from services.compute.models.mixtures import (
    deepseek_mixture,
    ernie_mixture,
    gated_qwen_mixture,
    hunyuan_mixture,
    mixture_of_all_layers,
    num_experts_of,
    qwen_mixture,
)
from services.compute.models.rope import no_rope, read_rope
from services.compute.models.sizes import LARGEST, check_size, check_sizes
from shared.model.files import ModelFiles
from shared.process.errors import StartupError

# what a config.json leaves out has the default of the model's class in transformers, where that is
# another than Llama's
_EPS = {"rms_norm_eps": 1e-5}
_WINDOW = {"sliding_window": 4096}
_HEADS = {"head_dim": 128}
_ERNIE = _EPS | {"rope_theta": 500_000.0, "tie_word_embeddings": True}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA3 = _GEMMA | _WINDOW | {"rope_theta": 1_000_000.0}
_PER_LAYER = {"sliding_window": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
_YARN = {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_MINISTRAL3_ROPE = _YARN | {
    "rope_theta": 1_000_000.0,
    "original_max_position_embeddings": 16384,
    "llama_4_scaling_beta": 0.1,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "Dots1ForCausalLM": _WINDOW | {"max_window_layers": 62, "first_k_dense_replace": 0},
    "Ernie4_5ForCausalLM": _ERNIE | _HEADS,
    "Ernie4_5_MoeForCausalLM": _ERNIE
    | {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_num_shared_experts": 2},
    "Exaone4ForCausalLM": _EPS | _WINDOW,
    "ExaoneMoeForCausalLM": _EPS
    | _WINDOW
    | {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "num_shared_experts": 1},
    "Gemma2ForCausalLM": _GEMMA | _WINDOW | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForCausalLM": GEMMA4 | _PER_LAYER,
    "Gemma4ForConditionalGeneration": GEMMA4 | _PER_LAYER,
    "Gemma4UnifiedForCausalLM": GEMMA4 | {"sliding_window": 1024},
    "Gemma4UnifiedForConditionalGeneration": GEMMA4 | {"sliding_window": 1024},
    "GemmaForCausalLM": _GEMMA,
    "Glm4MoeForCausalLM": _EPS
    | {"partial_rotary_factor": 0.5, "attention_out_bias": False, "norm_topk_prob": True}
    | {"first_k_dense_replace": 1},
    "GptOssForCausalLM": _EPS
    | {"head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0, "attention_bias": True},
    "HunYuanDenseV1ForCausalLM": _EPS,
    "HunYuanMoEV1ForCausalLM": _EPS,
    "InternLM3ForCausalLM": _EPS | _HEADS,
    "Ministral3ForCausalLM": _EPS | _HEADS | {"rope_parameters": _MINISTRAL3_ROPE},
    "MiniMaxM2ForCausalLM": _HEADS | {"rope_theta": 5_000_000.0},
    "MinistralForCausalLM": _WINDOW,
    "MistralForCausalLM": _WINDOW,
    "MixtralForCausalLM": _EPS | {"rope_theta": 1_000_000.0},
    "Olmo2ForCausalLM": _EPS,
    "Olmo3ForCausalLM": _EPS | _WINDOW | {"rope_theta": 500_000.0},
    "OlmoeForCausalLM": _EPS,
    "Phi3ForCausalLM": _EPS,
    "Qwen2ForCausalLM": _WINDOW,
    "Qwen2MoeForCausalLM": _WINDOW,
    "Qwen3ForCausalLM": _HEADS | _WINDOW,
    "Qwen3MoeForCausalLM": _WINDOW,
    "Qwen3VLForConditionalGeneration": _HEADS,
    **HYBRID_DEFAULTS,
    "SeedOssForCausalLM": _HEADS | {"attention_bias": True},
    "SmolLM3ForCausalLM": {"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
}


# gpt-oss' RoPE
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def architecture_of(config: Config) -> str:
    """The first that config.json names, with the head that a bare decoder lacks (MistralModel, Qwen3Model); `none`
    if it names none. Raises StartupError."""
    names = config.get("architectures") or ["none"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise StartupError("config.json: architectures is not a list of names")
    whole = names[0].removesuffix("Model") + "ForCausalLM"
    return whole if names[0].endswith("Model") and whole in ARCHITECTURES else names[0]


def is_native(files: ModelFiles, model_impl: str) -> bool:
    """Whether our own executor runs the model, rather than transformers' modules. model_impl: what --model-impl
    asks for. Raises StartupError if that is an executor that can't."""
    reason = lack_of(files.config)
    if reason and model_impl == "native":
        raise StartupError(f"--model-impl native: {files.name}: {reason}")
    return not reason and model_impl != "transformers"


def lack_of(config: Config) -> str:
    """Why no reader here reads a parsed config.json, of a model that sees its text's part; empty: one does. Raises
    StartupError."""
    architecture, kind = architecture_of(config), config.get("model_type", "llama")
    if architecture not in ARCHITECTURES:
        return f"architecture {architecture} is not supported; these are: {', '.join(sorted(ARCHITECTURES))}"
    if ARCHITECTURES[architecture] is _llava and str(kind) not in TEXTS:
        return (
            f"config.json: a text_config of the model_type {kind} is not supported here; these are: {', '.join(TEXTS)}"
        )
    return ""


def read_config(config: Config, max_model_len: int | None = None) -> ModelConfig:
    """The parsed config.json as a ModelConfig. Raises StartupError for what the executor can't run.

    max_model_len: the longest sequence that will be computed, if it is not the model's own (see
    read_rope).
    """
    if reason := lack_of(config):
        raise StartupError(reason)
    architecture = architecture_of(config)
    reader = ARCHITECTURES[architecture]
    config = DEFAULTS.get(architecture, {}) | config
    quantized = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(quantized, dict):
        raise StartupError("config.json: quantization_config is not an object")
    is_packed = quantized.get("quant_method") == PACKED_METHOD
    # Gemma 4's images alone see what comes after them
    if config.get("use_bidirectional_attention") not in (None, False, "vision") or config.get("is_causal") is False:
        raise StartupError("its attention is not causal: this model embeds text, it does not generate")
    try:
        check_sizes(config)
        read = reader(config, max_model_len or config["max_position_embeddings"])
        packed, share = _packed(quantized) if is_packed else None, rotary_share(config)
    except KeyError as error:
        raise StartupError(f"config.json has no {error.args[0]}") from None
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        RuntimeError,
    ) as error:  # torch raises the last for a list of other things than numbers
        raise StartupError(f"config.json has a value of the wrong type or out of range: {first_line(error)}") from None
    if 2 * len(read.ropes[0].inv_freq) != int(read.head_dim * share):
        raise StartupError(f"partial_rotary_factor {share} is not supported for {architecture}")
    if quantized.get("quant_method") == "mxfp4" and architecture != "GptOssForCausalLM":
        raise StartupError(f"quantization_config: mxfp4 is supported for gpt-oss only, this is {architecture}")
    if {len(read.sliding_windows), len(read.rope_of_layer)} != {read.num_layers}:
        raise StartupError(
            f"config.json describes {len(read.sliding_windows)} layers one by one, num_hidden_layers is "
            f"{read.num_layers}"
        )
    if read.num_heads % read.num_kv_heads:
        raise StartupError(
            f"config.json: num_attention_heads {read.num_heads} is not a multiple of num_key_value_heads "
            f"{read.num_kv_heads}"
        )
    is_bare = architecture not in config["architectures"]
    return replace(
        read,
        packed=packed,
        quantization_config=None if is_packed else quantized or None,
        is_bare=is_bare,
        is_tied=read.is_tied or is_bare,
    )


def _packed(quantized: Config) -> Packed:
    """quantization_config as penstock quantize wrote it; at first it packed the LM head like the
    layers, and did not say so."""
    return Packed(
        quantized["quantization"],
        quantized["group"],
        quantized.get("attention_output", False),
        quantized.get("lm_head", True),
    )


def _internlm3(config: Config, max_model_len: int) -> ModelConfig:
    """Llama, with other names of the biases."""
    biases = {
        "attention_bias": config.get("qkv_bias", config.get("attention_bias")),
        "mlp_bias": config.get("bias", config.get("mlp_bias")),
    }
    return llama(config | biases, max_model_len)


def _mistral(config: Config, max_model_len: int) -> ModelConfig:
    """Llama, all of whose layers may have a sliding window."""
    read = llama(config, max_model_len)
    return replace(read, sliding_windows=(config.get("sliding_window"),) * read.num_layers)


def _ministral(config: Config, max_model_len: int) -> ModelConfig:
    """Mistral, some of whose layers see all."""
    read = llama(config, max_model_len)
    return replace(read, sliding_windows=_windows(config, config.get("layer_types") or [SLIDING] * read.num_layers))


def _ministral3(config: Config, max_model_len: int) -> ModelConfig:
    """Mistral with a temperature of queries beyond its original length."""
    read, rope = _mistral(config, max_model_len), config["rope_parameters"]
    weight, length = rope.get("llama_4_scaling_beta") or 0.0, rope["original_max_position_embeddings"]
    check_size("original_max_position_embeddings", length, LARGEST["max_position_embeddings"])
    return replace(
        read, temperature=QueryTemperature(float(weight), length) if weight and max_model_len > length else None
    )


def _qwen2(config: Config, max_model_len: int) -> ModelConfig:
    return replace(llama(config, max_model_len), has_qkv_bias=True, sliding_windows=_qwen_windows(config))


def _qwen3(config: Config, max_model_len: int) -> ModelConfig:
    return replace(llama(config, max_model_len), has_qk_norm=True, sliding_windows=_qwen_windows(config))


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Windows by layer_types, or for the layers from max_window_layers on; when switched on."""
    first, num_layers = config.get("max_window_layers", 28), config["num_hidden_layers"]
    kinds = config.get("layer_types") or [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return _windows(config, kinds) if config.get("use_sliding_window", False) else (None,) * num_layers


def _mixtral(config: Config, max_model_len: int) -> ModelConfig:
    """Mistral with a mixture of experts in each layer."""
    return replace(_mistral(config, max_model_len), moe=mixture_of_all_layers(config, has_normalized_weights=True))


def _olmoe(config: Config, max_model_len: int) -> ModelConfig:
    """OLMoE: norms of q and k over all heads together."""
    if config.get("clip_qkv") is not None:
        raise StartupError(f"config.json: clip_qkv {config['clip_qkv']} is not supported; null is")
    moe = mixture_of_all_layers(config, has_normalized_weights=bool(config.get("norm_topk_prob", False)))
    return replace(llama(config, max_model_len), has_qk_norm=True, is_qk_norm_joint=True, moe=moe)


def _minimax_m2(config: Config, max_model_len: int) -> ModelConfig:
    """MiniMax M2: a part of a head rotates, and norms of q and k are over all heads together."""
    return replace(
        llama(config, max_model_len, share=rotary_share(config)),
        has_qk_norm=True,
        is_qk_norm_joint=True,
        moe=mixture_of_all_layers(config, has_normalized_weights=True, has_sigmoid_scores=True, has_correction=True),
    )


def _qwen2_moe(config: Config, max_model_len: int) -> ModelConfig:
    """Qwen 2 MoE: of the layers before max_window_layers, every other has a window, the first among
    them; when switched on."""
    first, num_layers = config.get("max_window_layers", 28), config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        SLIDING if layer < first and layer % 2 == 0 else FULL for layer in range(num_layers)
    ]
    return replace(
        _qwen2(config | {"layer_types": kinds}, max_model_len),
        has_qkv_bias=config.get("qkv_bias", True),
        moe=gated_qwen_mixture(config),
    )


def _qwen3_moe(config: Config, max_model_len: int) -> ModelConfig:
    """A sliding window, where it is switched on, is all layers'."""
    read = _qwen3(config, max_model_len)
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    return replace(read, sliding_windows=(window,) * read.num_layers, moe=qwen_mixture(config))


def _qwen3_vl_moe(config: Config, max_model_len: int) -> ModelConfig:
    """The text part of Qwen 3 VL's mixtures."""
    read = _qwen3_moe(config, max_model_len)
    assert read.moe is not None
    return replace(read, moe=replace(read.moe, router=replace(read.moe.router, has_normalized_weights=True)))


def _glm4_moe(config: Config, max_model_len: int) -> ModelConfig:
    """GLM 4.5 to 4.7: a part of a head rotates."""
    read = llama(config, max_model_len, share=rotary_share(config))
    return replace(read, has_qk_norm=bool(config.get("use_qk_norm", False)), moe=deepseek_mixture(config))


def _dots1(config: Config, max_model_len: int) -> ModelConfig:
    """dots.1: where there is a window, it is that of the layers from max_window_layers on."""
    return replace(_qwen3(config | {"use_sliding_window": True}, max_model_len), moe=deepseek_mixture(config))


def _gpt_oss(config: Config, max_model_len: int) -> ModelConfig:
    """gpt-oss: every other layer has a window, the first among them. A config.json without RoPE means
    the published models'."""
    if "rope_parameters" not in config and "rope_scaling" not in config:
        config = config | {"rope_scaling": YARN}
    read = llama(config, max_model_len)
    if (config.get("swiglu_alpha", SWIGLU_ALPHA), config.get("swiglu_limit", SWIGLU_LIMIT)) != (
        SWIGLU_ALPHA,
        SWIGLU_LIMIT,
    ):
        raise StartupError(f"config.json: swiglu_alpha and swiglu_limit must be {SWIGLU_ALPHA} and {SWIGLU_LIMIT}")
    return replace(
        read,
        activation="clamped_swiglu",
        has_sinks=True,
        sliding_windows=_windows(config, layer_kinds(config, SLIDING, pattern=2)),
        moe=replace(mixture_of_all_layers(config, has_normalized_weights=True), has_bias=True, router_name="router"),
    )


def _phi3(config: Config, max_model_len: int) -> ModelConfig:
    """Phi-3, 3.5 and 4. Their first checkpoints call longrope su, or yarn."""
    config = config | {
        name: _as_longrope(config[name]) for name in ("rope_scaling", "rope_parameters") if config.get(name)
    }
    read = llama(config, max_model_len, share=rotary_share(config))
    return replace(read, has_fused_projections=True, sliding_windows=(config.get("sliding_window"),) * read.num_layers)


def _as_longrope(rope: Config) -> Config:
    kind = rope.get("rope_type", rope.get("type"))
    return rope | {"rope_type": "longrope"} if kind in ("su", "yarn") else rope


def _gemma(config: Config, max_model_len: int) -> ModelConfig:
    """Gemma. The first checkpoints say gelu and mean the tanh form."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    activation = "gelu_pytorch_tanh" if activation == "gelu" else activation
    read = llama(config | {"hidden_activation": activation}, max_model_len)
    return replace(read, norm_offset=1.0, embedding_multiplier=math.sqrt(read.hidden_size))


def _gemma2(config: Config, max_model_len: int) -> ModelConfig:
    """Every other layer has a window, the first among them."""
    return replace(
        _gemma(config, max_model_len),
        has_post_norms=True,
        attention_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=config.get("attn_logit_softcapping") or 0.0,
        logits_cap=config.get("final_logit_softcapping") or 0.0,
        sliding_windows=_windows(config, layer_kinds(config, SLIDING, pattern=2)),
    )


def _gemma3(config: Config, max_model_len: int) -> ModelConfig:
    """Five layers with a window, and RoPE of their own, for each that sees all. The text part of
    the multimodal models, too."""
    kinds = layer_kinds(config, SLIDING, pattern=int(config.get("sliding_window_pattern", 6)))
    read = _gemma2(config | {"layer_types": kinds}, max_model_len)
    local = config | {"rope_scaling": None, "rope_theta": config.get("rope_local_base_freq", 10000.0)}
    return replace(
        read,
        has_qk_norm=True,
        ropes=(read.ropes[0], read_rope(local, read.head_dim, max_model_len, SLIDING)),
        rope_of_layer=tuple(int(kind == SLIDING) for kind in kinds),
    )


def _gemma4(config: Config, max_model_len: int) -> ModelConfig:
    """Gemma 4, and the text part of those that see and hear."""
    return gemma4(llama(config, max_model_len), config, max_model_len)


def _llava(config: Config, max_model_len: int) -> ModelConfig:
    """The text part of a model that sees: one of other families, as its model_type says."""
    return TEXTS[config.get("model_type", "llama")](config, max_model_len)


def _olmo2(config: Config, max_model_len: int) -> ModelConfig:
    read = llama(config, max_model_len)
    return replace(read, has_pre_norms=False, has_post_norms=True, has_qk_norm=True, is_qk_norm_joint=True)


def _olmo3(config: Config, max_model_len: int) -> ModelConfig:
    """OLMo 2 with a window in three of four layers; only the fourth's RoPE is scaled."""
    kinds = layer_kinds(config, SLIDING, pattern=4)
    read = _olmo2(config, max_model_len)
    local = read_rope(config | {"rope_scaling": None}, read.head_dim, max_model_len, SLIDING)
    return replace(
        read,
        ropes=(read.ropes[0], local),
        rope_of_layer=tuple(int(kind == SLIDING) for kind in kinds),
        sliding_windows=_windows(config, kinds),
    )


def _exaone4(config: Config, max_model_len: int) -> ModelConfig:
    """EXAONE 4: where some layers have a window, the others do not rotate."""
    read = llama(config, max_model_len)
    has_windows = config.get("sliding_window") is not None
    pattern = config.get("sliding_window_pattern") or 4  # or a text such as LLLG
    kinds = (
        layer_kinds(config, SLIDING, pattern=pattern if isinstance(pattern, int) else len(pattern))
        if has_windows
        else [FULL] * read.num_layers
    )
    return replace(
        read,
        has_pre_norms=False,
        has_post_norms=True,
        has_qk_norm=True,
        ropes=(no_rope(read.head_dim), *read.ropes),
        rope_of_layer=tuple(int(kind == SLIDING or not has_windows) for kind in kinds),
        sliding_windows=_windows(config, kinds),
    )


def _exaone_moe(config: Config, max_model_len: int) -> ModelConfig:
    """EXAONE 4's attention, with norms before attention and MLP, and mixtures."""
    moe = deepseek_mixture(
        config | {"n_routed_experts": num_experts_of(config), "n_shared_experts": config["num_shared_experts"]}
    )
    if kinds := config.get("mlp_layer_types"):
        moe = replace(moe, sparse_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse"))
    return replace(_exaone4(config, max_model_len), has_pre_norms=True, has_post_norms=False, moe=moe)


def _ernie(config: Config, max_model_len: int) -> ModelConfig:
    """ERNIE 4.5: neighbouring dimensions of a head rotate together."""
    has_bias = bool(config.get("use_bias", False))
    read = llama(config | {"attention_bias": has_bias, "mlp_bias": has_bias}, max_model_len)
    return replace(read, rotates_neighbours=True)


def _ernie_moe(config: Config, max_model_len: int) -> ModelConfig:
    if config.get("use_bias"):
        raise StartupError("config.json: use_bias is not supported for mixtures")
    return replace(_ernie(config, max_model_len), moe=ernie_mixture(config))


def _hunyuan(config: Config, max_model_len: int) -> ModelConfig:
    """Hunyuan: norms of q and k after the rotation, whose base has an alpha."""
    read = llama(config, max_model_len)
    rope = read_rope(config, read.head_dim, max_model_len, has_alpha=True)
    return replace(read, ropes=(rope,), has_qk_norm=True, norms_after_rotation=True)


def _hunyuan_moe(config: Config, max_model_len: int) -> ModelConfig:
    return replace(_hunyuan(config, max_model_len), moe=hunyuan_mixture(config))


def _seed_oss(config: Config, max_model_len: int) -> ModelConfig:
    read = llama(config, max_model_len)
    return replace(read, has_output_bias=bool(config.get("attention_out_bias", False)))


def _smollm3(config: Config, max_model_len: int) -> ModelConfig:
    """Every fourth layer does not rotate. no_rope_layers has a 1 for each that does."""
    read = llama(config, max_model_len)
    interval = config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(read.num_layers)]
    rotated = rotated[: read.num_layers]
    kinds = config.get("layer_types") or [FULL if each else SLIDING for each in rotated]
    return replace(
        read,
        ropes=(no_rope(read.head_dim), *read.ropes),
        rope_of_layer=tuple(rotated),
        sliding_windows=_windows(config, kinds) if config.get("use_sliding_window", False) else read.sliding_windows,
    )


def _windows(config: Config, kinds: list[str]) -> tuple[int | None, ...]:
    """Per layer, how many tokens attention sees, this one included. Raises StartupError for a kind
    of layer that attention can't be."""
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise StartupError(f"layers of the type {unknown[0]} are not supported; these are: {FULL}, {SLIDING}")
    window: int | None = config.get("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


TEXTS: dict[str, Callable[[Config, int], ModelConfig]] = {
    "llama": llama,
    "ministral3": _ministral3,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}

ARCHITECTURES: dict[str, Callable[[Config, int], ModelConfig]] = {
    "Dots1ForCausalLM": _dots1,
    "Ernie4_5ForCausalLM": _ernie,
    "Ernie4_5_MoeForCausalLM": _ernie_moe,
    "Exaone4ForCausalLM": _exaone4,
    "ExaoneMoeForCausalLM": _exaone_moe,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForCausalLM": _gemma4,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForCausalLM": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4,
    "GemmaForCausalLM": _gemma,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": granite,
    "HunYuanDenseV1ForCausalLM": _hunyuan,
    "HunYuanMoEV1ForCausalLM": _hunyuan_moe,
    "Idefics3ForConditionalGeneration": _llava,
    "InternLM3ForCausalLM": _internlm3,
    "InternVLForConditionalGeneration": _llava,
    "LlamaForCausalLM": llama,
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": _llava,
    "Ministral3ForCausalLM": _ministral3,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "MinistralForCausalLM": _ministral,
    "Mistral3ForConditionalGeneration": _llava,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "OlmoeForCausalLM": _olmoe,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen2VLForConditionalGeneration": _qwen2,
    "Qwen2_5_VLForConditionalGeneration": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl_moe,
    "SeedOssForCausalLM": _seed_oss,
    "SmolLM3ForCausalLM": _smollm3,
    "SmolVLMForConditionalGeneration": _llava,
    **HYBRIDS,
}
