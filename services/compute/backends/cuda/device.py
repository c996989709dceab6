"""Whether the GPU of this machine can be used. Every answer is one line."""

import torch

from shared.errors import StartupError

OLDEST = (8, 0)  # Ampere: the first that multiplies bfloat16


def check_device() -> None:
    """Raises StartupError for a torch without CUDA, no driver or no device, or an old architecture."""
    if torch.version.cuda is None:
        raise StartupError(f"--device cuda: torch {torch.__version__} is built without CUDA; install the build from PyPI (docs/gpu.md)")
    if not torch.cuda.is_available():
        raise StartupError(f"--device cuda: {_why_not()}")
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        name, found, oldest = torch.cuda.get_device_name(), ".".join(map(str, capability)), ".".join(map(str, OLDEST))
        raise StartupError(f"--device cuda: {name} has compute capability {found}, the kernels need {oldest} (Ampere) or newer")


def _why_not() -> str:
    """What the driver says, in a line."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "there is no CUDA device"
