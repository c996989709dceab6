"""The one choice of a backend, made at load."""

import torch

from services.compute.backends.backend import Backend
from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.cpu.library import open_context
from services.compute.backends.torch.backend import TorchBackend


def choose_backend(dtype: torch.dtype, device: torch.device) -> Backend:
    """Native code for bfloat16 on a CPU that it knows, else torch. Raises StartupError for a wrong PENSTOCK_KERNELS."""
    if device.type == "cpu" and dtype == torch.bfloat16 and (context := open_context()) is not None:
        return CpuBackend(context)
    return TorchBackend(dtype, device)
