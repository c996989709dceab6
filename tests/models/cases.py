"""The architectures, and how each runs."""

from typing import Any

from tests.models.blueprints import Blueprint, seeing, text

# fmt: off
Fields = dict[str, Any]
WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
L4: Fields = {"layer_types": WINDOWS, "sliding_window": 24}
GDN: Fields = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4, "head_dim": 32,
}
PART: Fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
HALF_ROPE: Fields = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
YARN: Fields = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
}
MROPE: Fields = {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
}
GEMMA4_ROPES: Fields = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MINISTRAL3_ROPE: Fields = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}
MLA: Fields = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
DSMOE: Fields = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}
MAMBA: Fields = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 32,
}
INDEX: Fields = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 4}
SIG: Fields = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}
PIX: Fields = SIG | {"head_dim": 16}
QVIS: Fields = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
GVIS: Fields = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "image_size": 56, "patch_size": 14,
    "out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2,
}
EVIS: Fields = GVIS | {"num_key_value_heads": 1, "fullatt_block_indexes": [1], "window_size": 56}

NATIVE: dict[str, Blueprint] = {
    "qwen3": text("qwen3", head_dim=32),
    "qwen3_moe": text("qwen3_moe", head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40,
        norm_topk_prob=True),
    "qwen3_vl": seeing("qwen3_vl", text("qwen3_vl_text", head_dim=32, rope_parameters=MROPE), QVIS),
    "qwen3_vl_moe": seeing("qwen3_vl_moe", text("qwen3_vl_moe_text", head_dim=32, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, rope_parameters=MROPE), QVIS),
    "qwen2": text("qwen2"),
    "qwen2_5_vl": seeing("qwen2_5_vl", text("qwen2_5_vl_text", rope_parameters={"rope_type": "default",
        "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}), {"depth": 2, "hidden_size": 32, "intermediate_size": 48,
        "num_heads": 2, "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 56}),
    "gemma3_text": text("gemma3_text", head_dim=32, query_pre_attn_scalar=20, **L4),
    "gemma3_vl": seeing("gemma3", text("gemma3_text", **L4, head_dim=32, query_pre_attn_scalar=20), SIG,
        mm_tokens_per_image=4),
    "gpt_oss": text("gpt_oss", num_local_experts=6, num_experts_per_tok=2, head_dim=32, sliding_window=24,
        rope_parameters=YARN | {"truncate": False}),
    "llama3": text("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    "mistral": text("mistral", sliding_window=None, head_dim=32),
    "mistral3_small3x": seeing("mistral3", text("mistral", head_dim=32, sliding_window=None),
        PIX | {"model_type": "pixtral"}),
    "phi3": text("phi3", sliding_window=24),
    "granite": text("granite", head_dim=32, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3,
        logits_scaling=2.5),
    "smollm3": text("smollm3", head_dim=32, no_rope_layers=[1, 1, 1, 0]),
    "olmo2": text("olmo2", head_dim=32),
    "olmo3": text("olmo3", head_dim=32, **L4),
    "seed_oss": text("seed_oss", head_dim=32),
    "exaone4": text("exaone4", head_dim=32, **L4),
    "internlm3": text("internlm3", head_dim=16, qkv_bias=True, bias=True),
    "qwen2_moe": text("qwen2_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40,
        shared_expert_intermediate_size=72, mlp_only_layers=[1]),
    "glm4_moe": text("glm4_moe", head_dim=16, **DSMOE, n_group=1, topk_group=1, first_k_dense_replace=1,
        use_qk_norm=True),
    "minimax_m2": text("minimax_m2", head_dim=32, num_local_experts=8, num_experts_per_tok=2,
        rope_parameters=HALF_ROPE),
    "olmoe": text("olmoe", num_experts=8, num_experts_per_tok=2),
    "dots1": text("dots1", head_dim=16, num_key_value_heads=4, **DSMOE, first_k_dense_replace=1),
    "exaone_moe": text("exaone_moe", head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        **L4),
    "ernie4_5": text("ernie4_5", head_dim=16),
    "ernie4_5_moe": text("ernie4_5_moe", moe_intermediate_size=32, moe_k=2, moe_num_experts=8,
        moe_num_shared_experts=1),
    "hunyuan_dense": text("hunyuan_v1_dense", head_dim=16, max_position_embeddings=32768, rope_parameters={
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}),
    "hunyuan_moe": text("hunyuan_v1_moe", head_dim=16, num_experts=4, moe_topk=2),
    "mixtral": text("mixtral", num_local_experts=6, sliding_window=None),
    "internvl3_5": seeing("internvl", text("qwen3", head_dim=32), {"hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": [56, 56], "patch_size": [14, 14]}),
    "smolvlm": seeing("smolvlm", text("llama"), SIG),
    "ministral": text("ministral", head_dim=32, sliding_window=24),
    "ministral3": text("ministral3", head_dim=32, rope_parameters=MINISTRAL3_ROPE),
    "ministral3_vl": seeing("mistral3", text("ministral3", head_dim=32, rope_parameters=MINISTRAL3_ROPE),
        PIX | {"model_type": "pixtral"}),
    "gemma": text("gemma", head_dim=16),
    "idefics3": seeing("idefics3", text("llama"), SIG),
    "llava": seeing("llava", text("llama"), SIG | {"model_type": "clip_vision_model", "projection_dim": 32}),
    "llava_next": seeing("llava_next", text("mistral", sliding_window=None), SIG | {"model_type": "clip_vision_model",
        "projection_dim": 32}),
    "qwen2_vl": seeing("qwen2_vl", text("qwen2_vl_text", rope_parameters={"rope_type": "default",
        "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}), {"depth": 2, "embed_dim": 32, "hidden_size": 64,
        "num_heads": 2, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}),
    "gemma2": text("gemma2", head_dim=16, sliding_window=24, attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
    "lfm2": text("lfm2", layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False),
    "lfm2_moe": text("lfm2_moe", length_name="", num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"], num_dense_layers=1,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
    "lfm2_vl": seeing("lfm2_vl", text("lfm2", layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False), {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2}),
    "granite4_h": text("granitemoehybrid", **MAMBA, layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48, embedding_multiplier=3.0,
        residual_multiplier=0.4, attention_multiplier=0.3, logits_scaling=2.5),
    "granite4_micro_attn": text("granitemoehybrid", length_name="", num_hidden_layers=4, **MAMBA, layer_types=["attention"] * 4, num_local_experts=0,  # noqa: E501
        num_experts_per_tok=0, shared_intermediate_size=48, position_embedding_type="rope"),
    "granite4_micro_nope": text("granitemoehybrid", length_name="", num_hidden_layers=4, **MAMBA, layer_types=["attention"] * 4, num_local_experts=0,  # noqa: E501
        num_experts_per_tok=0, shared_intermediate_size=48, position_embedding_type="nope"),
    "qwen3_5": text("qwen3_5_text", **GDN, **PART),
    "qwen3_5_moe": text("qwen3_5_moe_text", without=("intermediate_size",), **GDN, **PART, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_experts_per_tok=2, num_experts=8),
    "qwen3_5_vl": seeing("qwen3_5", text("qwen3_5_text", **GDN, **PART), QVIS, tie_word_embeddings=False),
    "qwen3_5_moe_vl": seeing("qwen3_5_moe", text("qwen3_5_moe_text", without=("intermediate_size",), **GDN, **PART,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts_per_tok=2, num_experts=8), QVIS,
        tie_word_embeddings=False),
    "qwen3_next": text("qwen3_next", **GDN, **PART, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        num_experts_per_tok=2, num_experts=8),
    "gemma4_dense31b": text("gemma4_text", num_hidden_layers=4, head_dim=16, global_head_dim=32,
        num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0, **L4,
        final_logit_softcapping=30.0, rope_parameters=GEMMA4_ROPES),
    "gemma4_moe26b": text("gemma4_text", head_dim=16, global_head_dim=32, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, **L4, final_logit_softcapping=30.0, enable_moe_block=True,
        num_experts=8, top_k_experts=2, moe_intermediate_size=32, rope_parameters=GEMMA4_ROPES),
    "gemma4_e2b": text("gemma4_text", num_hidden_layers=6, head_dim=16, global_head_dim=32,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=512, sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, num_kv_shared_layers=3,
        use_double_wide_mlp=True, final_logit_softcapping=30.0, rope_parameters=GEMMA4_ROPES),
    "gemma4_unified12b": text("gemma4_unified_text", head_dim=16, attention_k_eq_v=True, **L4,
        final_logit_softcapping=30.0),
    "gemma4_vl": seeing("gemma4", text("gemma4_text", **L4, head_dim=16, global_head_dim=32,
        hidden_size_per_layer_input=0, final_logit_softcapping=30.0), {"hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 2, "patch_size": 14,
        "position_embedding_size": 64}, audio_config=None),
    "gemma4_unified_vl": seeing("gemma4_unified", text("gemma4_unified_text", head_dim=16, attention_k_eq_v=True, **L4,
        final_logit_softcapping=30.0), None, audio_config=None),
}
RAGGED: dict[str, Blueprint] = {
    "phi4_mm": text("phi4_multimodal", vision_config={"hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "crop_size": 56, "patch_size": 14},
        audio_config={"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2,
        "ext_pw_out_channel": 32, "nemo_conv_channels": 32}, rope_parameters=HALF_ROPE),
    "phimoe": text("phimoe", num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": text("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    "granitemoeshared": text("granitemoeshared", num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=32),
    "granite_swa": text("granite_swa", **L4),
    "nemotron": text("nemotron"),
    "glm4": text("glm4", head_dim=16),
    "glm4_moe_lite": text("glm4_moe_lite", **MLA, **DSMOE, n_group=1, topk_group=1),
    "deepseek_v2": text("deepseek_v2", **MLA, **DSMOE | {"norm_topk_prob": False}, n_group=2, topk_group=1,
        topk_method="group_limited_greedy", first_k_dense_replace=1),
    "deepseek_v3": text("deepseek_v3", **MLA, **DSMOE, n_group=4, topk_group=2, first_k_dense_replace=1,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "minimax_m3": text("minimax_m3_vl_text", head_dim=32, rotary_dim=16, num_local_experts=8, num_experts_per_tok=2,
        dense_intermediate_size=112, shared_intermediate_size=32, index_n_heads=2, index_head_dim=16,
        index_block_size=8, index_topk_blocks=2),
    "flex_olmo": text("flex_olmo", num_experts=4, num_experts_per_tok=2),
    "hy_v3": text("hy_v3", head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
    "apertus": text("apertus"),
    "bitnet": text("bitnet"),
    "cohere": text("cohere", logit_scale=1.0),
    "cohere2": text("cohere2", **L4, head_dim=16, logit_scale=1.0),
    "cohere2_moe": text("cohere2_moe", head_dim=16, num_experts=4, num_experts_per_tok=2, num_shared_experts=1,
        sliding_window=24, logit_scale=1.0),
    "arcee": text("arcee"),
    "afmoe": text("afmoe", head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        num_shared_experts=1, **L4),
    "laguna": text("laguna", head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=8,
        num_experts_per_tok=2, sliding_window=24),
    "kolibri1": text("kolibri1", without=("intermediate_size",), head_dim=16, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_experts=8, num_experts_per_tok=2, sliding_window=24),
    "mimo_v2_flash": text("mimo_v2_flash", head_dim=24, v_head_dim=16, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, sliding_window=24),
    "solar_open": text("solar_open", without=("intermediate_size",), head_dim=16, **DSMOE),
    "helium": text("helium", head_dim=16),
    "longcat_flash": text("longcat_flash", length_name="num_layers", without=("intermediate_size", "num_key_value_heads"),  # noqa: E501
        ffn_hidden_size=112, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, head_dim=8,
        v_head_dim=16, moe_topk=2, n_routed_experts=4, zero_expert_num=2, expert_ffn_hidden_size=32),
    "mellum": text("mellum", head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, **L4),
    "minicpm3": text("minicpm3", **MLA | {"kv_lora_rank": 16}),
    "nanochat": text("nanochat"),
    "vaultgemma": text("vaultgemma", head_dim=16, **L4),
    "hyperclovax": text("hyperclovax"),
    "starcoder2": text("starcoder2", sliding_window=24),
    "phi2": text("phi"),
    "jetmoe": text("jetmoe", without=("num_attention_heads",), kv_channels=16, num_local_experts=4,
        num_key_value_heads=2),
    # else the library makes the row of the padding zero, whatever the file has
    "youtu": text("youtu", **MLA, pad_token_id=None),
    "axk1": text("axk1", **MLA, **DSMOE, n_group=4, topk_group=2),
    "exaone4_5": seeing("exaone4_5", text("exaone4", **L4, head_dim=32), EVIS),
    "gpt2": Blueprint("gpt2", {"vocab_size": 512, "n_embd": 64, "n_head": 4, "n_positions": 512, "eos_token_id": 1,
        "bos_token_id": 1}, "n_layer"),
    "gptj": Blueprint("gptj", {"vocab_size": 512, "n_embd": 64, "n_head": 4, "n_positions": 512, "rotary_dim": 8, "eos_token_id": 1,  # noqa: E501
        "bos_token_id": 1}, "n_layer"),
    "gpt_bigcode": Blueprint("gpt_bigcode", {"vocab_size": 512, "n_embd": 64, "n_head": 4, "n_positions": 512, "eos_token_id": 1,  # noqa: E501
        "bos_token_id": 1}, "n_layer"),
    "gpt_neox": text("gpt_neox"),
    "opt": text("opt", ffn_dim=112, word_embed_proj_dim=64),
    "glm": text("glm", head_dim=16),
    "llava_onevision": seeing("llava_onevision", text("qwen2"), SIG | {"model_type": "siglip_vision_model"}),
    "aya_vision": seeing("aya_vision", text("cohere2", **L4, head_dim=16, logit_scale=1.0),
        SIG | {"model_type": "siglip_vision_model"}),
    "stablelm": text("stablelm"),
    # called with text alone, whose part has no class of its own
    "glm4v": seeing("glm4v", text("glm4v_text", rope_parameters=HALF_ROPE | {"mrope_section": [1, 1, 2]}), GVIS),
    "glm46v": seeing("glm46v", text("glm4v_text", rope_parameters=HALF_ROPE | {"mrope_section": [1, 1, 2]}), GVIS),
    "muse_glimmer30b": seeing("muse_glimmer", text("muse_glimmer_text", head_dim=16, sliding_window=24),
        SIG | {"layer_types": ["window_attention", "full_attention"]}),
    "kimi_k25_vl": seeing("kimi_k25",
        text("deepseek_v3", **MLA, **DSMOE, n_group=1, topk_group=1, first_k_dense_replace=1),
        {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}),
    "mistral_small4_vl": seeing("mistral3", text("mistral4", **MLA, **DSMOE, n_group=1, topk_group=1),
        PIX | {"model_type": "pixtral"}),
    "glm_ocr": seeing("glm_ocr", text("glm_ocr_text", head_dim=16,
        rope_parameters=HALF_ROPE | {"mrope_section": [1, 1, 2]}), GVIS),
    "paddleocr_vl": seeing("paddleocr_vl", text("paddleocr_vl_text", num_hidden_layers=2, head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}), SIG),
    "step3p7": seeing("step3p7", text("step3p5", num_hidden_layers=4, head_dim=16, moe_intermediate_size=32,
        n_routed_experts=8, num_local_experts=8, num_experts_per_tok=2, share_expert_dim=32, sliding_window=24),
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
        "patch_size": 14}),
    "minimax_m3_vl": seeing("minimax_m3_vl", text("minimax_m3_vl_text", head_dim=32, rotary_dim=16, num_local_experts=8,
        num_experts_per_tok=2, dense_intermediate_size=112, shared_intermediate_size=32, index_n_heads=2,
        index_head_dim=16, index_block_size=8, index_topk_blocks=2), SIG),
}
ONE_BY_ONE: dict[str, Blueprint] = {
    "gemma3n": text("gemma3n_text", head_dim=16, sliding_window=24, layer_types=["sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_hidden_layers=6, num_kv_shared_layers=3, vocab_size_per_layer_input=512, hidden_size_per_layer_input=8,
        altup_num_inputs=2, laurel_rank=8, activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        intermediate_size=112),
    "llama4": text("llama4_text", num_local_experts=4, num_experts_per_tok=1, head_dim=16, intermediate_size_mlp=112,
        attention_chunk_size=24, attn_scale=0.1, floor_scale=32, interleave_moe_layer_step=2),
    "falcon": text("falcon", num_key_value_heads=4),
    "diffllama": text("diffllama"),
    "doge": text("doge"),
    "mpt": Blueprint("mpt", {"vocab_size": 512, "d_model": 64, "n_heads": 4, "max_seq_len": 512}, "n_layers"),
    "bloom": Blueprint("bloom", {"vocab_size": 512, "hidden_size": 64, "n_head": 4, "eos_token_id": 1, "bos_token_id": 1},  # noqa: E501
        "n_layer"),
}
# one by one, with states of each sequence
RECURRENT: dict[str, Blueprint] = {
    "lfm3": text("lfm3", head_dim=16, sliding_window=24),
    "nemotron_h_nano": text("nemotron_h", length_name="",
        layers_block_type=["mamba", "moe", "mamba", "attention"], head_dim=16, ssm_state_size=16, mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, chunk_size=32, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=32),
    "kimi_linear": text("kimi_linear", **MLA | {"q_lora_rank": None}, num_experts_per_tok=2, moe_intermediate_size=32,
        num_local_experts=8, linear_head_dim=16, linear_num_heads=4, layer_types=["linear_attention",
        "linear_attention", "linear_attention", "full_attention"]),
    "olmo_hybrid": text("olmo_hybrid", layer_types=["linear_attention", "linear_attention", "linear_attention",
        "full_attention"], linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16),
    "falcon_h1": text("falcon_h1", **MAMBA, mamba_d_ssm=128),
    "jamba": text("jamba", num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
        use_mamba_kernels=False),
    "bamba": text("bamba", **MAMBA, attn_layer_indices=[1, 3]),
    "bailing_hybrid": text("bailing_hybrid", **MLA | {"q_lora_rank": None}, moe_intermediate_size=32,
        num_local_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=16,
        layer_group_size=2),
    "zamba2": text("zamba2", length_name="", num_hidden_layers=4, mamba_d_state=16, mamba_headdim=16, n_mamba_heads=8, layers_block_type=["mamba", "hybrid",  # noqa: E501
        "mamba", "hybrid"], num_key_value_heads=4, chunk_size=32),
    "inkling": text("inkling_text", without=("intermediate_size",), head_dim=16, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, swa_head_dim=16, sliding_window_size=24, d_rel=8, rel_extent=64,
        intermediate_size=112, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
        n_shared_experts=1),
    "mamba2": Blueprint("mamba2", {"vocab_size": 512, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16,  # noqa: E501
        "n_groups": 1, "chunk_size": 32}),
    "falcon_mamba": Blueprint("falcon_mamba", {"vocab_size": 512, "hidden_size": 64, "state_size": 8}),
    "mamba": Blueprint("mamba", {"vocab_size": 512, "hidden_size": 64, "state_size": 8}),
}
# by the words of the refusal
REFUSED: dict[str, dict[str, Blueprint]] = {
    "keeps other state than keys and values": {
        "glm_moe_dsa": text("glm_moe_dsa", **MLA, **DSMOE, **INDEX, n_group=1, topk_group=1),
        "deepseek_v32": text("deepseek_v32", **MLA, **DSMOE, **INDEX, n_group=4, topk_group=2, first_k_dense_replace=1),
        "hy_v4": text("hy_v4", **MLA, **DSMOE, **INDEX, head_dim=24),
        "recurrent_gemma": Blueprint("recurrent_gemma", {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 112,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "lru_width": 64, "attention_window_size": 24}),  # noqa: E501
    },
    "it needs more than a cache of keys and values": {
        "minimax_m1": text("minimax", head_dim=16, num_local_experts=4, block_size=32, layer_types=["linear_attention",
            "full_attention"] * 2),
    },
    "it asks its cache for layers": {
        "qwen4_exp": text("qwen4_exp_text", without=("intermediate_size",), **GDN, **PART, moe_intermediate_size=32,
            shared_expert_intermediate_size=32, num_experts_per_tok=2, num_experts=8, hc_lowrank=16,
            ngram_vocab_size_base=500, ple_embed_dim=16, heads_per_ngram=2, split_ngram_parts=1, indexer_n_heads=2,
            indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4),
        "deepseek_v4": text("deepseek_v4", without=("intermediate_size",), num_key_value_heads=1, head_dim=32,
            q_lora_rank=32, num_experts_per_tok=2, n_routed_experts=8, moe_intermediate_size=32, sliding_window=24,
            o_groups=2, o_lora_rank=16, hc_sinkhorn_iters=4, **INDEX),
    },
    "its attention is not causal": {
        "bert": text("bert"),
    },
    "it has no KV cache": {
        "openai_gpt": Blueprint("openai-gpt", {"vocab_size": 512, "n_embd": 64, "n_head": 4, "n_positions": 512}, "n_layer"),  # noqa: E501
        "rwkv": Blueprint("rwkv", {"vocab_size": 512, "hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 112}),  # noqa: E501
    },
}
# fmt: on
# the outcome that is expected, and what makes the model
CASES: dict[str, tuple[str, Blueprint]] = {
    **{name: ("native", each) for name, each in NATIVE.items()},
    **{name: ("ragged", each) for name, each in RAGGED.items()},
    **{name: ("one by one", each) for name, each in (ONE_BY_ONE | RECURRENT).items()},
    **{name: (f"refused: {words}", each) for words, some in REFUSED.items() for name, each in some.items()},
}
# behind the real pipeline, too: of each way, what people run most
SERVED = (
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2",
    "granite4_h",
    "nemotron_h_nano",
    "gemma4_moe26b",
    "gemma4_e2b",
    "glm4_moe_lite",
)
