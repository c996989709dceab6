"""Writes GGUF files from transformers models, with the `gguf` package, by the format's description and not by our reader."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from transformers import PretrainedConfig, PreTrainedModel

from services.compute.models.config import read_config

Kind = GGMLQuantizationType

# Where a block's float16 scales stand: byte offsets.
HALVES = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,), Kind.IQ4_NL: (0,), Kind.Q2_K: (80, 82), Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_XS: (0,), Kind.IQ3_XXS: (0,), Kind.IQ3_S: (0,), Kind.IQ2_XXS: (0,), Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,), Kind.IQ1_S: (0,), Kind.TQ1_0: (52,), Kind.TQ2_0: (64,),
}  # fmt: skip
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma2": "gemma2", "gemma3_text": "gemma3"}


@dataclass
class Writer:
    """One file in the making."""

    model: PreTrainedModel
    path: Path
    left_out: frozenset[str] = frozenset()  # parameters

    def __post_init__(self) -> None:
        self.config: PretrainedConfig = self.model.config
        self.architecture = ARCHITECTURES[self.config.model_type]
        self.writer = GGUFWriter(self.path, self.architecture)

    def write(self, kind: Kind, *, chat_template: str = "") -> Path:
        """All of the model, its matrices in blocks of that type, and its parameters set to what the blocks mean."""
        self.metadata()
        add_tokenizer(self.writer, self.config.vocab_size)
        if chat_template:
            self.writer.add_chat_template(chat_template)
        self.rope_factors()
        for number, (name, parameter) in enumerate(list(self.model.named_parameters())):
            if name in self.left_out:
                continue
            self.tensor(name, parameter, kind if parameter.dim() == 2 else Kind.F32, seed=number)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    def metadata(self) -> None:
        config, writer = self.config, self.writer
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if self.config.model_type in ("mistral", "phi3", "gemma2", "gemma3_text") and config.sliding_window:
            writer.add_sliding_window(config.sliding_window)
        rope: dict[str, Any] = config.rope_parameters
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if getattr(config, "attn_logit_softcapping", None):
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)

    def rope_factors(self) -> None:
        """Llama 3's scaling as a divisor for each frequency; Phi-3's two lists."""
        rope: dict[str, Any] = self.config.rope_parameters
        if rope.get("rope_type") == "llama3":
            scaled = read_config(self.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).ropes[0].inv_freq.numpy()
            plain = rope["rope_theta"] ** -(np.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
            self.writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
        if rope.get("rope_type") == "longrope":
            for name in ("long", "short"):
                self.writer.add_tensor(f"rope_factors_{name}.weight", np.asarray(rope[f"{name}_factor"], np.float32))

    def tensor(self, name: str, parameter: torch.Tensor, kind: Kind, *, seed: int) -> None:
        values = parameter.detach().float()
        if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        permuted = self.permute(name, values)
        data = gguf.quantize(permuted.numpy(), kind) if kind in FLOATS else random_blocks(permuted.shape[0], permuted.shape[1], kind, seed)
        means = torch.from_numpy(np.asarray(gguf.dequantize(data, kind), np.float32))
        order = self.permute(name, torch.arange(permuted.shape[0])[:, None])[:, 0]
        unpermuted = torch.empty_like(means)
        unpermuted[order] = means
        with torch.no_grad():
            parameter.copy_(unpermuted - 1 if self.architecture.startswith("gemma") and name.endswith("norm.weight") else unpermuted)
        self.writer.add_tensor(self.gguf_name(name), data, raw_dtype=kind)

    def permute(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Llama's q and k: of each head, the rows of the first half take turns with those of the second."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        for part, num_heads in heads.items():
            if self.architecture == "llama" and part in name:
                return values.reshape(num_heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        return values

    def gguf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        names = GEMMA_NAMES if self.architecture.startswith("gemma") else NAMES
        if stem.startswith("model.layers."):
            _, _, number, rest = stem.split(".", 3)
            return f"blk.{number}.{names[rest]}.{kind}"
        return f"{names[stem]}.{kind}"


def random_blocks(n: int, k: int, kind: Kind, seed: int) -> np.ndarray:
    """Rows [n, bytes] of blocks of random codes, with scales that give weights of a spread of some 0.12: any bits are a valid block."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (n * k // block, size), dtype=np.uint8)
    if kind == Kind.MXFP4:
        data[:, 0] = rng.integers(119, 122, len(data))  # a power of two
        return data.reshape(n, -1)

    def scale(value: float) -> None:
        for number, offset in enumerate(HALVES[kind]):
            spread = value * rng.uniform(0.5, 1.5, len(data)) * (1 if number == 0 or kind in (Kind.Q2_K, Kind.Q4_K, Kind.Q5_K) else -8)
            data[:, offset : offset + 2] = spread.astype(np.float16)[:, None].view(np.uint8)

    scale(1.0)
    scale(0.12 / float(gguf.dequantize(data.reshape(n, -1), kind).std()))
    return data.reshape(n, -1)


def add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """A byte-level vocabulary of bytes and made-up words."""
    alphabet = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    tokens = ["<|bos|>", "<|eos|>", *(chr(each) for each in alphabet), *(chr(256 + number) for number in range(256 - len(alphabet))), "he", "ll"]
    tokens += [f"w{number}" for number in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
