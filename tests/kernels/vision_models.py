"""Tiny models that see, of every family, with random weights, as the transformers library writes them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from transformers import AutoConfig, AutoModelForImageTextToText

from shared.model.files import read_processor
from shared.model.vision.families import read_family
from shared.model.vision.images import Image, PlacedPrompt, PromptImage, place_images
from shared.model.vision.shape import VisionFamily

VOCAB_SIZE, IMAGE_TOKEN = 300, 290
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
LLAMA = {"model_type": "llama", "head_dim": 32, **SHAPE}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 16,
}
MROPE = {
    **SHAPE,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "vision_start_token_id": 291,
    "vision_end_token_id": 292,
    "video_token_id": 293,
}
GEMMA3 = {
    **SHAPE,
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "scale_factor": 4,
        "image_token_id": IMAGE_TOKEN,
        "text_config": LLAMA,
        "vision_config": SIGLIP,
        "tie_word_embeddings": True,
    },
    "idefics3": {"scale_factor": 4, "image_token_id": IMAGE_TOKEN, "text_config": LLAMA, "vision_config": SIGLIP},
    "llava": {"image_token_id": IMAGE_TOKEN, "text_config": LLAMA, "vision_config": CLIP},
    "llava_next": {
        "image_token_id": IMAGE_TOKEN,
        "text_config": LLAMA,
        "vision_config": CLIP,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
    },
    "qwen2_vl": {
        **QWEN_TOKENS,
        "text_config": {"model_type": "qwen2_vl_text", **MROPE},
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
    },
    "qwen2_5_vl": {
        **QWEN_TOKENS,
        "text_config": {"model_type": "qwen2_5_vl_text", **MROPE},
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    },
    "gemma3": {
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 291,
        "eoi_token_index": 292,
        "mm_tokens_per_image": 16,
        "text_config": GEMMA3,
        "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
    },
}
MISTRAL = {"model_type": "mistral", "head_dim": 32, "sliding_window": None, **SHAPE}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 128,
    "patch_size": 8,
}
CONFIGS |= {
    "mistral3": {
        "image_token_id": IMAGE_TOKEN,
        "spatial_merge_size": 2,
        "text_config": MISTRAL,
        "vision_config": PIXTRAL,
    },
    "pixtral": {
        "model_type": "llava",
        "image_token_id": IMAGE_TOKEN,
        "text_config": MISTRAL,
        "vision_config": PIXTRAL | {"patch_size": 16},
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
    "internvl": {
        "image_token_id": IMAGE_TOKEN,
        "downsample_ratio": 0.5,
        "text_config": {"model_type": "qwen2", **SHAPE},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [64, 64],
            "patch_size": [8, 8],
        },
    },
    "aya_vision": {
        "image_token_id": IMAGE_TOKEN,
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
        "text_config": {
            "model_type": "cohere2",
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            **SHAPE,
        },
        "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
    },
}
NORMALIZED = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "do_convert_rgb": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
TILED = {
    **NORMALIZED,
    "do_image_splitting": True,
    "do_pad": True,
    "max_image_size": {"longest_edge": 64},
    "size": {"longest_edge": 256},
    "resample": 1,
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "smolvlm": {"image_processor_type": "SmolVLMImageProcessor", **TILED},
    "idefics3": {"image_processor_type": "Idefics3ImageProcessor", **TILED},
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        **NORMALIZED,
        "size": {"shortest_edge": 56},
        "do_center_crop": True,
        "resample": 3,
        "crop_size": {"height": 56, "width": 56},
    },
    "llava_next": {
        "image_processor_type": "LlavaNextImageProcessor",
        **NORMALIZED,
        "size": {"shortest_edge": 56},
        "do_center_crop": True,
        "resample": 3,
        "do_pad": True,
        "crop_size": {"height": 56, "width": 56},
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
    },
    "qwen2_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        **NORMALIZED,
        "min_pixels": 3136,
        "max_pixels": 50176,
        "patch_size": 14,
        "merge_size": 2,
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        **NORMALIZED,
        "min_pixels": 3136,
        "max_pixels": 50176,
        "patch_size": 14,
        "merge_size": 2,
    },
    "mistral3": {
        "image_processor_type": "PixtralImageProcessor",
        **NORMALIZED,
        "size": {"longest_edge": 128},
        "patch_size": 16,
        "resample": 3,
    },
    "pixtral": {
        "image_processor_type": "PixtralImageProcessor",
        **NORMALIZED,
        "size": {"longest_edge": 128},
        "patch_size": 16,
        "resample": 3,
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        **NORMALIZED,
        "size": {"height": 64, "width": 64},
        "max_patches": 6,
        "resample": 3,
    },
    "aya_vision": {
        "image_processor_type": "GotOcr2ImageProcessor",
        **NORMALIZED,
        "size": {"height": 64, "width": 64},
        "max_patches": 6,
        "resample": 3,
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        **NORMALIZED,
        "size": {"height": 64, "width": 64},
        "resample": 2,
    },
}


def write_vision_model(name: str, folder: Path) -> Any:
    """A checkpoint of the family in the folder, and the library's model of it, in float32."""
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(**{"model_type": name, **CONFIGS[name]}), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * 0.15
                if parameter.dim() > 1
                else parameter + torch.randn_like(parameter) * 0.05
            )
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    return model.eval()


def family_of(folder: Path) -> VisionFamily:
    found = read_family(json.loads((folder / "config.json").read_text()), read_processor(folder))
    assert found is not None
    return found


def picture(width: int, height: int, seed: int = 0) -> Any:
    """An image of gradients and noise."""
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 200, width), np.linspace(0, 200, height))
    noise = rng.integers(0, 55, (height, width, 3))
    return Pillow.fromarray((np.stack([across, down, (across + down) / 2], -1) + noise).astype(np.uint8))


@dataclass(frozen=True)
class Seen:
    """A prompt with images, as the library takes it and as ours does."""

    token_ids: list[int]
    images: tuple[PromptImage, ...]
    placed: PlacedPrompt


def prompt_with(
    family: VisionFamily,
    sizes: list[tuple[int, int]],
    *,
    keys: list[str] | None = None,
    text: int = 7,
    is_low: bool = False,
) -> Seen:
    """Some text, then each image with a word behind it. What is no placeholder in an image's text is some word."""
    token_ids, images = list(range(3, 3 + text)), list[PromptImage]()
    for number, (width, height) in enumerate(sizes):
        shape = family.shape(width, height, is_low=is_low)
        pieces = shape.text.split(family.placeholder)
        for at, piece in enumerate(pieces):
            token_ids += [20 + len(piece)] * bool(piece) + [IMAGE_TOKEN] * (at < len(pieces) - 1)
        token_ids.append(100 + number)
        images.append(
            PromptImage(
                Image((keys or [str(each) for each in range(len(sizes))])[number], width, height, 0, is_low),
                shape.num_tokens,
                shape.num_rows,
                shape.num_columns,
            )
        )
    return Seen(token_ids, tuple(images), place_images(np.array(token_ids, np.int32), images, IMAGE_TOKEN))
