"""Writes GGUF files from transformers models, with the `gguf` package and its names of tensors, as
llama.cpp's converter does, and not by our reader.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from transformers import PretrainedConfig, PreTrainedModel

from services.compute.models.architectures import read_config

Kind = GGMLQuantizationType

# Where a block's float16 scales stand: byte offsets.
HALVES = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.IQ4_NL: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_XS: (0,),
    Kind.IQ3_XXS: (0,),
    Kind.IQ3_S: (0,),
    Kind.IQ2_XXS: (0,),
    Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,),
    Kind.IQ1_S: (0,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
}
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "gpt_oss": "gpt-oss",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
}
PERMUTED = ("llama", "granite", "smollm3")  # where the converter changes the order of q's and k's rows
IN_FLOAT32 = (
    "mlp.gate.weight",
    "mlp.gate.wg.weight",
    "mlp.router.weight",
    "shared_expert_gate.weight",
    "norm.weight",
    "_bias",
)  # routers; experts' biases


@dataclass
class Writer:
    """One file in the making."""

    model: PreTrainedModel
    path: Path
    left_out: frozenset[str] = frozenset()  # parameters
    has_fused_experts: bool = False  # gates and ups of the experts in one tensor: a choice of the converter's
    is_squeezed: bool = False  # matrices of one row are rows, as older converters left them

    def __post_init__(self) -> None:
        self.config: PretrainedConfig = self.model.config
        self.architecture = ARCHITECTURES[self.config.model_type]
        self.writer = GGUFWriter(self.path, self.architecture)
        number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        self.names = gguf.get_tensor_name_map(number, self.config.num_hidden_layers)

    def write(self, kind: Kind, *, chat_template: str = "") -> Path:
        """All of the model, its matrices in blocks of that type, and its parameters set to what the blocks mean."""
        self.metadata()
        self.tokenizer()
        if chat_template:
            self.writer.add_chat_template(chat_template)
        self.rope_factors()
        for number, (name, parameter) in enumerate(list(self.model.named_parameters())):
            if name in self.left_out:
                continue
            is_matrix = parameter.dim() > 1 and not name.endswith(IN_FLOAT32)
            self.tensor(name, parameter, kind if is_matrix else Kind.F32, seed=number)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    def tokenizer(self) -> None:
        add_tokenizer(self.writer, self.config.vocab_size)

    def metadata(self) -> None:
        config, writer = self.config, self.writer
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.sizes(config.num_key_value_heads)
        if self.architecture != "granite":
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if (
            self.config.model_type
            in ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "olmo3", "exaone4", "gpt_oss")
            and config.sliding_window
        ):
            writer.add_sliding_window(config.sliding_window)
        if self.config.model_type in ("olmo3", "exaone4") and config.sliding_window:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        rope: dict[str, Any] = config.rope_parameters
        if config.model_type == "olmo3":
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope.get("full_attention", rope)
        stretch = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
        writer.add_rope_freq_base(rope["rope_theta"] * stretch)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope.get("attention_factor") is not None:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if getattr(config, "attn_logit_softcapping", None):
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        self.multipliers()
        self.experts()

    def sizes(self, num_kv_heads: int) -> None:
        config, writer = self.config, self.writer
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(num_kv_heads)

    def multipliers(self) -> None:
        if self.architecture == "granite":
            self.writer.add_attention_scale(self.config.attention_multiplier)
            self.writer.add_embedding_scale(self.config.embedding_multiplier)
            self.writer.add_residual_scale(self.config.residual_multiplier)
            self.writer.add_logit_scale(self.config.logits_scaling)

    def experts(self) -> None:
        count = getattr(self.config, "num_local_experts", None) or getattr(self.config, "num_experts", None)
        if count is None:
            return
        self.writer.add_expert_count(count)
        self.writer.add_expert_used_count(self.config.num_experts_per_tok)
        if self.architecture in ("gpt-oss", "hunyuan-moe"):
            self.writer.add_expert_feed_forward_length(self.config.intermediate_size)
        elif self.architecture != "llama":
            self.writer.add_expert_feed_forward_length(self.config.moe_intermediate_size)
        if self.architecture == "qwen2moe":
            self.writer.add_expert_shared_feed_forward_length(self.config.shared_expert_intermediate_size)

    def rope_factors(self) -> None:
        """Llama 3's scaling as a divisor for each frequency; Phi-3's two lists."""
        rope: dict[str, Any] = self.config.rope_parameters
        if rope.get("rope_type") == "llama3":
            scaled = (
                read_config(self.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).ropes[0].inv_freq.numpy()
            )
            plain = rope["rope_theta"] ** -(np.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
            self.writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
        if rope.get("rope_type") == "longrope":
            for name in ("long", "short"):
                self.writer.add_tensor(f"rope_factors_{name}.weight", np.asarray(rope[f"{name}_factor"], np.float32))

    def tensor(self, name: str, parameter: torch.Tensor, kind: Kind, *, seed: int) -> None:
        """Write a parameter. Gates and ups of all experts, one tensor in the library's memory,
        become two, as they are in the library's files.
        """
        values = parameter.data
        if self.architecture == "gpt-oss" and "experts" in name:
            return self.experts_in_turns(name, values, kind, seed)
        if name.endswith("experts.gate_up_proj") and not self.has_fused_experts:
            half = values.shape[1] // 2
            self.matrix(name.replace("gate_up_proj", "gate_proj.weight"), values[:, :half], kind, seed=seed)
            self.matrix(name.replace("gate_up_proj", "up_proj.weight"), values[:, half:], kind, seed=seed + 1000)
        else:
            self.matrix(name if name.endswith(("weight", "bias")) else f"{name}.weight", values, kind, seed=seed)

    def experts_in_turns(self, name: str, values: torch.Tensor, kind: Kind, seed: int) -> None:
        """gpt-oss' experts, whose outputs come last in memory, and whose gates and ups take turns."""
        stem, end = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        outputs_first = values if end == "bias" else values.transpose(1, 2)
        if stem.endswith("gate_up_proj"):
            for number, which in enumerate(("gate_proj", "up_proj")):
                self.matrix(
                    f"{stem.replace('gate_up_proj', which)}.{end}",
                    outputs_first[:, number::2],
                    kind,
                    seed=seed + 1000 * number,
                )
        else:
            self.matrix(f"{stem}.{end}", outputs_first, kind, seed=seed)

    def matrix(self, name: str, values: torch.Tensor, kind: Kind, *, seed: int) -> None:
        """Write what the values become in blocks of that type, and set them to what these mean."""
        is_shifted = self.architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight")
        permuted = self.permute(name, values.float() + 1 if is_shifted else values.float())
        height, width = permuted.shape[:-1].numel(), permuted.shape[-1]
        rows = permuted.reshape(height, width) if permuted.dim() > 1 else permuted
        data = gguf.quantize(rows.numpy(), kind) if kind in FLOATS else random_blocks(height, width, kind, seed)
        means = torch.from_numpy(np.asarray(gguf.dequantize(data, kind), np.float32)).reshape(permuted.shape)
        order = self.permute(name, torch.arange(permuted.shape[0])[:, None])[:, 0]
        unpermuted = torch.empty_like(means)
        unpermuted[order] = means
        values.copy_(unpermuted - 1 if is_shifted else unpermuted)
        if name.endswith("shared_expert_gate.weight") and self.is_squeezed:
            data = data[0]
        self.writer.add_tensor(
            self.gguf_name(name), data.reshape(*permuted.shape[:-1], -1) if permuted.dim() > 2 else data, raw_dtype=kind
        )

    def permute(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Llama's q and k: of each head, the rows of the first half take turns with those of the second."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        for part, num_heads in heads.items():
            if self.architecture in PERMUTED and part in name:
                return values.reshape(num_heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        return values

    def gguf_name(self, name: str) -> str:
        if name.endswith("experts.gate_up_proj.weight"):
            return f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight"
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found


def random_blocks(n: int, k: int, kind: Kind, seed: int) -> np.ndarray:
    """Rows [n, bytes] of blocks of random codes, with scales that give weights of a spread of some
    0.12: any bits are a valid block.
    """
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (n * k // block, size), dtype=np.uint8)
    if kind == Kind.MXFP4:
        data[:, 0] = rng.integers(119, 122, len(data))  # a power of two
        return data.reshape(n, -1)

    def scale(value: float) -> None:
        for number, offset in enumerate(HALVES[kind]):
            spread = (
                value
                * rng.uniform(0.5, 1.5, len(data))
                * (1 if number == 0 or kind in (Kind.Q2_K, Kind.Q4_K, Kind.Q5_K) else -8)
            )
            data[:, offset : offset + 2] = spread.astype(np.float16)[:, None].view(np.uint8)

    scale(1.0)
    scale(0.12 / float(gguf.dequantize(data.reshape(n, -1), kind).std()))
    return data.reshape(n, -1)


def add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """A byte-level vocabulary of bytes and made-up words."""
    alphabet = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    tokens = [
        "<|bos|>",
        "<|eos|>",
        *(chr(each) for each in alphabet),
        *(chr(256 + number) for number in range(256 - len(alphabet))),
        "he",
        "ll",
    ]
    tokens += [f"w{number}" for number in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
