"""KVCache: the tensors behind the block ids, and how many there can be. Who has which block is
block_manager.py's."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from services.compute.backends.backend import Backend
from services.compute.backends.buffers import to_device
from shared.model.arrays import Array
from shared.process.errors import StartupError
from shared.process.host_memory import free_host_memory, size_text
from shared.process.settings import ComputeSettings

NO_LIMIT = 1 << 40  # blocks, of a rank that caches nothing: without layers or heads
CUDA_SHARE, CPU_SHARE = 0.9, 0.25  # of the free memory: a GPU is the server's own, a laptop is not


class CacheShape(Protocol):
    """The part of a model's configuration that sizes its cache."""

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """The KV heads of each layer that has keys and values, and their dimensions."""
        ...


class KVCache:
    """Keys and values of every layer that has some, as the backend lays them out."""

    def __init__(
        self, config: CacheShape, backend: Backend, *, num_blocks: int, block_size: int, group: int = 0
    ) -> None:
        """group: dimensions that share a scale in a cache of int8; 0: a cache of the backend's
        dtype."""
        self.backend = backend
        self.num_blocks = num_blocks
        self.block_size = block_size
        # [2, num_blocks, ...]
        self.layers = [
            backend.make_kv_layer(num_blocks, block_size, heads, head_dim, group=group)
            for heads, head_dim in config.kv_heads
        ]
        self.layers_by_shape: dict[torch.Size, list[torch.Tensor]] = {}
        for layer in self.layers:
            self.layers_by_shape.setdefault(layer.shape, []).append(layer)

    def copy_blocks(self, block_copies: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks, (from, to), one after the other: a block that is copied from may be copied
        to later."""
        for alike in self.layers_by_shape.values():
            self.backend.copy_blocks(alike, block_copies)

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block's keys and values, by layer."""
        return [layer[:, 0].numel() * layer.element_size() for layer in self.layers]

    def read_blocks(self, block_ids: Sequence[int]) -> Array:
        """Copy blocks out of the cache, [blocks, sum(block_bytes)] uint8, a layer after the other."""
        ids = to_device(np.array(block_ids, np.int64), self.layers[0].device)
        parts = [layer[:, ids].transpose(0, 1).reshape(len(ids), -1).view(torch.uint8).cpu() for layer in self.layers]
        return torch.cat(parts, 1).numpy()

    def write_blocks(self, block_ids: Sequence[int], data: Array) -> None:
        """Copy what read_blocks gave into blocks."""
        ids = to_device(np.array(block_ids, np.int64), self.layers[0].device)
        parts = torch.split(torch.from_numpy(data), self.block_bytes, 1)
        for layer, part in zip(self.layers, parts, strict=True):
            values = part.contiguous().view(layer.dtype).view(len(ids), 2, *layer.shape[2:])
            layer[:, ids] = values.transpose(0, 1).to(layer.device)


def choose_group(settings: ComputeSettings, config: CacheShape) -> int:
    """The groups that --kv-cache-dtype and --kv-cache-group ask for; 0: none. Raises StartupError
    if they don't divide the heads."""
    if settings.kv_cache_dtype == "auto":
        return 0
    asked, dims = settings.kv_cache_group, sorted({head_dim for _, head_dim in config.kv_heads})
    group = (
        int(asked)
        if asked is not None
        else next((size for size in (64, 32, 8) if all(dim % size == 0 for dim in dims)), min(dims))
    )
    if undivided := [dim for dim in dims if dim % group]:
        raise StartupError(f"--kv-cache-group {group}: heads of {undivided[0]} dimensions can't be divided by it")
    return group


def token_bytes_of(settings: ComputeSettings, config: CacheShape, backend: Backend) -> int:
    """Bytes of a token's keys and values in all layers. Raises StartupError as choose_group does."""
    if not config.kv_heads:
        return 0
    group = choose_group(settings, config)
    return sum(backend.kv_token_bytes(heads, head_dim, group=group) for heads, head_dim in config.kv_heads)


def choose_num_blocks(
    settings: ComputeSettings,
    configs: Sequence[CacheShape],
    backend: Backend,
    workspace_bytes: int,
    state_bytes: int = 0,
) -> int:
    """As many blocks as fit in the memory asked for, or in a share of what is free now and stays
    so. Raises StartupError if not even one does.

    configs: of the models that have a cache each, of as many blocks; workspace_bytes: what the
    largest step will take; state_bytes: the states of as many sequences as there are places.
    """
    block_bytes = settings.block_size * sum(token_bytes_of(settings, config, backend) for config in configs)
    if not block_bytes:
        return NO_LIMIT
    free = max(free_memory(backend.device) - workspace_bytes - state_bytes, 0)
    states = f", {size_text(state_bytes)} for the states of --max-num-seqs sequences" if state_bytes else ""
    beside = f"the weights{states} and {size_text(workspace_bytes)} to work in"
    wanted = settings.kv_cache_memory
    if wanted is None:
        wanted_bytes = int(free * choose_share(settings, backend.device))
    elif wanted <= free:
        wanted_bytes = int(wanted)
    else:
        raise StartupError(f"--kv-cache-memory {size_text(wanted)}: only {size_text(free)} are free beside {beside}")
    if wanted_bytes < block_bytes:
        raise StartupError(
            f"the KV cache would have {size_text(wanted_bytes)} beside {beside}; one block of it takes "
            f"{size_text(block_bytes)}: raise --kv-cache-memory{' or lower --max-num-seqs' if state_bytes else ''}"
        )
    return wanted_bytes // block_bytes


def choose_share(settings: ComputeSettings, device: torch.device) -> float:
    """The share of the free memory that the cache may have."""
    return settings.kv_cache_share or (CUDA_SHARE if device.type == "cuda" else CPU_SHARE)


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still take on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_memory()
