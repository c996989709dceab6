"""GGUF models that see: the part that sees in an mmproj file beside the text's, named as
llama.cpp's converter names it.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from services.compute.images.tower import load_tower
from shared.model.files import open_model, read_vision
from shared.model.gguf.checkpoint import unpack_vision
from shared.model.gguf.vision import find_mmproj
from shared.process.errors import StartupError
from tests.kernels.gguf_files import Writer
from tests.kernels.test_gguf import WIDE, random_model
from tests.kernels.test_vision import pixels_of
from tests.kernels.vision_models import CONFIGS, PROCESSORS, family_of, write_vision_model

CPU = torch.device("cpu")
# the library's names of modules, and llama.cpp's
SIGLIP = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
QWEN = {
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
} | {
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "merger.ln_q": "v.post_ln",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
}
PIXTRAL = {
    "vision_tower.patch_conv": "v.patch_embd",
    "vision_tower.ln_pre": "v.pre_ln",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "multi_modal_projector.norm": "mm.input_norm",
    "patch_merger.merging_layer": "mm.patch_merger",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
}
INTERNVL = {
    "vision_tower.embeddings": "v",
    "patch_embeddings.projection": "v.patch_embd",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.projection_layer": "attn_out",
    "layernorm_before": "ln1",
    "layernorm_after": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "multi_modal_projector.layer_norm": "mm.model.mlp.0",
    "multi_modal_projector.linear_1": "mm.model.mlp.1",
    "multi_modal_projector.linear_2": "mm.model.mlp.3",
}
NAMES = {"mistral3": PIXTRAL, "pixtral": PIXTRAL, "internvl": INTERNVL}
UNNAMED = {
    "cls_token": "v.class_embd",
    "position_embeddings": "v.position_embd.weight",
    "lambda_1": "ls1.weight",
    "lambda_2": "ls2.weight",
}
PROJECTORS = {
    "mistral3": "pixtral",
    "pixtral": "pixtral",
    "internvl": "internvl",
    "smolvlm": "idefics3",
    "gemma3": "gemma3",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
}


def write_mmproj(
    name: str, reference: Any, path: Path, *, f16: bool = False, leave_out: str = "", hidden: int = 64
) -> None:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", PROJECTORS[name])
    writer.add_bool("clip.has_vision_encoder", True)
    for key, value in numbers_of(name, hidden).items():
        writer.add_uint32(f"clip.vision.{key}", value)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", PROCESSORS[name][key])
    for tensor_name, tensor in reference.model.state_dict().items():
        if any(part in tensor_name for part in ("language_model", "text_model", "vision_tower.head")):
            continue
        for new_name, values in renamed(name, tensor_name, tensor.float().numpy()):
            if new_name != leave_out:
                is_matrix = f16 and values.ndim > 1 and "embd" not in new_name
                writer.add_tensor(new_name, values.astype(np.float16 if is_matrix else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def numbers_of(name: str, hidden: int) -> dict[str, int]:
    vision, processor = CONFIGS[name]["vision_config"], PROCESSORS[name]
    sizes = {key: value[0] if isinstance(value, list) else value for key, value in vision.items()}  # of a square
    numbers = {
        "projection_dim": hidden,
        "image_size": sizes.get("image_size", 560),
        "patch_size": sizes["patch_size"],
        "embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "feed_forward_length": vision.get("intermediate_size", 64),
        "block_count": vision.get("num_hidden_layers", vision.get("depth")),
        "attention.head_count": vision.get("num_attention_heads", vision.get("num_heads")),
    }
    if name == "smolvlm":
        numbers |= {"projector.scale_factor": 4, "preproc_image_size": 256}
    if name == "gemma3":
        numbers["projector.scale_factor"] = 2
    if name == "mistral3":
        numbers["spatial_merge_size"] = 2
    if name == "internvl":
        numbers |= {"projector.scale_factor": 2, "preproc_max_tiles": 6}
    if name == "qwen2_5_vl":
        numbers |= {"n_wa_pattern": 2, "window_size": 56}
    if name.startswith("qwen"):
        numbers |= {"image_min_pixels": processor["min_pixels"], "image_max_pixels": processor["max_pixels"]}
    return numbers


def renamed(family: str, name: str, values: Any) -> list[tuple[str, Any]]:
    stem, _, kind = name.rpartition(".")
    if "mm_input_projection_weight" in name:
        return [("mm.input_projection.weight", values)]
    if "mm_soft_emb_norm" in name:
        return [("mm.soft_emb_norm.weight", values + 1)]
    if name.startswith("connector"):
        return [("mm.model.fc.weight", values)]
    if "patch_embed.proj" in name:
        return [("v.patch_embd.weight", values[:, :, 0]), ("v.patch_embd.weight.1", values[:, :, 1])]
    parts = stem.split(".")
    number = next(
        (part for part in parts if part.isdigit() and parts[parts.index(part) - 1] in ("layers", "blocks", "layer")),
        None,
    )
    if ".qkv" in stem:
        return [
            (f"v.blk.{number}.attn_{which}.{kind}", part)
            for which, part in zip("qkv", np.split(values, 3), strict=True)
        ]
    if kind in UNNAMED:
        return [(f"v.blk.{number}.{UNNAMED[kind]}" if number is not None else UNNAMED[kind], values.squeeze())]
    if family in ("mistral3", "pixtral") and stem.endswith(("q_proj", "k_proj")):  # pairs to rotate are neighbours
        values = values.reshape(2, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    [new] = {
        value for key, value in NAMES.get(family, SIGLIP | QWEN).items() if stem.endswith("." + key) or stem == key
    }
    return [(f"v.blk.{number}.{new}.{kind}" if number is not None else f"{new}.{kind}", values)]


@pytest.mark.parametrize("name", PROJECTORS)
def test_an_mmproj_file_sees_as_its_checkpoint_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    reference = write_vision_model(name, folder)
    (tmp_path / "model.gguf").touch()
    write_mmproj(name, reference, tmp_path / "mmproj-model-f16.gguf", f16=True)
    mmproj = find_mmproj(tmp_path / "model.gguf")
    assert mmproj is not None
    unpacked = unpack_vision(mmproj, 64)
    assert unpacked == unpack_vision(mmproj, 64) and read_vision(unpacked) == family_of(folder)
    one, other = load_tower(folder, torch.float32, CPU), load_tower(unpacked, torch.float32, CPU, mmproj)
    pixels = pixels_of(folder, (90, 60))
    assert {each: value.tolist() for each, value in pixels_of(unpacked, (90, 60)).items()} == {
        each: value.tolist() for each, value in pixels.items()
    }
    for call in one.calls(pixels):
        torch.testing.assert_close(one.encode(call), other.encode(call), atol=5e-3, rtol=5e-3)


def test_what_is_wrong_with_an_mmproj_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reference = write_vision_model("smolvlm", tmp_path)
    path = tmp_path / "mmproj.gguf"
    write_mmproj("smolvlm", reference, path, leave_out="v.blk.1.ffn_up.weight")
    with pytest.raises(StartupError, match=r"no tensor of model\.vision_model\.encoder\.layers\.1\.mlp\.fc1\.weight"):
        load_tower(unpack_vision(path, 64), torch.float32, CPU, path)
    with pytest.raises(StartupError, match="is it another model's"):
        unpack_vision(path, 128)
    (tmp_path / "mmproj-2.gguf").write_bytes(path.read_bytes())
    with pytest.raises(StartupError, match="holds 2 mmproj files"):
        find_mmproj(tmp_path / "model.gguf")
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "mlp")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StartupError, match="'mlp' is not supported; these are: gemma3"):
        unpack_vision(path, 64)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "smolvlm"


@pytest.mark.parametrize("content", [b"", b"GGUF and then nothing"])
def test_beside_an_mmproj_file_that_can_t_be_used_a_model_reads_text_only(content: bytes, tmp_path: Path) -> None:
    path = Writer(random_model(LlamaConfig(**WIDE)), tmp_path / "model.gguf").write(gguf.GGMLQuantizationType.Q8_0)
    (tmp_path / "mmproj-model.gguf").write_bytes(content)
    files = open_model(str(path))
    assert files.vision is None and files.mmproj is None and open_model(str(tmp_path)).weights == path
