"""Which device and backend a server gets, and what it says where there is none."""

import subprocess
import sys

import pytest
import torch

from services.compute import engine as engine_module
from services.compute.backends import choose
from services.compute.backends.cuda import device
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.torch.attention import Heads
from shared.errors import StartupError
from shared.model_files import open_model
from shared.settings import ComputeSettings
from tests.kernels.backends import CPU


def test_without_cuda_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(StartupError, match=r"^--device cuda: torch .* is built without CUDA; install the build from PyPI \(docs/gpu.md\)$"):
        choose.choose_device("cuda")
    assert choose.choose_device("auto").type == "cpu"


def test_a_driver_that_is_missing_and_an_old_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(StartupError, match=r"^--device cuda: Found no NVIDIA driver on your system\.$"):
        choose.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(StartupError, match=r"^--device cuda: Tesla T4 has compute capability 7.5, the kernels need 8.0 \(Ampere\) or newer$"):
        choose.choose_device("cuda")
    assert choose.choose_device("auto").type == "cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert device.why_unusable() is None and choose.choose_device("auto").type == "cuda"


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(engine_module, "load_model", too_large)
    with pytest.raises(StartupError, match=r"^--device cuda: .* does not fit into the GPU's memory: CUDA out of memory. Tried to allocate 2.00 GiB.$"):
        engine_module.build_engine(ComputeSettings(model="demo", device="cpu"), open_model("demo"))


def test_heads_that_do_not_fit_are_named() -> None:
    backend = CudaBackend(torch.float32, CPU)
    backend.capability = (8, 9)
    with pytest.raises(StartupError, match="^--dtype float32: heads of 256 dimensions do not fit into the shared memory of compute capability 8.9$"):
        backend.make_attention(Heads(2, 1, 256))
    backend.make_attention(Heads(2, 1, 128))


def test_a_cpu_server_does_not_load_triton() -> None:
    code = "import sys, services.compute.engine; sys.exit('services.compute.backends.cuda.backend' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_benchmark_says_in_one_line_that_there_is_no_gpu(tmp_path: object) -> None:
    if device.why_unusable() is None:
        pytest.skip("this machine has one")
    code = "import os; os.environ.pop('TRITON_INTERPRET', None); import runpy; runpy.run_module('bench.gpu', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("no GPU can be used: ")
