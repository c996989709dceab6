"""The one choice of a backend, made at load."""

import torch
from torch import Tensor

from services.compute.backends.backend import Backend
from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.cpu.library import NativeContext, open_context
from services.compute.backends.cuda.device import why_unusable
from services.compute.backends.torch.backend import TorchBackend
from services.compute.ranks.parallel.ranks import SharedRanks
from services.compute.ranks.parallel.share import Share
from shared.process.errors import StartupError


def choose_device(name: str, rank: int = 0) -> torch.device:
    """`auto` is a GPU where there is one that can be used. rank: among those of a group on this
    host, each of which has a GPU. Raises StartupError for `cuda` where there is none."""
    if name == "cpu":
        return torch.device("cpu")
    reason = why_unusable()
    if name == "cuda" and reason is not None:
        raise StartupError(f"--device cuda: {reason}")
    if reason is not None:
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise StartupError(
            f"--device cuda: a group has a GPU for each of its ranks, and rank {rank} has none: there are "
            f"{torch.cuda.device_count()}"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda")


def choose_backend(
    dtype: torch.dtype, device: torch.device, *, activations: str = "int8", allow_batch_variance: bool = False
) -> Backend:
    """Triton's kernels on a GPU; native code for bfloat16 on a CPU that it knows; else torch.
    Raises StartupError for a wrong PENSTOCK_KERNELS.

    activations: of quantized weights, int8 or bfloat16. Raises StartupError for bfloat16 on a GPU.
    allow_batch_variance: whether a row's bits may depend on the batch's other rows, for speed. Raises
    StartupError on a CPU, where there is nothing to gain.
    """
    if device.type == "cuda":
        # with Triton, which a CPU does not need
        from services.compute.backends.cuda.backend import CudaBackend

        if activations != "int8":
            raise StartupError(f"--activations {activations} is for CPUs only")
        return CudaBackend(dtype, device, allow_batch_variance=allow_batch_variance)
    if allow_batch_variance:
        raise StartupError(
            "--allow-batch-variance: only a GPU has other products than those whose bits are the same in any batch, "
            f"not {device.type}"
        )
    if device.type == "cpu" and dtype == torch.bfloat16 and (context := open_context()) is not None:
        return CpuBackend(context, activations)
    return TorchBackend(dtype, device, activations)


def has_same_columns(backend: Backend) -> bool:
    """Whether a column's bits do not depend on the other columns of its layer."""
    return not isinstance(backend, TorchBackend)


def context_of(backend: Backend) -> NativeContext | None:
    """The native kernels of the backend; None: it has none."""
    return backend.context if isinstance(backend, CpuBackend) else None


def ranks_of_host(backend: Backend, share: Share, memory: Tensor) -> SharedRanks:
    """Ranks that meet in memory of theirs, [GROUP_BYTES] uint8. backend: one that has_same_columns."""
    assert isinstance(backend, CpuBackend)
    return SharedRanks(share, memory, backend.context.meet)
