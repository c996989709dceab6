"""Whether the GPU of this machine can be used; and if not, why, in a few words. It is asked before
anything of Triton is loaded."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from shared.process.errors import words_of

OLDEST = (8, 0)  # Ampere: the first that multiplies bfloat16
OLDEST_FLOAT8 = (8, 9)  # Ada: the first that multiplies e4m3
# 99 KB a block: CUDA's programming guide, compute capabilities
LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
INTERPRETED = (9, 0)  # what Triton's interpreter computes as
INTERPRETED_MULTIPROCESSORS = 132  # an H100's


def why_unusable() -> str | None:
    """Why the GPU can't be used; None: it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install the build from PyPI (docs/understand/gpu.md)"
    if not torch.cuda.is_available():
        return _why_unavailable()
    if importlib.util.find_spec("triton") is None:
        return "the kernels need the package triton, which torch's CUDA builds bring (docs/understand/gpu.md)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, gcc or clang, for what launches its kernels (docs/understand/gpu.md)"
    if not python_header().is_file():
        return (
            f"Triton needs Python's headers beside the C compiler, and {python_header()} is not there: Debian's "
            "python3-dev has them (docs/understand/gpu.md)"
        )
    try:
        torch.cuda.mem_get_info()  # the first that needs the device itself
    except RuntimeError as error:
        return words_of(error)
    if (capability := torch.cuda.get_device_capability()) < OLDEST:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {version_of(capability)}, the kernels need "
            f"{version_of(OLDEST)} (Ampere) or newer"
        )
    return None


def python_header() -> Path:
    """The header that Triton includes: of Debian's own scheme it takes the other."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)) / "Python.h"


def version_of(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability; on a CPU, where the interpreter runs, INTERPRETED."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETED


def multiprocessors_of(device: torch.device) -> int:
    """How many multiprocessors there are; on a CPU INTERPRETED_MULTIPROCESSORS."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else INTERPRETED_MULTIPROCESSORS
    )


def _why_unavailable() -> str:
    """Why torch finds no CUDA device, in a line."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return words_of(error)
    return "there is no CUDA device"
