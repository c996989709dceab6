"""The quantized formats of safetensors checkpoints: one file each, from a layer's tensors to a
Matrix."""

from collections.abc import Callable, Mapping
from typing import Any

from services.compute.weights.formats.awq import read_awq
from services.compute.weights.formats.bitsandbytes import read_bitsandbytes
from services.compute.weights.formats.compressed import read_compressed
from services.compute.weights.formats.fp8 import read_fp8
from services.compute.weights.formats.gptq import read_auto_round, read_gptq
from services.compute.weights.formats.mxfp4 import read_mxfp4
from services.compute.weights.formats.options import Options
from services.compute.weights.formats.stored import StoredLayer, StoredWeight, WeightFormat
from shared.process.errors import StartupError

__all__ = ["WeightFormat", "StoredWeight", "StoredLayer", "read_format"]


READERS: dict[str, Callable[[Options], WeightFormat]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}


def read_format(config: Mapping[str, Any]) -> WeightFormat:
    """The format that a quantization_config describes. Raises StartupError for what is not
    supported."""
    method = config.get("quant_method")
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise StartupError(
            f"quantization_config: quant_method {method!r} is not supported; these are: {', '.join(sorted(READERS))}"
        )
    return reader(Options(config))
