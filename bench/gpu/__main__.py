"""Is the CUDA backend right on this machine's GPU, and how fast is it, beside what the device can do?

Method: every kernel against its definition, and whole models by bits and tokens; then each kernel's time over the layers of real shapes, steps of decoding at
1,024 tokens by batch and a prompt of 1,024, with random weights, and with --trace a file of requests through the scheduler: each with a step in flight and
without. The ceilings (a copy of 1 GiB, the vendor's products of 8192 x 8192 x 8192) are measured in the same run. Layers, and steps of the first shape, are
measured with the vendor's products, too (--allow-batch-variance). Last the pipeline's cost with the last shape: requests over HTTP, through all processes,
beside the same steps in a bare loop (bench.pipeline). It writes gpu.json and gpu.md to --out.

    python -m bench.gpu [--shapes llama-3-8b qwen2.5-7b qwen2.5-0.5b] [--modes none w8a8 w4 fp8] [--trace FILE] [--out DIR]

Without a GPU it says so and exits with 2. In Triton's interpreter (TRITON_INTERPRET=1) it checks what a CPU can, in minutes.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import triton

from bench.gpu.kernels import VENDORS, run_checks
from bench.gpu.models import DRAWS, check_flight, check_model
from bench.gpu.report import found_in_all, page, speed_lines
from bench.gpu.speed import as_dict, measure_attention, measure_ceilings, measure_linears, measure_steps, serve_trace
from bench.pipeline import compare_on, whole_machine
from services.compute.backends.backend import QUANTIZATIONS
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.device import why_unusable
from services.compute.backends.cuda.linear import FEW_ROWS
from services.compute.backends.torch.backend import TorchBackend
from services.compute.simulation.trace import load_trace
from services.compute.tools.make_model import SHAPES, make_model

STREAMS = [1, 8, 64]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
MODES = (
    ("none", 0),
    ("none", 8),
    ("w8a8", 0),
    ("w4", 0),
    ("nf4", 0),
    ("fp8", 0),
)  # quantization, and the groups of an int8 cache; tiny's heads have 16 dimensions


def pipeline_cost(shape: str, folder: Path) -> dict[str, dict[str, float]]:
    """bench.pipeline's figures by streams, in bf16: medians of three rounds."""
    make_model(folder / shape, shape=shape, dtype="bfloat16", seed=0)
    with whole_machine():
        _, found = compare_on(folder / shape, ["--device", "cuda", "--kv-cache-memory", "4GiB"], folder, STREAMS, 3)
    return {f"{shape}, {streams} streams": figures for streams, figures in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="The CUDA backend on this machine's GPU: right, and how fast.")
    shapes = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shapes", nargs="*", choices=shapes, default=["llama-3-8b", "qwen2.5-7b", "qwen2.5-0.5b"], help="default: %(default)s")
    parser.add_argument("--modes", nargs="+", choices=QUANTIZATIONS, default=["none", "w8a8", "w4", "fp8"], help="default: %(default)s")
    parser.add_argument("--trace", help="requests: ShareGPT's .json, or .jsonl with prompt_tokens and output_tokens")
    parser.add_argument("--out", type=Path, default=Path("."), help="where gpu.json and gpu.md go")
    args = parser.parse_args()
    is_interpreted = triton.knobs.runtime.interpret
    if not is_interpreted and (reason := why_unusable()) is not None:
        print(f"no GPU can be used: {reason}", file=sys.stderr)
        return 2
    requests = load_trace(args.trace, None) if args.trace else []
    device = torch.device("cpu" if is_interpreted else "cuda")
    name = "Triton's interpreter" if is_interpreted else torch.cuda.get_device_name()
    narrow, wide = CudaBackend(torch.bfloat16, device), CudaBackend(torch.float32, device)
    modes = [mode for mode in args.modes if mode != "fp8" or narrow.has_float8]
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        checks = []
        for check in run_checks([wide, narrow], on_device=not is_interpreted):
            print(f"{'ok  ' if check.holds else 'FAIL'} {check.kernel}, {check.types}: {check.case}: {check.error:.1e}", flush=True)
            checks.append(check)
        make_model(Path(folder), shape="tiny", dtype="float32", seed=1)
        lengths = (5, 21, 40) if is_interpreted else (5, 21, 40, 600, 90, 17, 33)
        sizes = {"lengths": lengths, "num_tokens": 4 if is_interpreted else 32}
        models = [check_model(Path(folder), wide, reference=TorchBackend(torch.float32, device), **sizes)]  # type: ignore[arg-type]
        checked = [(mode, group) for mode, group in MODES if mode != "fp8" or narrow.has_float8]
        models += [check_model(Path(folder), narrow, quantization=mode, kv_group=group, reference=None, **sizes) for mode, group in checked]  # type: ignore[arg-type]
        flights = [check_flight(Path(folder), narrow, lengths=lengths[:1] if is_interpreted else lengths, draws=DRAWS[:2] if is_interpreted else DRAWS)]
        found, speed = found_in_all(checks, models, flights), []
        if not is_interpreted:
            ceilings = measure_ceilings(narrow)
            kernels = [each for shape in args.shapes for each in measure_linears(narrow, shape, modes, [1, 32, 256, 2048])]
            kernels += [each for shape in args.shapes for each in measure_attention(narrow, shape, [1, 32, 256])]
            steps = [each for shape in args.shapes for mode in modes for each in measure_steps(narrow, shape, mode, BATCHES, ceilings)]
            variant = CudaBackend(torch.bfloat16, device, allow_batch_variance=True)
            many = [batch for batch in BATCHES if batch > FEW_ROWS]
            steps += [each for shape in args.shapes[:1] for mode in modes if mode in VENDORS for each in measure_steps(variant, shape, mode, many, ceilings)]
            served = {
                f"{shape}, {'a step in flight' if is_ahead else 'none in flight'}": serve_trace(narrow, shape, requests, is_ahead=is_ahead)
                for shape in (args.shapes if requests else ())
                for is_ahead in (False, True)
            }
            torch.cuda.empty_cache()
            pipeline = pipeline_cost(args.shapes[-1], Path(folder)) if args.shapes else {}
            speed = speed_lines(ceilings, kernels, steps, served, pipeline)
            found |= {"pipeline": pipeline, "times": [as_dict(each) for each in kernels], "steps": [as_dict(each) for each in steps], "served": served}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.md").write_text(text := page(name, checks, models, flights, speed))
    (args.out / "gpu.json").write_text(json.dumps({"device": name} | found, indent=1) + "\n")
    print(text)
    has_held = all(each.holds for each in (*checks, *models, *flights))
    print(json.dumps({"device": name, "checks": len(checks) + len(models) + len(flights), "all_hold": has_held}))
    return 0 if has_held else 1


if __name__ == "__main__":
    sys.exit(main())
