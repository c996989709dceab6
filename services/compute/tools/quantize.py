"""`penstock quantize`: a checkpoint with its layers quantized and packed, which loads as fast as it is read.

The packed form is the same for every instruction set. Embedding and norms stay as they are; a tied LM head is stored beside the embedding.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.compute.backends.cpu.library import load_library
from services.compute.backends.cpu.linear import NativeLinear, NativeMlp
from services.compute.backends.dispatch import Linear, Mlp
from services.compute.models.config import PACKED_METHOD, ModelConfig, read_config
from services.compute.models.decoder import ModelWeights
from services.compute.models.moe import MoeMlp
from services.compute.weights.loader import load_weights, norm_names
from shared.errors import StartupError
from shared.model_files import TOKENIZER_FILES, open_model


def quantize(source: str, out: Path, *, quantization: str, group: int, attention_output: bool = False) -> None:
    """Write the packed checkpoint of `source` (a folder, a hub id or demo) to `out`. Raises StartupError."""
    files = open_model(source, weights=True)
    if out.resolve() in (files.folder, files.weights):
        raise StartupError(f"{out}: the quantized checkpoint needs a folder of its own")
    if load_library() is None:
        raise StartupError("quantizing needs the native kernels: penstock build-kernels")
    config = read_config(files.config)
    if config.packed is not None:
        raise StartupError(f"{files.weights} is quantized already")
    weights = load_weights(
        files.weights, config, torch.bfloat16, torch.device("cpu"), quantization=quantization, group=group, attention_output=attention_output
    )
    tensors = collect(config, weights)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"{out}: {error.strerror}") from None
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for pattern in TOKENIZER_FILES:
        for file in files.folder.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, out)
    described = {"quant_method": PACKED_METHOD, "quantization": quantization, "group": group, "attention_output": attention_output}
    (out / "config.json").write_text(json.dumps(files.config | {"quantization_config": described}, indent=2) + "\n")


def collect(config: ModelConfig, weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Every tensor of the packed checkpoint, by its name."""
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    packed = {"lm_head.": weights.lm_head}
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}."
        tensors |= {prefix + name: getattr(layer.norms, field) for field, name in norm_names(config).items()}
        packed |= {prefix + "qkv.": layer.qkv, prefix + "output.": layer.output}
        packed |= {prefix + name: linear for name, linear in linears_of(layer.mlp).items()}
    for prefix, linear in packed.items():
        assert isinstance(linear, NativeLinear)
        tensors |= {prefix + name: part for name, part in linear.parts.items()}
    return tensors


def linears_of(mlp: Mlp) -> dict[str, Linear]:
    """The layers of an MLP or of a mixture of experts, by the names that Loader restores them by."""
    if not isinstance(mlp, MoeMlp):
        assert isinstance(mlp, NativeMlp)
        return {"gate_up.": mlp.gate_up, "down.": mlp.down}
    linears = {"router.": mlp.router}
    experts = {f"experts.{number}.": expert for number, expert in enumerate(mlp.experts)}
    if mlp.shared is not None:
        linears["shared.gate."] = mlp.shared.gate
        experts["shared."] = mlp.shared.expert
    for name, expert in experts.items():
        linears |= {name + "gate_up.": expert.gate_up, name + "down.": expert.down}
    return linears
