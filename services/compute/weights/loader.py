"""A checkpoint to ModelWeights, with a progress bar.

Q, K and V are joined into one matrix, and gate and up, while they are read: one GEMM each. A tensor is cast, packed and quantized as it
is read, so the peak is the model in its final form plus the tensors of one layer.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from services.compute.backends.dispatch import Linear, is_kept, is_native, make_linear, make_mlp, restore_linear
from services.compute.backends.matrix import Dense, concatenate
from services.compute.host_memory import give_back_free_memory
from services.compute.models.config import ModelConfig, Packed
from services.compute.models.decoder import LayerWeights, ModelWeights
from services.compute.weights.safetensors_source import SafetensorsSource
from shared.errors import StartupError
from shared.telemetry import get_logger

Tensor = torch.Tensor

log = get_logger("penstock.compute")


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str = "none",
    group: int = 64,
    attention_output: bool = False,
    lm_head: bool = False,
) -> ModelWeights:
    """All of the model's weights, quantized layer by layer as they are read, or packed as `penstock quantize` left them.

    Raises StartupError, naming the tensor that is missing or wrong.
    """
    if config.packed is not None:
        if not is_native(dtype, device):
            raise StartupError(
                f"{folder} is packed for the native kernels, which run in bfloat16 on a CPU: build them (penstock build-kernels), or use its source"
            )
        if quantization not in ("none", config.packed.quantization):
            raise StartupError(f"--quantization {quantization}: {folder} is quantized already, as {config.packed.quantization}")
        if attention_output and not config.packed.attention_output:
            raise StartupError(f"--quantize-attention-output: {folder} is quantized already, without it")
        if lm_head and not config.packed.lm_head:
            raise StartupError(f"--quantize-lm-head: {folder} is quantized already, without it")
    source = SafetensorsSource(folder, dtype, device)
    loader = Loader(source, config, dtype, config.packed or Packed(quantization, group, attention_output, lm_head))
    try:
        embedding = source.dense("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = []
        for number in range(config.num_layers):
            layers.append(loader.layer(f"model.layers.{number}."))
            give_back_free_memory()
        norm = source.dense("model.norm.weight", (config.hidden_size,))
        weights = ModelWeights(embedding=embedding, layers=layers, norm=norm, lm_head=loader.head(embedding))
        loader.report()
        return weights
    finally:
        source.close()
        give_back_free_memory()


@dataclass(frozen=True, slots=True)
class Loader:
    """Makes a model's layers from a checkpoint's tensors, or restores them from packed ones."""

    source: SafetensorsSource
    config: ModelConfig
    dtype: torch.dtype
    packing: Packed
    widened: Counter[str] = field(default_factory=Counter)  # layers, by the form that the file has and no kernel reads

    def report(self) -> None:
        """Say in the log what the file holds in fewer bits than the memory."""
        if self.widened:
            layers = "; ".join(f"{count} of {form}" for form, count in self.widened.items())
            log.warning(f"layers are widened to {str(self.dtype).removeprefix('torch.')}: nothing here reads them as the file has them", layers=layers)

    def layer(self, prefix: str) -> LayerWeights:
        config, read = self.config, self.source.dense
        hidden, inter, q_size, kv_size = (
            config.hidden_size,
            config.intermediate_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv_names, qkv_shapes = [attention + f"{name}_proj." for name in "qkv"], [(size, hidden) for size in (q_size, kv_size, kv_size)]
        gate_up_names = [mlp + "gate_proj.", mlp + "up_proj."]
        gate_up = self.linear(prefix + "gate_up.", gate_up_names, [(inter, hidden)] * 2, config.has_mlp_bias, is_gated=True)
        down = self.linear(prefix + "down.", [mlp + "down_proj."], [(hidden, inter)], config.has_mlp_bias)
        return LayerWeights(
            input_norm=read(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self.linear(prefix + "qkv.", qkv_names, qkv_shapes, config.has_qkv_bias),
            q_norm=read(attention + "q_norm.weight", (config.head_dim,)) if config.has_qk_norm else None,
            k_norm=read(attention + "k_norm.weight", (config.head_dim,)) if config.has_qk_norm else None,
            output=self.linear(prefix + "output.", [attention + "o_proj."], [(hidden, q_size)], config.has_output_bias, quantization=self.packing.of_output),
            post_norm=read(prefix + "post_attention_layernorm.weight", (hidden,)),
            mlp=make_mlp(gate_up, down),
        )

    def head(self, embedding: Tensor) -> Linear:
        """The last layer: where the embedding is tied, the embedding's own values, packed once more."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        if self.config.is_tied and self.config.packed is None:
            return make_linear(Dense(embedding), self.dtype, quantization=self.packing.of_head, group=self.packing.group)
        return self.linear("lm_head.", ["lm_head."], [shape], False, quantization=self.packing.of_head)

    def linear(
        self, name: str, sources: list[str], shapes: list[tuple[int, int]], has_bias: bool, *, is_gated: bool = False, quantization: str | None = None
    ) -> Linear:
        """A layer of several matrices with the same inputs, quantized like most of them unless it says how."""
        if self.config.packed is not None:
            n, k = sum(shape[0] for shape in shapes), shapes[0][1]
            parts = self.source.parts(name)
            try:
                return restore_linear(parts, n, k, is_gated=is_gated, has_bias=has_bias)
            except ValueError as error:
                raise StartupError(f"{self.source.folder}: {name.rstrip('.')}: {error}") from None
        quantization, group = quantization or self.packing.quantization, self.packing.group
        matrices = [self.source.matrix(source, shape) for source, shape in zip(sources, shapes, strict=True)]
        biases = [self.source.dense(source + "bias", shape[:1]) for source, shape in zip(sources, shapes, strict=True)] if has_bias else []
        bias = torch.cat(biases) if biases else None
        joined = concatenate(matrices, self.dtype)
        if isinstance(joined, Dense) or not is_kept(joined, self.dtype):
            self.widened.update({str(each) for each in matrices if not isinstance(each, Dense)})
        return make_linear(joined, self.dtype, bias, quantization=quantization, group=group, is_gated=is_gated)
