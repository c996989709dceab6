"""A Hugging Face checkpoint folder to ModelWeights: safetensors, in one file or sharded, with a progress bar.

Q, K and V are joined into one matrix, and gate and up, while they are read: one GEMM each. A tensor is cast, packed and quantized as it
is read, so the peak is the model in its final form plus the tensors of one layer.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from services.compute.kernels import Linear, make_linear, make_mlp
from services.compute.models.config import ModelConfig
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

    def close(self) -> None:
        self._bar.close()
        self._open.clear()


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, quantization: str = "none", group: int = 64) -> ModelWeights:
    """All of the model's weights, quantized layer by layer as they are read. Raises StartupError, naming the tensor that is missing or wrong."""
    checkpoint = Checkpoint(folder, dtype, device)
    try:
        embedding = checkpoint.read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        make = partial(make_linear, quantization=quantization, group=group)
        layers = [_load_layer(checkpoint, config, f"model.layers.{number}.", make) for number in range(config.num_layers)]
        norm = checkpoint.read("model.norm.weight", (config.hidden_size,))
        head = embedding if config.is_tied else checkpoint.read("lm_head.weight", (config.vocab_size, config.hidden_size))
        return ModelWeights(embedding=embedding, layers=layers, norm=norm, lm_head=make(head))
    finally:
        checkpoint.close()


def _load_layer(checkpoint: Checkpoint, config: ModelConfig, prefix: str, make: Callable[..., Linear]) -> LayerWeights:
    hidden, inter, q_size, kv_size = (
        config.hidden_size,
        config.intermediate_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv_names, qkv_sizes = [attention + f"{name}_proj." for name in "qkv"], [q_size, kv_size, kv_size]
    gate_up_names = [mlp + "gate_proj.", mlp + "up_proj."]

    def joined(make: Callable[..., Linear], names: list[str], shapes: list[tuple[int, int]], has_bias: bool, *, is_gated: bool = False) -> Linear:
        weight = checkpoint.read_joined([name + "weight" for name in names], list(shapes))
        bias = checkpoint.read_joined([name + "bias" for name in names], [(shape[0],) for shape in shapes]) if has_bias else None
        return make(weight, bias, is_gated=is_gated)

    def head_norm(name: str) -> Tensor | None:
        return checkpoint.read(attention + name, (config.head_dim,)) if config.has_qk_norm else None

    return LayerWeights(
        input_norm=checkpoint.read(prefix + "input_layernorm.weight", (hidden,)),
        qkv=joined(make, qkv_names, [(size, hidden) for size in qkv_sizes], config.has_qkv_bias),
        q_norm=head_norm("q_norm.weight"),
        k_norm=head_norm("k_norm.weight"),
        output=joined(make_linear, [attention + "o_proj."], [(hidden, q_size)], config.has_output_bias),  # in 16 bits always, as PPL.LLM has it
        post_norm=checkpoint.read(prefix + "post_attention_layernorm.weight", (hidden,)),
        mlp=make_mlp(
            joined(make, gate_up_names, [(inter, hidden)] * 2, config.has_mlp_bias, is_gated=True),
            joined(make, [mlp + "down_proj."], [(hidden, inter)], config.has_mlp_bias),
        ),
    )
