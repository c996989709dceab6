"""A checkpoint to ModelWeights, with a progress bar.

Q, K and V are joined into one matrix, and gate and up, while they are read: one GEMM each. A tensor
is cast, packed and quantized as it is read, so the peak is the model in its final form plus the
tensors of one layer.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from services.compute.backends.backend import Backend, LayerWeights, Linear, Mlp, Norms
from services.compute.backends.matrix import Dense, concatenate
from services.compute.host_memory import give_back_free_memory
from services.compute.models.config import IN_EIGHT_BITS, ModelConfig, Packed
from services.compute.models.decoder import ModelWeights, Rows
from services.compute.models.moe import Expert, MoeConfig, MoeMlp, SharedExpert
from services.compute.weights.gguf_source import GgufSource
from services.compute.weights.mxfp4 import read_expert
from services.compute.weights.safetensors_source import SafetensorsSource
from shared.process.errors import StartupError
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")


def open_source(location: Path, config: ModelConfig, backend: Backend) -> SafetensorsSource | GgufSource:
    """The tensors of a folder, or of a GGUF file. Raises StartupError."""
    dtype, device = backend.dtype, backend.device
    return GgufSource(location, dtype, device) if location.is_file() else SafetensorsSource(location, dtype, device, config.quantization_config)


def check_quantizable(source: SafetensorsSource | GgufSource, option: str) -> None:
    """Raises StartupError, which names the option that asks for it, where layers keep the form that
    they have in the file."""
    if source.quantized_as:
        again = "; penstock quantize --calibrate dequantizes it first" if isinstance(source, GgufSource) else ""
        reason = f"is quantized already ({source.quantized_as}) and keeps its form; only dense checkpoints are quantized{again}"
        raise StartupError(f"{option}: {source.folder} {reason}")


def load_weights(
    folder: Path,
    config: ModelConfig,
    backend: Backend,
    *,
    quantization: str = "none",
    group: int = 32,
    attention_output: bool = False,
    lm_head: bool = False,
) -> ModelWeights:
    """Load all of the model's weights, of a folder or a GGUF file: quantized layer by layer as they
    are read, or packed as `penstock quantize` left them.

    Raises StartupError, naming the tensor that is missing or wrong.
    """
    if config.packed is not None:
        if quantization not in ("none", config.packed.quantization):
            raise StartupError(f"--quantization {quantization}: {folder} is quantized already, as {config.packed.quantization}")
        has_four_bits = config.packed.quantization in IN_EIGHT_BITS
        if has_four_bits and attention_output and not config.packed.attention_output:
            raise StartupError(f"--quantize-attention-output: {folder} is quantized already, without it")
        if has_four_bits and lm_head and not config.packed.lm_head:
            raise StartupError(f"--quantize-lm-head: {folder} is quantized already, without it")
    source = open_source(folder, config, backend)
    loader = Loader(source, config, backend, config.packed or Packed(quantization, group, attention_output, lm_head))
    try:
        if quantization != "none" or attention_output or lm_head:
            option = "--quantize-attention-output" if attention_output else "--quantize-lm-head"
            check_quantizable(source, f"--quantization {quantization}" if quantization != "none" else option)
        embedding = source.embedding((config.vocab_size, config.hidden_size))
        layers = []
        for number in range(config.num_layers):
            layers.append(loader.layer(number))
            give_back_free_memory()
        norm = loader.norm("model.norm.weight", config.hidden_size)
        weights = ModelWeights(embedding=embedding, layers=layers, norm=norm, lm_head=loader.head(embedding))
        source.report()
        loader.report()
        return weights
    finally:
        source.close()
        give_back_free_memory()


def norm_names(config: ModelConfig) -> dict[str, str]:
    """The norms of the model's layers: the tensor's name in a layer, by the field of Norms."""
    names = {}
    if config.has_pre_norms:
        names["before_attention"] = "input_layernorm.weight"
        names["before_mlp"] = "pre_feedforward_layernorm.weight" if config.has_post_norms else "post_attention_layernorm.weight"
    if config.has_post_norms:
        names |= {"after_attention": "post_attention_layernorm.weight", "after_mlp": "post_feedforward_layernorm.weight"}
    if config.has_qk_norm:
        names |= {"q": "self_attn.q_norm.weight", "k": "self_attn.k_norm.weight"}
    return names


@dataclass(frozen=True, slots=True)
class Loader:
    """Makes a model's layers from a checkpoint's tensors, or restores them from packed ones."""

    source: SafetensorsSource | GgufSource
    config: ModelConfig
    backend: Backend
    packing: Packed
    # layers, by the form that the file has and no kernel reads
    widened: Counter[str] = field(default_factory=Counter)

    def report(self) -> None:
        """Say in the log what the file holds in fewer bits than the memory."""
        if self.widened:
            layers = "; ".join(f"{count} of {form}" for form, count in self.widened.items())
            log.warning(f"layers are widened to {str(self.backend.dtype).removeprefix('torch.')}: nothing here reads them as the file has them", layers=layers)

    def layer(self, number: int) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{number}."
        hidden, q_size, kv_size = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = prefix + "self_attn."
        if config.has_fused_projections:
            qkv_names, qkv_shapes = [attention + "qkv_proj."], [(q_size + 2 * kv_size, hidden)]
        else:
            qkv_names, qkv_shapes = [attention + f"{name}_proj." for name in "qkv"], [(size, hidden) for size in (q_size, kv_size, kv_size)]
        sizes = {"q": q_size, "k": kv_size} if config.is_qk_norm_joint else {"q": config.head_dim, "k": config.head_dim}
        norms = {field: self.norm(prefix + name, sizes.get(field, hidden)) for field, name in norm_names(config).items()}
        return LayerWeights(
            norms=Norms(**norms),
            qkv=self.linear(prefix + "qkv.", qkv_names, qkv_shapes, config.has_qkv_bias),
            output=self.linear(prefix + "output.", [attention + "o_proj."], [(hidden, q_size)], config.has_output_bias, quantization=self.packing.of_output),
            mlp=self.mixture(prefix, config.moe) if config.moe is not None and number in config.moe.sparse_layers else self.mlp(prefix),
            sinks=self.source.dense(attention + "sinks", (config.num_heads,)).float() if config.has_sinks else None,
        )

    def mlp(self, prefix: str) -> Mlp:
        hidden, inter, has_bias = self.config.hidden_size, self.config.intermediate_size, self.config.has_mlp_bias
        if self.config.has_fused_projections:
            gate_up_names, gate_up_shapes = [prefix + "mlp.gate_up_proj."], [(2 * inter, hidden)]
        else:
            gate_up_names, gate_up_shapes = [prefix + "mlp.gate_proj.", prefix + "mlp.up_proj."], [(inter, hidden)] * 2
        gate_up = self.linear(prefix + "gate_up.", gate_up_names, gate_up_shapes, has_bias, is_gated=True)
        return self.backend.make_mlp(gate_up, self.linear(prefix + "down.", [prefix + "mlp.down_proj."], [(hidden, inter)], has_bias))

    def mixture(self, prefix: str, moe: MoeConfig) -> MoeMlp:
        """Load experts by Mixtral's names, by Qwen's or by gpt-oss'; their experts each a tensor of
        its own, or all in one, as transformers 5 has them in memory."""
        hidden = self.config.hidden_size
        block = prefix + ("block_sparse_moe." if self.source.has(prefix + "block_sparse_moe.gate.weight") else "mlp.")
        router = self.linear(
            prefix + "router.", [block + ("router." if moe.has_bias else "gate.")], [(moe.num_experts, hidden)], moe.has_bias, quantization="none"
        )
        shared = None
        if moe.shared_intermediate_size:
            names = [block + f"shared_expert.{which}_proj." for which in ("gate", "up", "down")]
            gate = self.linear(prefix + "shared.gate.", [block + "shared_expert_gate."], [(1, hidden)], False, quantization="none")
            shared = SharedExpert(self.expert(prefix + "shared.", names, moe.shared_intermediate_size), gate)
        if moe.has_bias and isinstance(self.source, SafetensorsSource) and self.config.packed is None:
            experts = [self.gpt_oss_expert(block + "experts.", number, moe) for number in range(moe.num_experts)]
        elif self.source.has(block + "experts.gate_up_proj"):
            experts = self.fused_experts(block, moe)
        else:
            experts = [self.one_expert(prefix, block, number, moe) for number in range(moe.num_experts)]
        grouped = self.backend.group_experts([(each.gate_up, each.down) for each in experts], moe.num_experts)
        return MoeMlp(self.backend.row_math, router, tuple(experts), moe.num_active, moe.has_normalized_weights, shared, grouped)

    def one_expert(self, prefix: str, block: str, number: int, moe: MoeConfig) -> Expert:
        which = ("w1", "w3", "w2") if block.endswith("block_sparse_moe.") else ("gate_proj", "up_proj", "down_proj")
        names = [f"{block}experts.{number}.{each}." for each in which]
        return self.expert(f"{prefix}experts.{number}.", names, moe.intermediate_size, moe.has_bias)

    def expert(self, name: str, sources: list[str], inter: int, has_bias: bool = False) -> Expert:
        """name: when it is packed; sources: of gate, up and down."""
        hidden = self.config.hidden_size
        gate_up = self.linear(name + "gate_up.", sources[:2], [(inter, hidden)] * 2, has_bias, is_gated=True)
        return Expert(gate_up, self.linear(name + "down.", sources[2:], [(hidden, inter)], has_bias))

    def fused_experts(self, block: str, moe: MoeConfig) -> list[Expert]:
        """Load experts from [experts, 2 * intermediate, hidden], gates first, and [experts, hidden,
        intermediate]."""
        hidden, inter, quantization, group = self.config.hidden_size, moe.intermediate_size, self.packing.quantization, self.packing.group
        make, activation = self.backend.make_linear, self.config.activation
        gate_up = self.source.dense(block + "experts.gate_up_proj", (moe.num_experts, 2 * inter, hidden))
        down = self.source.dense(block + "experts.down_proj", (moe.num_experts, hidden, inter))
        return [
            Expert(
                make(Dense(gate_up[number]), quantization=quantization, group=group, is_gated=True, activation=activation),
                make(Dense(down[number]), quantization=quantization, group=group),
            )
            for number in range(moe.num_experts)
        ]

    def gpt_oss_expert(self, block: str, number: int, moe: MoeConfig) -> Expert:
        """Load one of experts in which gates and ups take turns."""
        assert isinstance(self.source, SafetensorsSource)
        hidden, inter, quantization, group = self.config.hidden_size, moe.intermediate_size, self.packing.quantization, self.packing.group
        make, activation = self.backend.make_linear, self.config.activation
        order = torch.arange(2 * inter).view(-1, 2).T.flatten()
        gate_up, gate_up_bias = read_expert(self.source, block + "gate_up_proj", number, (2 * inter, hidden), order)
        down, down_bias = read_expert(self.source, block + "down_proj", number, (hidden, inter), torch.arange(hidden))
        return Expert(
            make(gate_up, gate_up_bias, quantization=quantization, group=group, is_gated=True, activation=activation),
            make(down, down_bias, quantization=quantization, group=group),
        )

    def norm(self, name: str, size: int) -> Tensor:
        """The weight of a norm. A packed checkpoint has it with the offset."""
        weight = self.source.dense(name, (size,))
        return weight if self.config.packed is not None else (weight.float() + self.config.norm_offset).to(weight.dtype)

    def head(self, embedding: Rows) -> Linear:
        """The last layer: where the embedding is tied, the embedding's own values, packed once
        more."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        if self.config.is_tied and self.config.packed is None:
            return self.backend.make_linear(self.source.tied_head(embedding, shape), quantization=self.packing.of_head, group=self.packing.group)
        return self.linear("lm_head.", ["lm_head."], [shape], False, quantization=self.packing.of_head)

    def linear(
        self, name: str, sources: list[str], shapes: list[tuple[int, int]], has_bias: bool, *, is_gated: bool = False, quantization: str | None = None
    ) -> Linear:
        """A layer of several matrices with the same inputs, quantized like most of them unless it
        says how."""
        if self.config.packed is not None:
            assert isinstance(self.source, SafetensorsSource)
            n, k = sum(shape[0] for shape in shapes), shapes[0][1]
            parts = self.source.parts(name)
            try:
                return self.backend.restore_linear(parts, n, k, is_gated=is_gated, has_bias=has_bias, activation=self.config.activation)
            except ValueError as error:
                raise StartupError(f"{self.source.folder}: {name.rstrip('.')}: {error}") from None
        quantization, group = quantization or self.packing.quantization, self.packing.group
        matrices = [self.source.matrix(source, shape) for source, shape in zip(sources, shapes, strict=True)]
        biases = [self.source.dense(source + "bias", shape[:1]) for source, shape in zip(sources, shapes, strict=True)] if has_bias else []
        bias = torch.cat(biases) if biases else None
        joined = concatenate(matrices, self.backend.dtype)
        # where a backend has no layers of several forms, all of them are widened
        widened = [each for each in matrices if not isinstance(each, Dense)] if not self.backend.is_kept(joined) else []
        self.widened.update({str(each) for each in widened})
        return self.backend.make_linear(joined, bias, quantization=quantization, group=group, is_gated=is_gated, activation=self.config.activation)
