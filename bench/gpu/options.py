"""The options of `python -m bench.gpu`."""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
import triton

from bench.gpu.cases import PARTS, Wanted
from services.compute.backends.backend import QUANTIZATIONS
from services.modeltools.make_model import SHAPES
from services.simulator.trace import load_trace


def parse(argv: Sequence[str] | None = None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description="The CUDA backend on this machine's GPU: right, and how fast."
    )
    shapes = [name for name in SHAPES if name != "tiny"]
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which, always in this order (default: all)"
    )
    parser.add_argument(
        "--shapes",
        nargs="*",
        choices=shapes,
        default=["llama-3-8b", "qwen2.5-7b", "qwen2.5-0.5b"],
        help="default: %(default)s",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=QUANTIZATIONS, default=["none", "w8a8", "w4", "fp8"], help="default: %(default)s"
    )
    parser.add_argument("--trace", help="requests: ShareGPT's .json, or .jsonl with prompt_tokens and output_tokens")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("."),
        help="where gpu.json and gpu.md go; what has held there already is not run again",
    )
    return parser.parse_args(argv)


def wanted_of(arguments: Namespace) -> Wanted:
    requests = load_trace(arguments.trace, None) if arguments.trace else []
    return Wanted(arguments.parts, arguments.shapes, arguments.modes, requests, is_interpreted())


def is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def device_and_versions() -> dict[str, str]:
    device = "Triton's interpreter" if is_interpreted() else torch.cuda.get_device_name()
    return {"device": device, "torch": f"torch {torch.__version__}", "triton": f"Triton {triton.__version__}"}
