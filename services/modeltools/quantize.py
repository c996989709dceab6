"""`penstock quantize`: a checkpoint with its layers quantized and packed, which loads as fast as it
is read.

The packed form is the same for every instruction set. Embedding and norms stay as they are, but for
the scales that calibration folds into norms; a tied LM head is stored in addition to the embedding.
"""

import json
import shutil
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from services.compute.backends.backend import LogitsProduct, Product
from services.compute.backends.choose import choose_backend
from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.cpu.linear import NativeLinear
from services.compute.backends.host_memory import give_back_free_memory
from services.compute.backends.torch.backend import TorchBackend
from services.compute.models.architectures import read_config
from services.compute.models.config import PACKED_METHOD, ModelConfig, Packed
from services.compute.models.decoder import Decoder, ModelWeights, per_layer_products
from services.compute.models.moe import MlpBesideMixture, MoeMlp
from services.compute.weights.loader import (
    CORRECTIONS,
    FACTORS,
    PER_LAYER_EMBEDDING,
    Loader,
    check_quantizable,
    load_weights,
    norm_names,
    open_source,
)
from services.compute.weights.safetensors_source import StoredRows
from services.compute.weights.source import EMBEDDING
from services.modeltools.calibration.calibrate import calibrate
from services.modeltools.calibration.perplexity import perplexity
from services.modeltools.calibration.texts import DEFAULT_TOKENS, Windows, read_windows
from services.modeltools.out_folder import open_out_folder, write_model
from shared.model.files import TOKENIZER_FILES, ModelFiles, open_model
from shared.model.gguf.parts import parts_of
from shared.process.errors import StartupError

BFLOAT16, CPU = torch.bfloat16, torch.device("cpu")


@dataclass(frozen=True, slots=True)
class QuantizationResult:
    """The size of a checkpoint before and after."""

    num_bytes: tuple[int, int]  # of its weights' files
    # of text that calibration did not see; None without calibration
    perplexities: tuple[float, float] | None


def quantize(
    model: str,
    out: Path,
    packing: Packed,
    *,
    calibration: str | None = None,
    tokens: int = DEFAULT_TOKENS,
    force: bool = False,
) -> QuantizationResult:
    """Write the packed checkpoint of `model` (a folder, a hub id or demo) to `out`, with force in
    the stead of a model that is there. Raises StartupError.

    calibration: a text's path, or default; so many of its tokens are used; None: weights are
    rounded to nearest, whatever the layers' inputs are.
    """
    files = open_model(model, weights=True)
    backend = choose_backend(BFLOAT16, CPU)
    if not isinstance(backend, CpuBackend):
        raise StartupError("quantizing needs the native kernels: penstock build-kernels")
    config = read_config(files.config)
    if config.packed is not None:
        raise StartupError(f"{files.weights} is quantized already")
    if config.moe is not None and calibration is not None:
        raise StartupError(f"--calibrate: {files.weights} is a mixture of experts; calibration knows dense MLPs only")
    if config.recurrence is not None and calibration is not None:
        raise StartupError(f"--calibrate: {files.weights} has recurrent layers; calibration knows attention only")
    if config.per_layer_size and calibration is not None:
        raise StartupError(
            f"--calibrate: {files.weights} has embeddings of each layer, whose products calibration does not know: "
            "quantize it without --calibrate"
        )
    windows = None if calibration is None else read_windows(calibration, files, tokens)
    source = open_source(files.weights, config, backend if windows is None else TorchBackend(torch.float32, CPU))
    source.close()
    check_quantizable(files.weights, source.quantized_as, packing.option)
    open_out_folder(out, force=force, source=files)
    before = _num_bytes(files.weights)
    if not sys.stderr.isatty():  # where there are no bars
        sys.stderr.write(f"quantizing {model}\n")
    if windows is None:
        weights, perplexities = load_weights(files.weights, config, backend, **asdict(packing)), None
    else:
        weights, perplexities = _calibrated(files, config, packing, windows, backend)
    return QuantizationResult(
        (before, write_model(out, packed_tensors(config, weights), lambda: write_config(out, files, packing))),
        perplexities,
    )


def _num_bytes(weights: Path) -> int:
    """Bytes of a GGUF model, or of a folder's weights."""
    files = parts_of(weights) if weights.is_file() else weights.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def _calibrated(
    files: ModelFiles, config: ModelConfig, packing: Packed, windows: Windows, backend: CpuBackend
) -> tuple[ModelWeights, tuple[float, float]]:
    """The calibrated weights, and the perplexity of what was held out: in bfloat16, and
    quantized."""
    before = perplexity(Decoder(config, load_weights(files.weights, config, backend), backend), windows.held_out)
    give_back_free_memory()
    exact = TorchBackend(torch.float32, CPU)
    source = open_source(files.weights, config, exact)
    try:
        weights = calibrate(
            Loader(source, config, exact, Packed("none", packing.group)), packing, windows.calibration, backend
        )
    finally:
        source.close()
    return weights, (before, perplexity(Decoder(config, weights, backend), windows.held_out))


def write_config(out: Path, files: ModelFiles, packing: Packed) -> None:
    """Write the tokenizer's files and config.json."""
    described = {"quant_method": PACKED_METHOD} | asdict(packing)
    for pattern in TOKENIZER_FILES:
        for file in files.folder.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(files.config | {"quantization_config": described}, indent=2) + "\n")


def packed_tensors(config: ModelConfig, weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Every tensor of the packed checkpoint, by its name."""
    assert isinstance(weights.embedding, torch.Tensor)  # what is quantized was dense
    tensors = {EMBEDDING: weights.embedding, "model.norm.weight": weights.norm}
    packed: dict[str, Product | LogitsProduct] = {"lm_head.": weights.lm_head}
    if weights.per_layer is not None:
        assert isinstance(weights.per_layer.embedding, StoredRows)
        tensors[PER_LAYER_EMBEDDING] = weights.per_layer.embedding.tensor.to(torch.bfloat16)
        tensors["model.per_layer_projection_norm.weight"] = weights.per_layer.norm
        packed["model.per_layer_model_projection."] = weights.per_layer.projection
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}."
        tensors |= {prefix + name: getattr(layer.norms, field) for field, name in norm_names(config, number).items()}
        if layer.recurrent is not None:
            tensors |= {
                f"{prefix}recurrent.{field.name}": getattr(layer.recurrent, field.name)
                for field in fields(layer.recurrent)
                if getattr(layer.recurrent, field.name) is not None
            }
        if layer.sinks is not None:
            tensors[prefix + "self_attn.sinks"] = layer.sinks
        if config.has_layer_scalar:
            tensors[prefix + "layer_scalar"] = torch.tensor([layer.scalar], dtype=torch.bfloat16)
        if isinstance(layer.mlp, MoeMlp) and layer.mlp.router.correction is not None:
            tensors[prefix + "mlp." + CORRECTIONS[0]] = layer.mlp.router.correction
        if isinstance(layer.mlp, MlpBesideMixture):
            assert layer.mlp.mixture.router.factors is not None
            tensors[prefix + FACTORS] = layer.mlp.mixture.router.factors
        packed |= {prefix + "qkv.": layer.qkv, prefix + "output.": layer.output}
        packed |= {prefix + name: linear for name, linear in layer.mlp.linears.items()}
        packed |= {prefix + name: linear for name, linear in per_layer_products(layer).items()}
    for prefix, linear in packed.items():
        assert isinstance(linear, NativeLinear)
        tensors |= {prefix + name: part for name, part in linear.parts.items()}
    return tensors
