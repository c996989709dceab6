"""The cases that are checked and measured, in the order of its worth: first whether it is right,
then how fast. Each case stands by itself.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from bench.gpu.check import Check
from bench.gpu.experts import check_experts, measure_experts
from bench.gpu.journal import Found, Journal
from bench.gpu.kernels import FORMS, VENDORS, kernel_checks
from bench.gpu.models import DRAWS, check_flight, check_model
from bench.gpu.recordings import check_recordings
from bench.gpu.speed import (
    Ceilings,
    Served,
    layer_shapes,
    measure_attention,
    measure_ceilings,
    measure_linears,
    measure_steps,
    serve_trace,
)
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.linear import FEW_ROWS
from services.compute.backends.torch.backend import TorchBackend
from services.modeltools.make_model import SHAPES, make_model
from services.simulator.trace import TraceRequest

PARTS = ("kernels", "models", "ceilings", "layers", "steps", "trace", "pipeline")
CHECKED = ("kernels", "models")  # what a CPU can, in Triton's interpreter
STREAMS = [1, 8, 64]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
MODES = (
    ("none", 0),
    ("none", 8),
    ("w8a8", 0),
    ("w4", 0),
    ("nf4", 0),
    ("fp8", 0),
)  # quantization, and an int8 cache's groups; tiny's heads have 16 dimensions
LIMIT_S = 300.0  # of a case, its kernels' compilation included
PIPELINE_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Case:
    part: str
    name: str
    run: Callable[[], Iterable[Found]]
    limit_s: float = LIMIT_S  # a process that takes longer hangs


@dataclass(frozen=True, slots=True)
class Wanted:
    """The case as it was asked for."""

    parts: list[str]
    shapes: list[str]
    modes: list[str]
    requests: list[TraceRequest]
    is_interpreted: bool


def make_cases(wanted: Wanted, journal: Journal, folder: Path) -> Iterator[Case]:
    """folder: for models that are made."""
    device = torch.device("cpu" if wanted.is_interpreted else "cuda")
    narrow, half, wide = (CudaBackend(dtype, device) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    modes = [mode for mode in wanted.modes if mode != "fp8" or narrow.has_float8]
    shapes = wanted.shapes
    parts: dict[str, Callable[[], Iterator[Case]]] = {
        "kernels": lambda: check_kernels([wide, narrow, half], is_interpreted=wanted.is_interpreted),
        "models": lambda: check_models(narrow, half, wide, folder, is_interpreted=wanted.is_interpreted),
        "ceilings": lambda: iter([Case("ceilings", "ceilings", lambda: [measure_ceilings(narrow)])]),
        "layers": lambda: measure_layers(narrow, shapes, modes),
        "steps": lambda: measure_all_steps(narrow, shapes, modes, journal),
        "trace": lambda: serve_traces(narrow, shapes, wanted.requests),
        "pipeline": lambda: iter(
            [
                Case("pipeline", f"pipeline, {each}", partial(pipeline_cost, each, folder), PIPELINE_LIMIT_S)
                for each in shapes[-1:]
            ]
        ),
    }
    for part in PARTS:
        if part in wanted.parts and (part in CHECKED or not wanted.is_interpreted):
            yield from parts[part]()


def check_kernels(backends: list[CudaBackend], *, is_interpreted: bool) -> Iterator[Case]:
    for number, check in enumerate(
        (*kernel_checks(backends, on_device=not is_interpreted), *expert_checks(backends, on_device=not is_interpreted))
    ):
        what = ", ".join(str(each) for each in check.args if not isinstance(each, CudaBackend))
        yield Case(
            "kernels",
            f"kernel {number}: {check.func.__name__}, {dtype_of(check.args[0])}, {what}",
            lambda check=check: [check()],  # type: ignore[misc]
        )


def expert_checks(backends: list[CudaBackend], *, on_device: bool) -> Iterator[partial[Check]]:
    for backend in backends:
        for form in FORMS[: 1 if backend.dtype == torch.float32 else None]:
            if backend.has_float8 or not form.startswith("fp8"):
                for num_rows, num_experts in ((1, 4), (70, 4), *(((64, 128), (1000, 128)) if on_device else ())):
                    yield partial(check_experts, backend, form, num_rows, num_experts)


def dtype_of(backend: CudaBackend) -> str:
    return str(backend.dtype).removeprefix("torch.")


def check_models(
    narrow: CudaBackend, half: CudaBackend, wide: CudaBackend, folder: Path, *, is_interpreted: bool
) -> Iterator[Case]:
    lengths, num_tokens = ((5, 21, 40), 4) if is_interpreted else ((5, 21, 40, 600, 90, 17, 33), 32)

    @cache
    def tiny() -> Path:
        make_model(folder / "tiny", shape="tiny", dtype="float32", seed=1)
        return folder / "tiny"

    def run(backend: CudaBackend, mode: str, group: int, reference: TorchBackend | None) -> list[Found]:
        return [
            check_model(
                tiny(),
                backend,
                quantization=mode,
                kv_group=group,
                lengths=lengths,
                num_tokens=num_tokens,
                reference=reference,
            )
        ]

    yield Case(
        "models", "model, float32, beside torch", lambda: run(wide, "none", 0, TorchBackend(torch.float32, wide.device))
    )
    for mode, group in MODES:
        if mode != "fp8" or narrow.has_float8:
            yield Case("models", f"model, {mode}, KV in groups of {group}", partial(run, narrow, mode, group, None))
    for mode, group in MODES[:2]:
        yield Case("models", f"model, float16, {mode}, KV in groups of {group}", partial(run, half, mode, group, None))
    if not is_interpreted:
        yield Case(
            "models",
            "recordings",
            lambda: [check_recordings(tiny(), narrow, max_num_seqs=256, max_batched_tokens=2048, longest=4000)],
        )
    few = {"lengths": lengths[:1] if is_interpreted else lengths, "draws": DRAWS[:2] if is_interpreted else DRAWS}
    yield Case("models", "a step in flight", lambda: [check_flight(tiny(), narrow, **few)])  # type: ignore[arg-type]


def measure_layers(backend: CudaBackend, shapes: list[str], modes: list[str]) -> Iterator[Case]:
    for shape in shapes:
        for mode in modes:
            for layer in layer_shapes(SHAPES[shape]):
                yield Case(
                    "layers",
                    f"layer, {shape}, {mode}, {layer}",
                    partial(measure_linears, backend, shape, layer, mode, [1, 32, 256, 2048]),
                )
        yield Case("layers", f"attention, {shape}", partial(measure_attention, backend, shape, [1, 32, 256]))
    for mode in modes:
        yield Case("layers", f"experts, {mode}", partial(measure_experts, backend, mode, [1, 32, 256, 2048]))


def measure_all_steps(backend: CudaBackend, shapes: list[str], modes: list[str], journal: Journal) -> Iterator[Case]:
    """With our products; and, of the first shape, with the vendor's."""
    variant = CudaBackend(backend.dtype, backend.device, allow_batch_variance=True)
    many = [batch for batch in BATCHES if batch > FEW_ROWS]

    def run(backend: CudaBackend, shape: str, mode: str, batches: list[int]) -> Iterator[Found]:
        ceilings = next(iter(journal.of_kind(Ceilings)), None) or measure_ceilings(backend)
        return measure_steps(backend, shape, mode, batches, ceilings)

    for shape in shapes:
        for mode in modes:
            yield Case("steps", f"steps, {shape}, {mode}", partial(run, backend, shape, mode, BATCHES))
        for mode in modes:
            if mode in VENDORS and shape == shapes[0]:
                yield Case("steps", f"steps, {shape}, {mode}, vendor's", partial(run, variant, shape, mode, many))


def serve_traces(backend: CudaBackend, shapes: list[str], requests: list[TraceRequest]) -> Iterator[Case]:
    def run(shape: str, name: str, is_ahead: bool) -> list[Found]:
        return [Served(name, serve_trace(backend, shape, requests, is_ahead=is_ahead))]

    for shape in shapes if requests else ():
        for is_ahead in (False, True):
            name = f"{shape}, {'a step in flight' if is_ahead else 'none in flight'}"
            yield Case("trace", f"trace, {name}", partial(run, shape, name, is_ahead))


def pipeline_cost(shape: str, folder: Path) -> list[Found]:
    """bench.pipeline's figures by streams, in bf16: medians of three rounds."""
    from bench.pipeline import compare_on, whole_machine  # what it needs is more than a GPU

    gc.collect()
    torch.cuda.empty_cache()
    make_model(folder / shape, shape=shape, dtype="bfloat16", seed=0)
    with whole_machine():
        _, found = compare_on(folder / shape, ["--device", "cuda", "--kv-cache-memory", "4GiB"], folder, STREAMS, 3)
    return [Served(f"over HTTP, {shape}, {streams} streams", figures) for streams, figures in found.items()]
