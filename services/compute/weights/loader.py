"""A Hugging Face checkpoint folder to ModelWeights: safetensors, in one file or sharded, with a progress bar.

Q, K and V are joined into one matrix, and gate and up, while they are read: one GEMM each. A tensor is cast, packed and quantized as it
is read, so the peak is the model in its final form plus the tensors of one layer.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from services.compute.backends.dispatch import Linear, is_native, make_linear, make_mlp, restore_linear
from services.compute.host_memory import give_back_free_memory
from services.compute.models.config import ModelConfig, Packed
from services.compute.models.decoder import LayerWeights, ModelWeights
from shared.errors import StartupError

Tensor = torch.Tensor


class Checkpoint:
    """The tensors of a folder, by name, read on demand."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.file_by_name = self._index()
        self._bar = tqdm(total=len(self.file_by_name), desc="loading weights", unit="tensor", file=sys.stderr, mininterval=0.5)
        self._open: dict[Path, Any] = {}

    def _index(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                return {name: self.folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
            files = sorted(self.folder.glob("*.safetensors"))
            names = {}
            for file in files:
                with safe_open(file, framework="pt") as tensors:
                    names.update(dict.fromkeys(tensors.keys(), file))
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise StartupError(f"{self.folder}: the weights can't be read: {error}") from None
        if not names:
            raise StartupError(f"{self.folder} holds no *.safetensors; other formats are not read")
        return names

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, in the model's dtype, on its device. Raises StartupError if it is missing or of another shape."""
        file = self.file_by_name.get(name)
        if file is None:
            raise StartupError(f"{self.folder}: the checkpoint has no tensor {name}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{file}: {error}") from None
        if tuple(tensor.shape) != shape:
            raise StartupError(f"{file}: {name} has the shape {tuple(tensor.shape)}, config.json says {shape}")
        self._bar.update()
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def read_joined(self, names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
        """Several tensors as one, along the first dimension."""
        return torch.cat([self.read(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def parts(self, prefix: str) -> dict[str, Tensor]:
        """A packed layer's parts, as they are."""
        found = {}
        for name, file in self.file_by_name.items():
            if name.startswith(prefix):
                if file not in self._open:
                    self._open[file] = safe_open(file, framework="pt")
                found[name.removeprefix(prefix)] = self._open[file].get_tensor(name)
                self._bar.update()
        return found

    def close(self) -> None:
        self._bar.close()
        self._open.clear()


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, quantization: str = "none", group: int = 64, attention_output: bool = False
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
    checkpoint = Checkpoint(folder, dtype, device)
    loader = Loader(checkpoint, config, config.packed or Packed(quantization, group, attention_output))
    try:
        embedding = checkpoint.read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = []
        for number in range(config.num_layers):
            layers.append(loader.layer(f"model.layers.{number}."))
            give_back_free_memory()
        norm = checkpoint.read("model.norm.weight", (config.hidden_size,))
        return ModelWeights(embedding=embedding, layers=layers, norm=norm, lm_head=loader.head(embedding))
    finally:
        checkpoint.close()
        give_back_free_memory()


@dataclass(frozen=True, slots=True)
class Loader:
    """Makes a model's layers from a checkpoint's tensors, or restores them from packed ones."""

    checkpoint: Checkpoint
    config: ModelConfig
    packing: Packed

    def layer(self, prefix: str) -> LayerWeights:
        config, read = self.config, self.checkpoint.read
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
            output=self.linear(
                prefix + "output.", [attention + "o_proj."], [(hidden, q_size)], config.has_output_bias, is_quantized=self.packing.attention_output
            ),
            post_norm=read(prefix + "post_attention_layernorm.weight", (hidden,)),
            mlp=make_mlp(gate_up, down),
        )

    def head(self, embedding: Tensor) -> Linear:
        """The last layer: where the embedding is tied, the embedding's own values, packed once more."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        if self.config.is_tied and self.config.packed is None:
            return make_linear(embedding, quantization=self.packing.quantization, group=self.packing.group)
        return self.linear("lm_head.", ["lm_head."], [shape], False)

    def linear(
        self, name: str, sources: list[str], shapes: list[tuple[int, int]], has_bias: bool, *, is_gated: bool = False, is_quantized: bool = True
    ) -> Linear:
        """A layer of several matrices with the same inputs."""
        quantization, group = self.packing.quantization if is_quantized else "none", self.packing.group
        if self.config.packed is not None:
            n, k = sum(shape[0] for shape in shapes), shapes[0][1]
            parts = self.checkpoint.parts(name)
            try:
                return restore_linear(parts, n, k, quantization=quantization, group=group, is_gated=is_gated, has_bias=has_bias)
            except ValueError as error:
                raise StartupError(f"{self.checkpoint.folder}: {name.rstrip('.')}: {error}") from None
        weight = self.checkpoint.read_joined([source + "weight" for source in sources], list(shapes))
        bias = self.checkpoint.read_joined([source + "bias" for source in sources], [(shape[0],) for shape in shapes]) if has_bias else None
        return make_linear(weight, bias, quantization=quantization, group=group, is_gated=is_gated)
