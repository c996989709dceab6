"""The form in which a model's weights are kept: the type of most matrices, or how they were
quantized."""

from collections import Counter
from pathlib import Path
from typing import Any

from shared.model.gguf.parts import read_model

TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # of config.json, by GGUF's names


def form_of_file(weights: Path) -> str:
    """The form of a GGUF model, by its first part. Empty where it has no matrices. Raises StartupError."""
    from gguf import GGMLQuantizationType

    counts = Counter(info.type_id for info in read_model(weights).tensors.values() if len(info.shape) > 1)
    return GGMLQuantizationType(counts.most_common(1)[0][0]).name if counts else ""


def form_of_folder(config: dict[str, Any]) -> str:
    """The form of a checkpoint, by its config.json. Empty where that does not say."""
    quantized = config.get("quantization_config") or {}
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    return str(quantized.get("quantization") or quantized.get("quant_method") or TYPES.get(dtype, dtype))
