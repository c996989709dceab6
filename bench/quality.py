"""What does quantization cost in quality? Perplexity and agreement of a model in each mode, and the
error of number formats on what its layers see.

Method: the docstrings of Python's standard library, in an order that mixes modules but is always
the same (of one Python version), in windows, each token given those before it in its window.
Agreement is how often the likeliest next token is bfloat16's, KL the distance from bfloat16's
distribution. Checkpoints of `penstock quantize` can be measured beside the modes. Format errors are
relative, mean square, median over the model's layers: of INT8 and FP8 (e4m3) by row on the inputs
that each kind of layer has on this text, in float32, and of their weights by output column.

    python -m bench.quality [--model smollm2-135m] [--quantized FOLDER ...] [--tokens 3584]
"""

import argparse
import ast
import hashlib
import json
import math
import statistics
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from services.compute.backends.choose import choose_backend
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.linear import TorchMlp
from services.compute.backends.torch.reference import quantize_rows
from services.compute.models.architectures import read_config
from services.compute.models.config import Packed
from services.compute.models.decoder import Decoder
from services.compute.weights.loader import load_weights, open_source
from services.modeltools.calibration.calibrate import fast_products, observe
from services.modeltools.calibration.perplexity import next_token_logs
from services.modeltools.calibration.simulation import ObservedLinear
from services.modeltools.calibration.texts import split
from shared.model.files import ModelFiles, open_model
from shared.process.errors import StartupError

DEFAULT_MODEL = "smollm2-135m"
WINDOW = 256  # tokens
LEAST_CHARACTERS = 300  # of a docstring that counts as prose
FP8_LARGEST = 448.0
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    packing: Packed = Packed("none", 64)
    kv_group: int = 0
    dtype: torch.dtype = torch.bfloat16
    activations: str = "int8"  # of quantized weights


MODES = [
    Mode("bf16"),
    Mode("float32", dtype=torch.float32),  # of a file that is quantized: its weights dequantized
    Mode("bf16, KV int8 by 64", kv_group=64),
    Mode("bf16, KV int8 by 8", kv_group=8),
    Mode("activations in bf16", activations="bfloat16"),  # of a file that is quantized
    Mode("w8a8", Packed("w8a8", 64)),
    Mode("w8a8, activations in bf16", Packed("w8a8", 64), activations="bfloat16"),
    Mode("w8a8, KV int8 by 64", Packed("w8a8", 64), kv_group=64),
    *(Mode(f"w4, groups of {group}", Packed("w4", group)) for group in (32, 64, 128)),
    Mode("w4, groups of 32, activations in bf16", Packed("w4", 32), activations="bfloat16"),
    Mode("w4, groups of 32, LM head too", Packed("w4", 32, lm_head=True)),
    *(Mode(f"nf4, groups of {group}", Packed("nf4", group)) for group in (32, 64)),
]


@dataclass(frozen=True, slots=True)
class Quality:
    perplexity: float
    agreement: float  # with bfloat16's likeliest tokens
    divergence: float  # KL from bfloat16's distribution, nats


def docstrings() -> str:
    """The docstrings of the standard library's modules that lie beside each other, long enough to
    be prose, each once, in the order of their hashes.
    """
    found = set()
    for file in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(ast.get_docstring(node) or "")
    prose = (text for text in found if len(text) >= LEAST_CHARACTERS)
    return "\n\n".join(sorted(prose, key=lambda text: hashlib.sha256(text.encode()).digest()))


