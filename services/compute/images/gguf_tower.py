"""The weights of an mmproj file for transformers' modules, which have other names for them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH
from gguf.quants import dequantize
from torch import Tensor

from services.compute.weights.source import in_halves
from shared.model.gguf.reader import GgufHead, TensorInfo, read_head
from shared.process.errors import StartupError

PATCHES = "v.patch_embd.weight"
# of InternVL's projector: the names that it was published with
MLP = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
MLP_LAYERS = 4  # the library knows these by number, as if they were layers


def load_mmproj(model: Any, path: Path) -> None:
    """Fill the modules of the part that sees. Raises StartupError, naming a tensor that is missing."""
    head = read_head(path)
    names = gguf.get_tensor_name_map(MODEL_ARCH.MMPROJ, max(MLP_LAYERS, head.number("clip.vision.block_count")))
    state: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        try:
            found = of_parameter(head, names, model.config.model_type, name, parameter)
        except (OSError, ValueError, NotImplementedError) as error:
            raise StartupError(f"{path}: {name}: {error}") from None
        if found is None:
            raise StartupError(f"{path}: the file has no tensor of {name}")
        if found.shape != parameter.shape:
            raise StartupError(
                f"{path}: {name} has the shape {tuple(found.shape)}, the metadata says {tuple(parameter.shape)}"
            )
        state[name] = found.to(parameter.dtype)
    model.load_state_dict(state, assign=True)


def of_parameter(head: GgufHead, names: Any, family: str, name: str, like: Tensor) -> Tensor | None:
    """A parameter of the modules, whose shape is that of `like`; None: the file has none. family: the
    model_type."""
    stem, _, kind = library_name(family, name.removeprefix("model.")).rpartition(".")
    if ".qkv" in stem:
        parts = [tensor_of(head, names, stem.replace("qkv", each), kind) for each in "qkv"]
        return None if any(part is None for part in parts) else torch.cat([part for part in parts if part is not None])
    if stem == "visual.patch_embed.proj" and kind == "weight":  # of two images, as a film has them
        first, second = (
            read_tensor(head.tensors[each]) if each in head.tensors else None for each in (PATCHES, PATCHES + ".1")
        )
        return None if first is None or second is None else torch.stack([first, second], 2)
    found = tensor_of(head, names, stem, kind)
    if found is None:
        return None
    if stem.endswith("mm_soft_emb_norm"):
        return found - 1  # the file has it with its offset
    if stem.startswith("vision_tower.transformer.") and stem.endswith(("q_proj", "k_proj")):
        return found[in_halves(len(found), len(found) // head.number("clip.vision.attention.head_count"))]
    return found.reshape(like.shape) if found.numel() == like.numel() else found  # of leading dimensions of 1


def library_name(family: str, name: str) -> str:
    """The module's name as the library of GGUF files knows it: that of a published checkpoint."""
    if family in ("llava", "mistral3"):
        return name
    if family == "internvl":
        projector, _, rest = name.removeprefix("multi_modal_projector.").partition(".")
        if projector in MLP:
            return f"{MLP[projector]}.{rest}"
        return f"model.{name}" if name.endswith((".weight", ".bias")) else f"model.{name}.weight"
    name = name.replace("vision_tower.", "vision_tower.vision_model.").replace(
        "vision_model.vision_model.", "vision_model."
    )
    if name.endswith("mm_input_projection_weight"):
        return "multi_modal_projector.mm_input_projection.weight"
    return f"model.{name}" if name.startswith(("vision_model.", "connector.")) else name


def tensor_of(head: GgufHead, names: Any, stem: str, kind: str) -> Tensor | None:
    mapped = names.get_name(stem)
    info = head.tensors.get(f"{mapped}.{kind}") or head.tensors.get(mapped)
    return None if info is None else read_tensor(info)


def read_tensor(info: TensorInfo) -> Tensor:
    """The tensor in float32."""
    with info.path.open("rb") as file:
        file.seek(info.offset)
        data = np.frombuffer(file.read(info.size_bytes), np.uint8)
    kind = gguf.GGMLQuantizationType(info.type_id)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = data.reshape(-1, info.shape[-1] // block * size) if info.shape else data
    return torch.from_numpy(dequantize(rows, kind).astype(np.float32).reshape(info.shape).copy())
