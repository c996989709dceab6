"""The backends that tests compare."""

import torch

from services.compute.backends.choose import choose_backend
from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.torch.backend import TorchBackend

CPU = torch.device("cpu")
FLOAT32 = TorchBackend(torch.float32, CPU)


def native_backend() -> CpuBackend:
    """The backend of the test's instruction set."""
    backend = choose_backend(torch.bfloat16, CPU)
    assert isinstance(backend, CpuBackend)
    return backend
