"""Does every kernel compile for the GPUs that we name, and does it fit? No GPU is needed: Triton's
wheel brings NVIDIA's assembler.

Each launch of the backend is compiled instead of run. Prints shared memory, registers, spilled
bytes, and the matrix instruction. Fails where one does not compile, takes more shared memory than
the architecture has, or (FP8) leaves longer sums to tensor cores than it says; where the draw's
products may be fused with sums; where tiles of one form leave their sums of floats to other
instructions, or add and multiply otherwise what follows; where FP8 is not refused on a device that
lacks it; and where a step compiles what a server's first steps have not.

    python -m tests.kernels.cuda.compiled [80 89 90]
"""

import itertools
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.gpu.models import LoadedModel
from services.compute.backends.backend import RouterConfig, SearchRequest
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.linear import GROUPS, CudaLinear, SplitK, WeightForm
from services.compute.backends.matrix import Dense, Float8, Matrix
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.backends.torch.reference import Scores
from services.compute.candidates.reduction import Reduction, begin_reduction
from services.compute.loop.warm_up import warm_up
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from services.modeltools.make_model import make_model
from shared.model.sampling_params import SamplingParams
from shared.process.errors import StartupError

CPU = torch.device("cpu")
SHARED_BYTES = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}  # of a block: CUDA's programming guide, compute capabilities
SHOWN = ("FORM", "FIRST", "GROUP", "ACTIVATION", "BLOCK_M", "BLOCK_N", "BLOCK_K", "DIM", "KEYS", "IS_SPLIT", "KEPT")
PRODUCTS = ("multiply", "multiply_part", "multiply_experts")
FLOAT_FORMS = (WeightForm.DENSE, WeightForm.FLOAT8, WeightForm.FLOAT8_BLOCKS)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Target:
    """A driver for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # Triton keeps what it has compiled by the device's number

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def is_active(self) -> bool:
        return True

    def get_active_torch_device(self) -> torch.device:
        return CPU


class Compiler:
    """In place of JITFunction.run."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.seen: set[str] = set()
        self.instructions: dict[tuple[Any, ...], set[str]] = defaultdict(set)  # by what must be computed alike
        self.operations: dict[tuple[Any, ...], set[tuple[float, ...]]] = defaultdict(set)  # of an element, by the same
        self.num_wrong = 0
        self.launch = JITFunction.run

    def run(self, kernel: Any, *args: Any, **options: Any) -> Any:
        compiled = self.launch(kernel, *args, **options | {"warmup": True})
        if compiled.hash in self.seen:
            return compiled
        self.seen.add(compiled.hash)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        registers, spilled = (re.findall(rf"{name}:(\d+)", usage)[-1] for name in ("REG", "STACK"))
        instruction = next((name for name in ("wgmma", "tcgen05", "mma.sync") if name in compiled.asm["ptx"]), "-")
        if kernel.__name__ == "attend" or (kernel.__name__ in PRODUCTS and options["FORM"] in FLOAT_FORMS):
            self.instructions[
                "multiply" if kernel.__name__ in PRODUCTS else "attend",
                args[0].dtype,
                options.get("FORM"),
                options.get("DIM"),
            ].add(instruction)
        if kernel.__name__ in ("multiply", "multiply_experts"):
            residual = args[8] if kernel.__name__ == "multiply" else None
            elements = options["BLOCK_M"] * options["BLOCK_N"] / (32 * options["num_warps"])
            given = (
                args[0].dtype,
                *(each is None for each in (*args[:8], residual)),
                *(options[name] for name in ("FORM", "FIRST", "GROUP", "ACTIVATION")),
            )
            depth = options["BLOCK_K"] if options["FORM"] == WeightForm.FLOAT8_BLOCKS else None  # is the group
            self.operations[*given, depth, options.get("HAS_PARTS", False)].add(
                tuple(count / elements for count in operations_in(compiled.asm["ptx"]))
            )
        fits = compiled.metadata.shared <= SHARED_BYTES[self.capability]
        keeps_sums_short = begins_with_zeros(compiled.asm["ttir"])
        is_fused = (
            kernel.__name__ == "draw_tokens" and re.search(r"\b(add|sub|mul)\.f64 ", compiled.asm["ptx"]) is not None
        )
        wrong = "".join(
            what
            for what, holds in ((" TOO MUCH", not fits), (" LONG SUMS", not keeps_sums_short), (" FUSED", is_fused))
            if holds
        )
        self.num_wrong += bool(wrong)
        shown = " ".join(f"{name} {options[name]}" for name in SHOWN if options.get(name) is not None)
        memory = f"shared {compiled.metadata.shared:6}{wrong}"
        print(
            f"sm_{self.capability} {kernel.__name__:17} {memory} registers {registers:>3} spilled {spilled:>4} "
            f"{instruction:8} {shown}",
            flush=True,
        )
        return compiled


