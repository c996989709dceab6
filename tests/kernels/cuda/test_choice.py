"""Which device and backend a server gets, and what it says where there is none."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.compute.backends import choose
from services.compute.backends.cuda import device
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.torch.attention import Heads
from services.compute.cache.kv_cache import KVCache
from services.compute.execution.model_runner import ModelRunner
from services.compute.loop import engine as engine_module
from services.compute.loop.warm_up import first_kernels, warm_up
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.files import open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests import forge
from tests.kernels.backends import CPU


def test_without_cuda_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        StartupError,
        match=(
            r"^--device cuda: torch .* is built without CUDA; install the build from PyPI "
            r"\(docs/understand/gpu.md\)$"
        ),
    ):
        choose.choose_device("cuda")
    assert choose.choose_device("auto").type == "cpu"


def test_a_driver_that_is_missing_and_an_old_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    def is_busy() -> None:
        raise torch.AcceleratorError(
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nFor debugging consider passing "
            "CUDA_LAUNCH_BLOCKING=1"
        )

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(StartupError, match=r"^--device cuda: Found no NVIDIA driver on your system\.$"):
        choose.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 34, 1 << 34))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    with pytest.raises(
        StartupError,
        match=r"^--device cuda: Tesla T4 has compute capability 7.5, the kernels need 8.0 \(Ampere\) or newer$",
    ):
        choose.choose_device("cuda")
    assert choose.choose_device("auto").type == "cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert device.why_unusable() is None and choose.choose_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "mem_get_info", is_busy)
    with pytest.raises(
        StartupError, match=r"^--device cuda: CUDA error: CUDA-capable device\(s\) is/are busy or unavailable$"
    ):
        choose.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 34, 1 << 34))
    monkeypatch.setattr(device.sysconfig, "get_path", lambda *_: "/nowhere")
    with pytest.raises(
        StartupError,
        match=(
            r"^--device cuda: Triton needs Python's headers .* /nowhere/Python.h is not there: Debian's python3-dev "
            r"has them"
        ),
    ):
        choose.choose_device("cuda")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(
        StartupError,
        match=(
            r"^--device cuda: Triton needs a C compiler, gcc or clang, for what launches its kernels "
            r"\(docs/understand/gpu.md\)$"
        ),
    ):
        choose.choose_device("cuda")


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    for name in ("KVCache", "load_model"):
        monkeypatch.setattr(engine_module, name, too_large)
        with pytest.raises(
            StartupError,
            match=(
                r"^--device cuda: .* does not fit into the GPU's memory: CUDA out of memory. Tried to allocate 2.00 "
                r"GiB.$"
            ),
        ):
            engine_module.build_engine(
                ComputeSettings(model="demo", device="cpu", kv_cache_memory="16MiB"), open_model("demo")
            )


def test_a_kernel_that_can_not_run_is_one_line_before_anything_is_served() -> None:
    fault = RuntimeError("out of resource: shared memory, Required: 139264,\n  Hardware limit: 101376.")
    wanted = (
        "^--device cuda: this GPU can't run a step: out of resource: shared memory, Required: 139264, Hardware "
        "limit: 101376.$"
    )
    with pytest.raises(StartupError, match=wanted), first_kernels(torch.device("cuda")):
        raise fault
    with (
        pytest.raises(RuntimeError, match="out of resource"),
        first_kernels(CPU),
    ):  # which is a mistake of ours, with all that can be said of it
        raise fault
    for known in (StartupError("--quantization"), torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(type(known), match=str(known)), first_kernels(torch.device("cuda")):
            raise known


def test_a_server_on_a_gpu_begins_with_steps_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on the CPU's kernels. In as many blocks as there are; what they leave there is nobody's."""
    settings, files = (
        ComputeSettings(model="demo", kv_cache_memory="16MiB", num_threads=1, max_num_seqs=20),
        open_model("demo"),
    )
    begun: list[list[int]] = []
    run = ModelRunner.run

    def run_noted(runner: ModelRunner, batch: ScheduledBatch) -> Any:
        begun.append([row.num_tokens for row in batch.rows])
        return run(runner, batch)

    plain = engine_module.build_engine(settings, files)
    monkeypatch.setattr(engine_module, "choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(engine_module, "choose_backend", lambda *_, **__: plain.runner.model.backend)
    monkeypatch.setattr(ModelRunner, "run", run_noted)
    engine = engine_module.build_engine(settings, files)
    recorded = [[1] * size for size in (64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1) for _ in range(2)]
    searched = [[1], [1] * 17, [1, 70]]
    assert begun == [[1], *recorded, *searched, [1, 70]], (
        "one step to see numbers, two of every size, the most first, and a chunk with holes and without"
    )
    prompt = ScheduledBatch((BatchRow(0, (5, 6, 7), 0, (0,), range(2, 3)),), 0)
    assert torch.equal(engine.runner.forward(prompt).clone(), plain.runner.forward(prompt))
    small = ModelRunner(
        plain.runner.model, KVCache(plain.runner.model.config, plain.runner.model.backend, num_blocks=1, block_size=16)
    )
    begun.clear()
    warm_up(small, 1)
    assert begun[-3:] == [[1], [1, 16], [1, 16]], "as few as it may have"
    monkeypatch.setattr(engine_module, "warm_up", no_kernel)
    with pytest.raises(StartupError, match="^--device cuda: this GPU can't run a step: no kernel$"):
        engine_module.build_engine(settings, files)


def no_kernel(*_: object) -> None:
    raise RuntimeError("no\n  kernel")


def test_heads_that_do_not_fit_are_named() -> None:
    backend = CudaBackend(torch.float32, CPU)
    backend.capability = (8, 9)
    with pytest.raises(
        StartupError,
        match="^--dtype float32: heads of 256 dimensions do not fit into the shared memory of compute capability 8.9$",
    ):
        backend.make_attention(Heads(2, 1, 256))
    backend.make_attention(Heads(2, 1, 128))


def test_the_benchmark_says_in_one_line_that_there_is_no_gpu(tmp_path: Path) -> None:
    if device.why_unusable() is None:
        pytest.skip("this machine has one")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    log = tmp_path / "log"
    assert forge.start("bench.gpu", environment, log).wait(120) == 2
    [line] = [line for line in log.read_text().splitlines() if line]
    assert line.startswith("no GPU can be used: ")


def test_a_checkpoint_in_float16_stays_so_on_a_gpu_only() -> None:
    files = open_model("demo")
    half = replace(files, config=files.config | {"dtype": "float16"})
    assert engine_module.choose_dtype("auto", half, torch.device("cuda")) == torch.float16
    assert engine_module.choose_dtype("auto", half, CPU) == torch.bfloat16
    assert engine_module.choose_dtype("float16", files, torch.device("cuda")) == torch.float16
    with pytest.raises(
        StartupError, match=r"^--dtype float16 runs on a GPU only \(--device cuda\); a CPU takes bfloat16 or float32$"
    ):
        engine_module.choose_dtype("float16", files, CPU)


def test_a_step_is_as_large_as_suits_the_device_where_nothing_is_said() -> None:
    cuda, said = torch.device("cuda"), ComputeSettings(model="demo", max_num_seqs=7, max_batched_tokens=90)
    found = [
        engine_module.choose_limits(settings, device)
        for settings in (ComputeSettings(model="demo"), said)
        for device in (CPU, cuda)
    ]
    assert [(each.max_num_seqs, each.max_batched_tokens) for each in found] == [
        (64, 512),
        (256, 2048),
        (7, 90),
        (7, 90),
    ]
