"""KVCache: the tensors behind the block ids, and how many there can be. Who has which block is block_manager.py's."""

from pathlib import Path

import psutil
import torch

from services.compute.models.config import ModelConfig
from shared.errors import StartupError
from shared.settings import ComputeSettings

GIB = 1 << 30
CUDA_SHARE, CPU_SHARE = 0.9, 0.25  # of the free memory: a GPU is the server's own, a laptop is not
CGROUP = Path("/sys/fs/cgroup")  # a container sees its own limits here


class KVCache:
    """Keys and values of every layer: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_blocks(self) -> int:
        return int(self.tensor.shape[2])


def choose_num_blocks(settings: ComputeSettings, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> int:
    """As many blocks as fit in the memory asked for, or in a share of what is free now. Raises StartupError if not even one does."""
    block_bytes = config.num_layers * 2 * settings.block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
    free = free_memory(device)
    wanted = settings.kv_cache_memory
    if wanted is None:
        wanted_bytes = int(free * (settings.kv_cache_share or (CUDA_SHARE if device.type == "cuda" else CPU_SHARE)))
    elif wanted <= free:
        wanted_bytes = int(wanted)
    else:
        raise StartupError(f"--kv-cache-memory {wanted / GIB:.3g} GiB: only {free / GIB:.3g} GiB are free beside the weights")
    if wanted_bytes < block_bytes:
        raise StartupError(f"the KV cache would have {wanted_bytes / GIB:.3g} GiB, one block of it takes {block_bytes / GIB:.3g} GiB: raise --kv-cache-memory")
    return wanted_bytes // block_bytes


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still take on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    try:
        limit, used, details = ((CGROUP / name).read_text() for name in ("memory.max", "memory.current", "memory.stat"))
    except OSError:  # no cgroups here, or an older kind
        return available
    if limit.strip() == "max":
        return available
    droppable = int(dict(line.split() for line in details.splitlines())["inactive_file"])  # files read once, as weights are
    return min(available, int(limit) - int(used) + droppable)