def operations_in(ptx: str) -> tuple[int, ...]:
    """How many fused multiply-adds, multiplications and additions of float32 there are; some come
    in pairs. What is fused is rounded once.
    """
    return tuple(
        len(re.findall(rf"\b{name}\.f32 ", ptx)) + 2 * len(re.findall(rf"\b{name}\.f32x2 ", ptx))
        for name in (r"fma\.rn", r"mul", r"add")
    )


def begins_with_zeros(ttir: str) -> bool:
    """Whether each product of e4m3 is a sum of its own: the compiler could draw what is added to it
    into the tensor cores, which have fewer bits.
    """
    starts = re.findall(r"tt\.dot %\w+, %\w+, (%\w+).* : tensor<\w+xf8E4M3FN> \*", ttir)
    return all(re.search(rf"{start} = arith\.constant dense<0\.0", ttir) for start in starts)


def launch_layers(backend: CudaBackend, matrix: Matrix, quantization: str) -> None:
    """As a wide layer, and as a narrow one with a program for each part, and with one for all."""
    for is_gated, parts in itertools.product((True, False), (None, SplitK(512, 1 << 20), SplitK(512, 0))):
        layer = backend.make_linear(matrix, quantization=quantization, is_gated=is_gated)
        layer.parts = parts if backend.dtype != torch.float32 else None
        for rows in (1, 64, 512, 513):
            x = torch.zeros(rows, 4096, dtype=backend.dtype)
            layer(
                x,
                norm=x[0].contiguous(),
                residual=torch.zeros(rows, layer.num_outputs, dtype=backend.dtype)
                if layer.activation is None
                else None,
            )
    layer.logits(x)


def launch_experts(backend: CudaBackend, quantization: str) -> None:
    """A mixture's kernels, for few rows of an expert and for many."""

    def make(*shape: int, is_gated: bool = False) -> CudaLinear:
        return backend.make_linear(
            Dense(torch.randn(shape).to(backend.dtype)), quantization=quantization, is_gated=is_gated
        )

    experts = backend.group_experts([(make(1536, 2048, is_gated=True), make(2048, 768)) for _ in range(2)], 2)
    assert experts is not None
    for rows in (1, 64, 512):
        x = torch.zeros(rows, 2048, dtype=backend.dtype)
        sigmoid = RouterConfig(2, True, has_sigmoid_scores=True, has_correction=True, num_groups=2)
        backend.row_math.choose_experts(torch.zeros(rows, 4), sigmoid, torch.zeros(4))
        chosen, weights = backend.row_math.choose_experts(torch.zeros(rows, 2), RouterConfig(2, True))
        for score in (None, weights[:, :1]):
            backend.row_math.add_experts(x, experts.run(x, chosen), weights, shared=(x, score), has_residual=True)


def launch_finish(layer: CudaLinear) -> None:
    """Launches what follows the vendor's product, which is not compiled here."""
    layer.vendor_from = 1
    layer(
        torch.zeros(1, 4096, dtype=layer.dtype),
        residual=torch.zeros(1, layer.num_outputs, dtype=layer.dtype) if layer.activation is None else None,
    )


