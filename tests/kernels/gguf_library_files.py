"""GGUF files of the architectures that run on transformers' modules, written as llama.cpp's converter writes them."""

import gguf
import torch

from tests.kernels.gguf_files import ARCHITECTURES, Kind, Writer

ARCHITECTURES |= {
    "cohere": "command-r",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3n_text": "gemma3n",
    "glm4": "glm4",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}


class LibraryWriter(Writer):
    """Another set of metadata, and tensors that are cut or put together."""

    is_old = False  # DeepSeek's expansion of keys and values in one tensor

    def metadata(self) -> None:
        config, writer = self.config, self.writer
        is_gemma, is_deepseek = self.architecture == "gemma3n", self.architecture == "deepseek2"
        self.sizes(1 if is_deepseek and not self.is_old else config.num_key_value_heads)
        if is_gemma or self.architecture in ("glm4", "deepseek2"):
            writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        else:
            writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        writer.add_rope_freq_base(rope["rope_theta"])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if is_gemma:
            self.gemma3n()
        if is_deepseek:
            self.deepseek2()
        if self.architecture in ("cohere2", "command-r"):
            writer.add_logit_scale(config.logit_scale)
        if self.architecture == "cohere2":
            writer.add_sliding_window(config.sliding_window)
        if self.architecture == "stablelm":
            writer.add_parallel_residual(config.use_parallel_residual)

    def gemma3n(self) -> None:
        config, writer = self.config, self.writer
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        normal = torch.distributions.normal.Normal(0, 1)
        writer.add_activation_sparsity_scale(
            [normal.icdf(torch.tensor(each)).item() for each in config.activation_sparsity_pattern]
        )

    def deepseek2(self) -> None:
        config, writer = self.config, self.writer
        sizes = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        if self.is_old:
            writer.add_key_length(sizes[0])
            writer.add_value_length(sizes[1])
        else:
            writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
            writer.add_value_length(config.kv_lora_rank)
            writer.add_key_length_mla(sizes[0])
            writer.add_value_length_mla(sizes[1])
        writer.add_kv_lora_rank(config.kv_lora_rank)
        if config.q_lora_rank is not None:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.norm_topk_prob:
            writer.add_expert_weights_norm(True)
        if config.n_group is not None:
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
        if config.model_type == "deepseek_v3":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def rope_factors(self) -> None:
        """No architecture here has any. Written besides: a buffer that is a part of checkpoints;
        what nobody reads of layers that share keys.
        """
        if self.architecture == "gemma3n":
            for number in range(
                self.config.num_hidden_layers - self.config.num_kv_shared_layers, self.config.num_hidden_layers
            ):
                for which in ("attn_k", "attn_v"):
                    self.writer.add_tensor(
                        f"blk.{number}.{which}.weight",
                        torch.ones(self.config.head_dim, self.config.hidden_size).numpy(),
                    )
                self.writer.add_tensor(f"blk.{number}.attn_k_norm.weight", torch.ones(self.config.head_dim).numpy())
        for name, buffer in self.model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.3)
                self.writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy())

    def tensor(self, name: str, parameter: torch.Tensor, kind: Kind, *, seed: int) -> None:
        values = parameter.data
        if name.endswith("kv_b_proj.weight") and not self.is_old:
            self.expansion(name, values, kind, seed)
        elif ".altup_" not in name and "model.altup" not in name:
            is_small = "altup" in name  # matrices of four columns
            super().tensor(name, parameter, Kind.F32 if is_small else kind, seed=seed)
        elif ".0." in name:
            stack = [
                self.model.get_parameter(name.replace(".0.", f".{number}.")).data
                for number in range(self.config.altup_num_inputs - 1)
            ]
            whole = torch.stack(stack)
            self.matrix(name.replace(".0.", "."), whole, kind, seed=seed)
            for part, meant in zip(stack, whole, strict=True):
                part.copy_(meant)

    def expansion(self, name: str, values: torch.Tensor, kind: Kind, seed: int) -> None:
        """Keys, transposed, and values in a tensor each."""
        sizes = [self.config.qk_nope_head_dim, self.config.v_head_dim]
        of_heads = values.view(self.config.num_attention_heads, sum(sizes), -1)
        keys, others = (part.clone() for part in of_heads.split(sizes, dim=1))
        keys = keys.transpose(1, 2).contiguous()
        self.matrix(name.replace("kv_b_proj", "k_b_proj"), keys, kind, seed=seed)
        self.matrix(name.replace("kv_b_proj", "v_b_proj"), others, kind, seed=seed + 1000)
        of_heads.copy_(torch.cat([keys.transpose(1, 2), others], dim=1))
