"""Does every kernel compile for the GPUs that we name, and does it fit? No GPU is needed: Triton's wheel brings NVIDIA's assembler.

Each launch of the backend is compiled instead of run. Prints shared memory, registers, spilled bytes, and the matrix instruction. Fails where one does not
compile, or takes more shared memory than the architecture has.

    python -m tests.kernels.cuda.compiled [80 90]
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from services.compute.backends.backend import MassesWanted, Wanted
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.matrix import Dense
from services.compute.backends.torch.attention import AttentionInputs, Heads, Scores
from shared.sampling_params import SamplingParams

CPU = torch.device("cpu")
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # of a block: CUDA's programming guide, compute capabilities
SHOWN = ("FORM", "FIRST", "GROUP", "ACTIVATION", "BLOCK_M", "BLOCK_N", "BLOCK_K", "DIM", "KEYS", "IS_SPLIT", "KEPT")
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
        self.too_large = 0
        self.launch = JITFunction.run

    def run(self, kernel: Any, *args: Any, **options: Any) -> Any:
        compiled = self.launch(kernel, *args, **options | {"warmup": True})
        if compiled.hash in self.seen:
            return compiled
        self.seen.add(compiled.hash)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        registers, spilled = (re.findall(rf"{name}:(\d+)", usage)[-1] for name in ("REG", "STACK"))
        instruction = next((name for name in ("wgmma", "tcgen05", "mma.sync") if name in compiled.asm["ptx"]), "-")
        fits = compiled.metadata.shared <= SHARED_BYTES[self.capability]
        self.too_large += not fits
        shown = " ".join(f"{name} {options[name]}" for name in SHOWN if options.get(name) is not None)
        memory = f"shared {compiled.metadata.shared:6}{'' if fits else ' TOO MUCH'}"
        print(f"sm_{self.capability} {kernel.__name__:17} {memory} registers {registers:>3} spilled {spilled:>4} {instruction:8} {shown}", flush=True)
        return compiled


def launch_all() -> None:
    """Every kernel, in every form that the layers of real models ask for."""
    for dtype in (torch.bfloat16, torch.float32):
        backend, is_wide = CudaBackend(dtype, CPU), dtype == torch.float32
        for quantization in ("none",) if is_wide else ("none", "w8a8", "w4", "nf4"):
            weight = Dense(torch.randn(512, 4096).to(dtype))
            for layer in (backend.make_linear(weight, quantization=quantization, is_gated=True), backend.make_linear(weight, quantization=quantization)):
                for rows in (1, 64, 512):
                    x = torch.zeros(rows, 4096, dtype=dtype)
                    layer(x, norm=x[0].contiguous(), residual=torch.zeros(rows, layer.num_outputs, dtype=dtype) if layer.activation is None else None)
            layer.logits(x)
        for dim, group in ((128, 0), (64, 0), (256, 0)) if is_wide else ((128, 0), (128, 64), (64, 0), (64, 64), (256, 0), (256, 64)):
            attention = backend.make_attention(Heads(32, 8, dim), Scores(0.1, 50.0 if dim == 256 else 0.0))
            kv, angles = backend.make_kv_layer(64, 16, 8, dim, group=group), torch.ones(71, dim // 2)
            inputs = AttentionInputs([1, 70], [300, 80], [tuple(range(50))] * 2, torch.arange(71), ((angles, angles),))
            norm = torch.ones(dim, dtype=dtype)
            attention(torch.zeros(71, 48 * dim, dtype=dtype), kv, attention.plan(inputs, 16), window=None, norms=(norm, norm), eps=1e-6)
        backend.row_math.add(x, x, norm=x[0].contiguous(), eps=1e-6)
    logits = torch.zeros(2, 128_256)
    masses = MassesWanted(np.arange(2), np.ones(2, np.float32))
    for k in (1, 64):
        backend.row_search.start(logits, Wanted([SamplingParams()] * 2, np.zeros(2), np.full(2, k, np.int32), masses, masses))
    backend.row_math.finish_logits(logits, multiplier=2.0, cap=30.0)


def main() -> int:
    too_large = 0
    for capability in map(int, sys.argv[1:] or ("80", "90")):
        driver.set_active(Target(capability))
        compiler = Compiler(capability)
        JITFunction.run = lambda kernel, *args, compiler=compiler, **options: compiler.run(kernel, *args, **options)
        launch_all()
        JITFunction.run = compiler.launch
        too_large += compiler.too_large
        print(f"sm_{capability}: {len(compiler.seen)} compiled, {compiler.too_large} too large")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
