"""The backends that tests compare."""

import torch

from services.compute.backends.choose import choose_backend
from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.torch.backend import TorchBackend

CPU = torch.device("cpu")
FLOAT32 = TorchBackend(torch.float32, CPU)


def native_backend() -> CpuBackend:
    """Of the instruction set that the test runs on."""
    backend = choose_backend(torch.bfloat16, CPU)
    assert isinstance(backend, CpuBackend)
    return backend
