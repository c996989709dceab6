"""The part of a GGUF model that sees: the metadata of its mmproj file, as what config.json and
preprocessor_config.json would say.

llama.cpp keeps it in a file of its own beside the text's, `mmproj-….gguf`. The keys are those that its
converter writes (clip.*).
"""

from pathlib import Path
from typing import Any

from shared.model.gguf.reader import GgufHead, read_head
from shared.process.errors import StartupError

Config = dict[str, Any]

MMPROJ = "mmproj"  # in the name of such a file
PREFIX = "clip.vision."
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's filters
COMMON = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}


def find_mmproj(model: Path) -> Path | None:
    """The mmproj file beside a GGUF model; None: there is none. Raises StartupError where there are several."""
    files = sorted(file for file in model.parent.glob(f"*{MMPROJ}*.gguf") if file.name != model.name)
    if len(files) > 1:
        raise StartupError(f"{model.parent} holds {len(files)} mmproj files: keep the one that belongs to {model.name}")
    return files[0] if files else None


def read_mmproj(path: Path, hidden_size: int) -> tuple[Config, Config]:
    """config.json and preprocessor_config.json of the part that sees. hidden_size: of the text's part.
    Raises StartupError."""
    head = read_head(path)
    kind = head.text("clip.projector_type" if "clip.projector_type" in head.metadata else PREFIX + "projector_type")
    if kind not in READERS:
        raise StartupError(f"{path}: the projector {kind!r} is not supported; these are: {', '.join(sorted(READERS))}")
    size = head.number(PREFIX + "projection_dim")
    if size != hidden_size:
        raise StartupError(
            f"{path} is of a model with {size} dimensions, and the text's has {hidden_size}: is it another model's?"
        )
    normalized = {name: head.items(PREFIX + name, (int, float)) for name in ("image_mean", "image_std")}
    config, processor = READERS[kind](head)
    eps = head.real(
        PREFIX + "attention.layer_norm_epsilon", 1e-6
    )  # of the projector's norm, too, which the text part's configuration has
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    text = {"rms_norm_eps": eps, "hidden_size": size, "num_hidden_layers": 1, "vocab_size": 8, **heads}
    return {"text_config": text, **config}, COMMON | normalized | processor


def _vit(head: GgufHead) -> Config:
    """The sizes of a SigLIP tower."""
    return {
        "hidden_size": head.number(PREFIX + "embedding_length"),
        "intermediate_size": head.number(PREFIX + "feed_forward_length"),
        "num_hidden_layers": head.number(PREFIX + "block_count"),
        "num_attention_heads": head.number(PREFIX + "attention.head_count"),
        "image_size": head.number(PREFIX + "image_size"),
        "patch_size": head.number(PREFIX + "patch_size"),
        "layer_norm_eps": head.real(PREFIX + "attention.layer_norm_epsilon", 1e-6),
    }


def _idefics3(head: GgufHead) -> tuple[Config, Config]:
    vision = _vit(head)
    longest = head.number(PREFIX + "preproc_image_size", 4 * vision["image_size"])
    config = {
        "model_type": "smolvlm",
        "scale_factor": head.number(PREFIX + "projector.scale_factor"),
        "vision_config": vision,
    }
    return config, {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_image_splitting": True,
        "do_pad": True,
        "resample": LANCZOS,
        "max_image_size": {"longest_edge": vision["image_size"]},
        "size": {"longest_edge": longest},
    }