def launch_float8(backend: CudaBackend) -> None:
    weight = torch.randn(512, 4096).bfloat16()
    if not backend.has_float8:
        try:
            backend.make_linear(Dense(weight), quantization="fp8")
        except StartupError as refusal:
            return print(f"refused: {refusal}")
        raise AssertionError("FP8 is not refused")
    launch_layers(backend, Dense(weight), "fp8")
    for group in GROUPS:
        launch_layers(backend, Float8(weight.to(torch.float8_e4m3fn), torch.ones(4, 4096 // group), group, 128), "none")


def launch_all(capability: int) -> None:
    """Every kernel, in every form that the layers of real models ask for."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        backend, is_wide = CudaBackend(dtype, CPU), dtype == torch.float32
        backend.capability = (capability // 10, capability % 10)
        for quantization in ("none",) if is_wide else ("none", "w8a8", "w4", "nf4"):
            launch_layers(backend, Dense(torch.randn(512, 4096).to(dtype)), quantization)
            launch_experts(backend, quantization)
        if not is_wide:
            launch_float8(backend)
            for quantization, is_gated in itertools.product(("none", "w8a8"), (True, False)):
                launch_finish(
                    backend.make_linear(
                        Dense(torch.randn(512, 4096).to(dtype)), quantization=quantization, is_gated=is_gated
                    )
                )
        for dim, group in itertools.product((64, 128, 256, 512), (0,) if is_wide else (0, 64)):
            try:
                heads = Heads(32, 8, dim, norms_after_rotation=dim == 64)
                attention = backend.make_attention(heads, Scores(0.1, 50.0 if dim == 256 else 0.0))
            except StartupError as refusal:
                print(f"refused: {refusal}")
                continue
            kv, angles = backend.make_kv_layer(64, 16, 8, dim, group=group), torch.ones(71, dim // 2)
            inputs = AttentionInputs([1, 70], [300, 80], [tuple(range(50))] * 2, torch.arange(71), ((angles, angles),))
            empty = torch.zeros(0, dtype=torch.int64)
            norm = torch.ones(dim, dtype=dtype)
            for each in (
                inputs,
                replace(inputs, slot_mapping=empty),
                replace(inputs, block_lens=[(16,) * 50] * 2),
                replace(inputs, last_seen=[299, *range(10, 80)]),
            ):
                attention(
                    torch.zeros(71, 48 * dim, dtype=dtype),
                    kv,
                    attention.plan(each, 16),
                    window=None,
                    norms=(norm, norm),
                    eps=1e-6,
                )
        backend.copy_blocks([kv, kv], [(0, 1)])
        x = torch.zeros(1, 4096, dtype=dtype)
        backend.row_math.add(x, x, norm=x[0].contiguous(), eps=1e-6)
    logits = torch.zeros(2, 128_256)
    for k in (1, 64):
        wanted = SearchRequest(
            [SamplingParams()] * 2,
            np.zeros(2, np.uint64),
            np.ones(2, np.int32),
            np.full(2, k, np.int32),
            np.arange(2),
            np.arange(2),
        )
        backend.row_search.start(logits, wanted)
    backend.row_search.ban(logits, np.zeros(1, np.int64), [np.zeros(128_256 // 8, np.uint8)])
    backend.row_math.finish_logits(logits, multiplier=2.0, cap=30.0)


def launch_server(compiler: Compiler) -> None:
    """A server's first steps compile all that later ones launch, of any number of sequences, tokens
    and blocks. Nothing is computed: there are any numbers.
    """
    for quantization, group in (("none", 0), ("w8a8", 8)):
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), shape="tiny", dtype="bfloat16", seed=1)
            backend = CudaBackend(torch.bfloat16, CPU)
            backend.capability = (compiler.capability // 10, compiler.capability % 10)
            runner = LoadedModel(Path(folder), backend, quantization=quantization, kv_group=group).make_runner(256)
        with patch.object(Reduction, "finish"):
            warm_up(runner, 256)
        known = len(compiler.seen)
        for lens in (
            *([1] * count for count in (2, 8, 9, 16, 31, 33, 64, 66, 100, 128, 200)),
            [1, 1, 1, 5],
            [1] * 16 + [40],
            [2, 3],
            [300],
            [1] * 7 + [99, 64],
        ):
            for num_computed in (0, 400, 3000):
                table = tuple(range(256))
                rows = [
                    BatchRow(handle, (0,) * length, num_computed, table, range(length - 1, length))
                    for handle, length in enumerate(lens)
                ]
                batch = ScheduledBatch(tuple(rows), lens.count(1))
                runner.kv_cache.copy_blocks(((1, 2), (2, 3)))
                logits = runner.logits(batch, runner.run(batch))
                for params in (
                    SamplingParams(temperature=0.0, logprobs=5),
                    SamplingParams(top_k=20),
                    SamplingParams(top_k=100),
                    SamplingParams(min_p=0.1),
                ):
                    begin_reduction(
                        logits,
                        [Sequence(Request(row.handle, "", params), Tokens([0], 1)).prefix() for row in rows],
                        backend.row_search,
                    )
        if (late := len(compiler.seen) - known) > 0:
            compiler.num_wrong += late
            print(f"sm_{compiler.capability}: {late} kernels were not compiled when the server began")


def main() -> int:
    num_wrong = 0
    for capability in map(int, sys.argv[1:] or ("80", "89", "90")):
        driver.set_active(Target(capability))
        compiler = Compiler(capability)
        JITFunction.run = lambda kernel, *args, compiler=compiler, **options: compiler.run(kernel, *args, **options)
        launch_all(capability)
        launch_server(compiler)
        JITFunction.run = compiler.launch
        for kind, instructions in compiler.instructions.items():
            if len(instructions) > 1:
                compiler.num_wrong += 1
                print(f"sm_{capability}: {kind} by {sorted(instructions)}")
        for kind, operations in compiler.operations.items():
            if len(operations) > 1:
                compiler.num_wrong += 1
                print(f"sm_{capability}: {kind} by other operations in other tiles: {sorted(operations)}")
        num_wrong += compiler.num_wrong
        print(f"sm_{capability}: {len(compiler.seen)} compiled, {compiler.num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
