"""How large a model is, by the names of llama.cpp's `meta`, and of what kind, by those of Ollama's
`details`."""

import math

from safetensors import SafetensorError, safe_open

from shared.model.files import ModelFiles
from shared.model.gguf.parts import parts_of, read_model
from shared.model.weights_form import form_of_file, form_of_folder


def sizes_of(files: ModelFiles) -> dict[str, int]:
    """The model's sizes: `n_vocab`, `n_ctx_train` (tokens), `n_embd`, `n_params` (as its files hold
    them), `size` (of these, bytes). What the files do not say is left out: the parameters of a
    quantized checkpoint are packed, and can't be counted."""
    weights = parts_of(files.weights) if files.weights.is_file() else sorted(files.weights.glob("*.safetensors"))
    found = {
        "n_vocab": files.vocab_size,
        "n_ctx_train": files.max_model_len,
        "n_embd": files.hidden_size,
        "n_params": num_params(files),
        "size": sum(each.stat().st_size for each in weights),
    }
    return {name: value for name, value in found.items() if value is not None}


def weights_of(files: ModelFiles, quantization: str) -> dict[str, str]:
    """The kind of model, as Ollama tells it: `family`, `format`, and `quantization_level`, which is
    how it is computed where compute quantizes it. quantization: compute's; none: as the files are.
    What the files do not say is left out."""
    if is_file := files.weights.is_file():
        family, form = (
            str(read_model(files.weights).metadata.get("general.architecture") or ""),
            form_of_file(files.weights),
        )
    else:
        family, form = str(files.config.get("model_type") or ""), form_of_folder(files.config)
    level = form if quantization == "none" else quantization
    found = {"family": family, "format": "gguf" if is_file else "safetensors", "quantization_level": level.upper()}
    return {name: value for name, value in found.items() if value}


def num_params(files: ModelFiles) -> int | None:
    """None: they are packed, or can't be read."""
    if files.weights.is_file():
        return sum(math.prod(each.shape) for each in read_model(files.weights).tensors.values())
    if files.config.get("quantization_config"):
        return None
    count = 0
    try:
        for file in files.weights.glob("*.safetensors"):
            with safe_open(file, framework="np") as tensors:
                count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in [*tensors.keys()])
    except (SafetensorError, OSError):
        return None
    return count
