"""VisionTower: the part of a model that makes embeddings of an image, as transformers has it.

One image a call, or one tile of it, in shapes that follow from the image alone. So its embeddings
have the same bits in any company.
"""

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.compute.images.gguf_tower import load_mmproj
from services.compute.models.library_errors import first_line
from shared.process.errors import StartupError

TEXT_PARTS = ("language_model", "text_model")


class VisionTower:
    def __init__(self, model: Any, device: torch.device, fingerprint: str = "") -> None:
        """model: of transformers, with get_image_features; fingerprint: equal where an image becomes the
        same embeddings."""
        self.model = model
        self.fingerprint = fingerprint
        self.device = device
        self.dtype: torch.dtype = next(model.parameters()).dtype

    def calls(self, inputs: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        """The inputs of each call, to be computed one after the other. inputs: of one image, as its
        processor made them.
        """
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        pixels, others = tensors.pop("pixel_values"), tensors
        if pixels.dim() == 5 and not others:  # [1, tiles, 3, height, width], each tile by itself
            for number in range(pixels.shape[1]):
                yield {"pixel_values": pixels[:, number : number + 1]}
        elif pixels.dim() == 4 and not others:  # [tiles, 3, height, width], the same
            for number in range(len(pixels)):
                yield {"pixel_values": pixels[number : number + 1]}
        else:
            yield {"pixel_values": pixels, **others}

    @torch.inference_mode()
    def encode(self, call: dict[str, Tensor]) -> Tensor:
        """Embeddings of one of `calls`, [tokens, hidden]."""
        given = {name: value.to(self.device) for name, value in call.items()}
        given["pixel_values"] = given["pixel_values"].to(self.dtype)
        found = self.model.get_image_features(**given).pooler_output
        features = found if isinstance(found, Tensor) else torch.cat(list(found))
        return features.reshape(-1, features.shape[-1]).to(self.dtype)

    def timed(self, call: dict[str, Tensor]) -> tuple[Tensor, float]:
        """`encode`, and how long it took, in seconds."""
        began = time.monotonic()
        found = self.encode(call)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return found, time.monotonic() - began


def load_tower(
    folder: Path, dtype: torch.dtype, device: torch.device, mmproj: Path | None = None, fingerprint: str = ""
) -> VisionTower:
    """Read the part that sees. folder: of a checkpoint; with an mmproj file, of its configuration. Raises
    StartupError."""
    try:
        # seconds that a model without it need not wait
        from transformers import AutoConfig, AutoModelForImageTextToText
        from transformers.utils import logging
    except ImportError as error:
        raise StartupError(f"images need the transformers library, which can't be loaded here: {error}") from None
    logging.set_verbosity_error()
    try:
        config = without_text(AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
        if mmproj is None:
            model, info = AutoModelForImageTextToText.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="sdpa",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                low_cpu_mem_usage=True,
                output_loading_info=True,
            )
        else:
            model, info = (
                AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa"),
                {"missing_keys": []},
            )
    except Exception as error:  # of safetensors, of the model's own code, of the library's checks
        raise StartupError(f"{folder}: transformers can't load the image encoder: {first_line(error)}") from None
    if missing := sorted(name for name in info["missing_keys"] if not is_of_text(name)):
        raise StartupError(f"{folder}: the checkpoint has no tensor {missing[0]}")
    for name in TEXT_PARTS:
        if hasattr(model.model, name):
            setattr(model.model, name, None)
    model.lm_head = None
    if mmproj is not None:
        load_mmproj(model, mmproj)
    return VisionTower(model.eval().to(device), device, fingerprint)


def without_text(config: Any) -> Any:
    """The config of the model without the text's layers, which would be read for nothing."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    text.num_hidden_layers = 0
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(text, name, None) is not None:
            setattr(text, name, [])
    return found


def is_of_text(name: str) -> bool:
    return name.startswith("lm_head.") or any(f"{part}." in name for part in TEXT_PARTS)
