"""Times that the device decides, where the settings do not."""

import os

import torch

from shared.process.settings import ComputeSettings

# beyond any step: a kernel's compilation among them, or 512 tokens of a large model on a few slow
# cores
CUDA_STEP_S, CPU_STEP_S = 300.0, 3600.0
SHARED_CORES_INTERVAL_S = 0.05  # text that grows twenty times a second still flows


def choose_publish_interval(settings: ComputeSettings, device: torch.device) -> float:
    """Seconds. Where the other stages run on the model's own cores, what they do between two steps
    is time that the model loses."""
    if settings.publish_interval_ms is not None:
        return settings.publish_interval_ms / 1000
    num_threads = torch.get_num_threads() * (1 if settings.master else settings.num_ranks)
    return SHARED_CORES_INTERVAL_S if device.type == "cpu" and num_threads >= (os.cpu_count() or 1) else 0.0


def choose_step_timeout(settings: ComputeSettings, device: torch.device) -> float:
    """Seconds after which a step counts as hung."""
    return settings.step_timeout_s or (CUDA_STEP_S if device.type == "cuda" else CPU_STEP_S)
