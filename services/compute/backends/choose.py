"""The one choice of a backend, made at load."""

import importlib.util

import torch

from services.compute.backends.backend import Backend
from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.cpu.library import open_context
from services.compute.backends.torch.backend import TorchBackend
from shared.errors import StartupError


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one that can be used. Raises StartupError for a device that is not there, or too old."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if importlib.util.find_spec("triton") is None:
        raise StartupError("--device cuda: the kernels need the package triton, which torch's CUDA builds bring (docs/gpu.md)")
    from services.compute.backends.cuda.device import check_device  # with Triton, which a CPU does not need

    check_device()
    return torch.device("cuda")


def choose_backend(dtype: torch.dtype, device: torch.device) -> Backend:
    """Triton's kernels on a GPU; native code for bfloat16 on a CPU that it knows; else torch. Raises StartupError for a wrong PENSTOCK_KERNELS."""
    if device.type == "cuda":
        from services.compute.backends.cuda.backend import CudaBackend

        return CudaBackend(dtype, device)
    if device.type == "cpu" and dtype == torch.bfloat16 and (context := open_context()) is not None:
        return CpuBackend(context)
    return TorchBackend(dtype, device)
