"""KVCache: the tensors behind the block ids. Who has which block is block_manager.py's."""

import torch

from services.compute.models.config import ModelConfig
from shared.errors import StartupError

GIB = 1 << 30


class KVCache:
    """Keys and values of every layer: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_blocks(self) -> int:
        return int(self.tensor.shape[2])


def num_blocks_in(memory_gib: float, config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
    """How many blocks fit in memory_gib. Raises StartupError if not even one does."""
    block_bytes = config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
    num_blocks = int(memory_gib * GIB) // block_bytes
    if num_blocks < 1:
        raise StartupError(f"--kv-cache-memory-gib {memory_gib} holds no block of {block_bytes / GIB:.3f} GiB")
    return num_blocks