def _gemma3(head: GgufHead) -> tuple[Config, Config]:
    vision = _vit(head) | {"model_type": "siglip_vision_model", "vision_use_head": False}
    side, scale = vision["image_size"] // vision["patch_size"], head.number(PREFIX + "projector.scale_factor", 4)
    config = {"model_type": "gemma3", "mm_tokens_per_image": (side // scale) ** 2, "vision_config": vision}
    size = {"height": vision["image_size"], "width": vision["image_size"]}
    return config, {"image_processor_type": "Gemma3ImageProcessor", "resample": BILINEAR, "size": size}


def _qwen_processor(head: GgufHead) -> Config:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "resample": BICUBIC,
        "patch_size": head.number(PREFIX + "patch_size"),
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": head.number(PREFIX + "image_min_pixels", 56 * 56),
        "max_pixels": head.number(PREFIX + "image_max_pixels", 28 * 28 * 1280),
    }


def _qwen2(head: GgufHead) -> tuple[Config, Config]:
    width = head.number(PREFIX + "embedding_length")
    vision = {
        "depth": head.number(PREFIX + "block_count"),
        "embed_dim": width,
        "hidden_size": head.number(PREFIX + "projection_dim"),
        "num_heads": head.number(PREFIX + "attention.head_count"),
        "patch_size": head.number(PREFIX + "patch_size"),
        "spatial_merge_size": 2,
        "mlp_ratio": head.tensors["v.blk.0.ffn_up.weight"].shape[0] // width
        if "v.blk.0.ffn_up.weight" in head.tensors
        else 4,
    }
    return {"model_type": "qwen2_vl", "vision_config": vision}, _qwen_processor(head)


def _qwen25(head: GgufHead) -> tuple[Config, Config]:
    depth, pattern = head.number(PREFIX + "block_count"), head.number(PREFIX + "n_wa_pattern")
    vision = {
        "depth": depth,
        "hidden_size": head.number(PREFIX + "embedding_length"),
        "intermediate_size": head.number(PREFIX + "feed_forward_length"),
        "num_heads": head.number(PREFIX + "attention.head_count"),
        "out_hidden_size": head.number(PREFIX + "projection_dim"),
        "patch_size": head.number(PREFIX + "patch_size"),
        "spatial_merge_size": 2,
        "window_size": head.number(PREFIX + "window_size", 112),
        "fullatt_block_indexes": list(range(pattern - 1, depth, pattern)),
    }
    return {"model_type": "qwen2_5_vl", "vision_config": vision}, _qwen_processor(head)


def _pixtral(head: GgufHead) -> tuple[Config, Config]:
    vision, merge = _vit(head) | {"model_type": "pixtral"}, head.number(PREFIX + "spatial_merge_size", 1)
    vision["hidden_act"] = "silu" if head.metadata.get("clip.use_silu") else "gelu"
    patch = merge * vision["patch_size"]
    config = {
        "model_type": "mistral3" if "mm.patch_merger.weight" in head.tensors else "llava",
        "spatial_merge_size": merge,
        "vision_config": vision,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": "mm.1.bias" in head.tensors,
    }
    return config, {
        "image_processor_type": "PixtralImageProcessor",
        "resample": BICUBIC,
        "patch_size": patch,
        "size": {"longest_edge": vision["image_size"]},
    }


def _internvl(head: GgufHead) -> tuple[Config, Config]:
    vision = _vit(head)
    size = {"height": vision["image_size"], "width": vision["image_size"]}
    vision |= {name: [vision[name]] * 2 for name in ("image_size", "patch_size")}
    vision |= {
        "attention_bias": "v.blk.0.attn_q.bias" in head.tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in head.tensors,
    }
    vision["norm_type"] = "layer_norm" if "v.blk.0.ln1.bias" in head.tensors else "rms_norm"
    config = {
        "model_type": "internvl",
        "downsample_ratio": 1 / head.number(PREFIX + "projector.scale_factor"),
        "vision_config": vision,
    }
    least, most = (head.number(f"{PREFIX}preproc_{name}_tiles", default) for name, default in (("min", 1), ("max", 12)))
    return config, {
        "image_processor_type": "GotOcr2ImageProcessor",
        "resample": BICUBIC,
        "size": size,
        "min_patches": least,
        "max_patches": most,
    }


READERS = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "pixtral": _pixtral,
    "qwen2.5vl_merger": _qwen25,
    "qwen2vl_merger": _qwen2,
}
