"""Models that see: tokens and logits against the transformers library, and equal bits however they are computed."""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from services.compute.images.pixels import prepare
from services.compute.images.tower import load_tower
from tests.kernels.families import Engine
from tests.kernels.vision_models import CONFIGS, IMAGE_TOKEN, family_of, picture, prompt_with, write_vision_model

SIZES = [(90, 60), (64, 200), (200, 64), (300, 300)]
NUM_TOKENS = 10
NATIVE = [name for name in CONFIGS if name != "gemma3"]


def png(image: Any) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def pixels_of(folder: Path, size: tuple[int, int], seed: int = 0, *, is_low: bool = False) -> dict[str, Any]:
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return prepare(processor, pickle.dumps((family_of(folder).processing(is_low=is_low), png(picture(*size, seed)))))


def given_to_library(name: str, pixels: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The inputs of several images at once, as the library's model takes them."""
    if name in ("smolvlm", "idefics3"):
        return {"pixel_values": torch.cat([torch.from_numpy(each["pixel_values"]) for each in pixels], 1)}
    if name == "llava_next":
        most = max(each["pixel_values"].shape[1] for each in pixels)
        padded = [np.pad(each["pixel_values"], [(0, 0), (0, most - each["pixel_values"].shape[1]), *[(0, 0)] * 3]) for each in pixels]
        return {
            "pixel_values": torch.from_numpy(np.concatenate(padded)),
            "image_sizes": torch.from_numpy(np.concatenate([each["image_sizes"] for each in pixels])),
        }  # fmt: skip
    return {name: torch.from_numpy(np.concatenate([each[name] for each in pixels])) for name in pixels[0]}


@pytest.mark.parametrize("name", NATIVE)
def test_tokens_and_logits_equal_the_library_s(name: str, tmp_path: Path) -> None:
    reference, family = write_vision_model(name, tmp_path), family_of(tmp_path)
    tower = load_tower(tmp_path, torch.float32, torch.device("cpu"))
    engine = Engine(tmp_path)
    for turn, sizes in enumerate([[SIZES[0]], [SIZES[1], SIZES[2]], [SIZES[3], SIZES[0], SIZES[3]]]):
        pixels = [pixels_of(tmp_path, size, seed) for seed, size in enumerate(sizes)]
        keys = [f"{turn}.{number}" for number in range(len(sizes))]
        seen = prompt_with(family, sizes, keys=keys)
        engine.runner.images = {key: torch.cat([tower.encode(call) for call in tower.calls(each)]) for key, each in zip(keys, pixels, strict=True)}
        [tokens] = engine.generate([seen.placed.token_ids.tolist()], NUM_TOKENS, images=[seen.placed])
        ids = torch.tensor([[*seen.token_ids, *tokens[:-1]]])
        kinds = {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if name.startswith("qwen") else {}
        with torch.no_grad():
            found = reference(input_ids=ids, attention_mask=torch.ones_like(ids), **given_to_library(name, pixels), **kinds).logits
        logits = found[0, len(seen.token_ids) - 1 :]
        torch.testing.assert_close(torch.stack(engine.logits[0]), logits, atol=2e-4, rtol=1e-4)
        assert tokens == logits.argmax(-1).tolist()
