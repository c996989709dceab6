"""Defaults of what a config.json leaves out: it has the default of the model's class in
transformers, where that is another than Llama's."""

from typing import Any

_EPS = {"rms_norm_eps": 1e-5}
_WINDOW = {"sliding_window": 4096}
_HEADS = {"head_dim": 128}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA3 = _GEMMA | _WINDOW | {"rope_theta": 1_000_000.0}

DEFAULTS: dict[str, dict[str, Any]] = {
    "Exaone4ForCausalLM": _EPS | _WINDOW,
    "Gemma2ForCausalLM": _GEMMA | _WINDOW | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GemmaForCausalLM": _GEMMA,
    "GptOssForCausalLM": _EPS | {"head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0, "attention_bias": True},
    "InternLM3ForCausalLM": _EPS | _HEADS,
    "MinistralForCausalLM": _WINDOW,
    "MistralForCausalLM": _WINDOW,
    "MixtralForCausalLM": _EPS | {"rope_theta": 1_000_000.0},
    "Olmo2ForCausalLM": _EPS,
    "Olmo3ForCausalLM": _EPS | _WINDOW | {"rope_theta": 500_000.0},
    "Phi3ForCausalLM": _EPS,
    "Qwen2ForCausalLM": _WINDOW,
    "Qwen2MoeForCausalLM": _WINDOW,
    "Qwen3ForCausalLM": _HEADS | _WINDOW,
    "Qwen3MoeForCausalLM": _WINDOW,
    "Qwen3VLForConditionalGeneration": _HEADS,
    "SeedOssForCausalLM": _HEADS | {"attention_bias": True},
    "SmolLM3ForCausalLM": {"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
}