def read(files: ModelFiles, mode: Mode, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    """The log probabilities of each window's next tokens."""
    config = read_config(files.config)
    packing = {} if config.packed is not None else asdict(mode.packing)
    backend = choose_backend(mode.dtype, CPU, activations=mode.activations)
    model = Decoder(config, load_weights(files.weights, config, backend, **packing), backend)
    return next_token_logs(model, windows, kv_group=mode.kv_group)


def keeps_its_form(files: ModelFiles) -> bool:
    """Whether the checkpoint is quantized already, so that only the modes of the KV cache are left."""
    source = open_source(files.weights, read_config(files.config), choose_backend(torch.bfloat16, CPU))
    source.close()
    return bool(source.quantized_as)


def measure(files: ModelFiles, mode: Mode, windows: torch.Tensor, reference: list[torch.Tensor]) -> Quality:
    """reference: bfloat16's log probabilities, by window; filled in where it is empty."""
    is_reference, loss, agreeing, divergence = not reference, 0.0, 0.0, 0.0
    for number, logs in enumerate(read(files, mode, windows)):
        if is_reference:
            reference.append(logs)
        expected = reference[number]
        loss -= float(logs.gather(-1, windows[number, 1:, None]).sum())
        agreeing += float((logs.argmax(-1) == expected.argmax(-1)).sum())
        divergence += float((expected.exp() * (expected - logs)).sum())
    count = windows[:, 1:].numel()
    return Quality(math.exp(loss / count), agreeing / count, divergence / count)


def compare_modes(
    files: ModelFiles, modes: list[Mode], quantized: list[Path], windows: torch.Tensor
) -> dict[str, Quality]:
    print(f"\n{windows[:, 1:].numel()} tokens\n{'':40}{'perplexity':>12}{'':>10}{'agreement':>12}{'KL, nats':>10}")
    reference: list[torch.Tensor] = []
    found: dict[str, Quality] = {}
    head_dim = read_config(files.config).head_dim
    candidates = [(files, mode) for mode in modes if mode.kv_group == 0 or head_dim % mode.kv_group == 0]
    candidates += [(open_model(str(folder)), Mode(folder.name)) for folder in quantized]
    for of, mode in candidates:
        quality = found[mode.name] = measure(of, mode, windows, reference)
        cost = quality.perplexity / found["bf16"].perplexity - 1
        print(
            f"{mode.name:40}{quality.perplexity:12.3f}{cost:+10.2%}{quality.agreement:12.2%}{quality.divergence:10.5f}",
            flush=True,
        )
    return found


def observed_layers(files: ModelFiles, windows: torch.Tensor) -> dict[str, list[ObservedLinear]]:
    """Each kind of layer, with rows of what it sees of the text, in float32."""
    config = read_config(files.config)
    backend = TorchBackend(torch.float32, CPU)
    weights = load_weights(files.weights, config, backend)
    layers = []
    by_kind: dict[str, list[ObservedLinear]] = {kind: [] for kind in ("qkv", "output", "gate and up", "down")}
    for layer in weights.layers:
        assert isinstance(layer.mlp, TorchMlp)
        parts = [
            observe(each, windows.numel()) for each in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
        ]
        for kind, part in zip(by_kind.values(), parts, strict=True):
            kind.append(part)
        layers.append(replace(layer, qkv=parts[0], output=parts[1], mlp=TorchMlp(*parts[2:])))
    head = observe(weights.lm_head, windows.numel())
    model = Decoder(config, replace(weights, layers=layers, lm_head=head), backend)
    for _ in next_token_logs(model, windows):
        pass
    return by_kind | {"LM head": [head]}


def int8(x: torch.Tensor) -> torch.Tensor:
    values, scales = quantize_rows(x)
    return values.float() * scales[:, None]


def fp8(x: torch.Tensor) -> torch.Tensor:
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_LARGEST
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, mean square."""
    return float((found - exact).double().square().sum() / exact.double().square().sum())


def compare_formats(files: ModelFiles, windows: torch.Tensor) -> dict[str, dict[str, float]]:
    """FP8's error over INT8's, by kind of layer, of inputs and of weights: the median over layers."""
    print(
        f"\n{'mean square error':20}"
        + "".join(f"{title:>16}" for title in ("inputs, INT8", "FP8", "ratio", "weights, INT8", "FP8", "ratio"))
    )
    ratios = {}
    for kind, layers in observed_layers(files, windows).items():
        errors = [
            [error(round_to(part), part) for part in (layer.rows, layer.weight) for round_to in (int8, fp8)]
            for layer in layers
        ]
        inputs, weights = ([statistics.median(row[place + 1] / row[place] for row in errors)] for place in (0, 2))
        middle = [statistics.median(column) for column in zip(*errors, strict=True)]
        ratios[kind] = {"inputs": inputs[0], "weights": weights[0]}
        print(
            f"{kind:20}{middle[0]:16.2e}{middle[1]:16.2e}{inputs[0]:16.2f}{middle[2]:16.2e}{middle[3]:16.2e}{weights[0]:16.2f}"
        )
    return ratios


def choose_model(name: str | None) -> ModelFiles:
    """The model asked for; else the default one, or the demo where that was not pulled."""
    if name is not None:
        return open_model(name)
    try:
        return open_model(DEFAULT_MODEL)
    except StartupError:
        print(
            f"{DEFAULT_MODEL} is not here (penstock pull {DEFAULT_MODEL} brings it): the demo model, which knows no "
            "prose, stands in for it"
        )
        return open_model("demo")


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity, agreement and number formats' errors.")
    parser.add_argument(
        "--model",
        help=(
            f"a checkpoint folder, a GGUF file or a model's name (default: {DEFAULT_MODEL} if it is there, else the "
            "demo)"
        ),
    )
    parser.add_argument(
        "--quantized", type=Path, nargs="*", default=[], help="checkpoints of the same model, of penstock quantize"
    )
    parser.add_argument(
        "--only", nargs="*", choices=[mode.name for mode in MODES], help="these modes, and bf16 (default: all)"
    )
    parser.add_argument("--tokens", type=int, default=3584, help="of prose (default: %(default)s)")
    parser.add_argument(
        "--format-tokens",
        type=int,
        default=1024,
        help="on which formats are compared; 0: they are not (default: %(default)s)",
    )
    args = parser.parse_args()
    files = choose_model(args.model)
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    windows = split(docstrings()[: args.tokens * 10], tokenizer, WINDOW)[: args.tokens // WINDOW]
    modes = [mode for mode in MODES if args.only is None or mode.name in ("bf16", *args.only)]
    if keeps_its_form(files):
        print(f"{files.name} is quantized already: bf16 is as it is served, and it is not quantized again")
        modes = [mode for mode in modes if mode.packing.quantization == "none"]
    else:
        modes = [mode for mode in modes if mode.activations == "int8" or mode.packing.quantization != "none"]
    with fast_products(), torch.inference_mode():
        qualities = compare_modes(files, modes, args.quantized, windows)
        ratios = compare_formats(files, windows[: args.format_tokens // WINDOW]) if args.format_tokens >= WINDOW else {}
    measured = {name: asdict(quality) for name, quality in qualities.items()}
    print(
        json.dumps({"model": files.name, "tokens": windows[:, 1:].numel(), "modes": measured, "fp8_over_int8": ratios})
    )


if __name__ == "__main__":
    main()
