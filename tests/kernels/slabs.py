"""The native cache's layout, as services/compute/backends/cpu/cache.inc describes it, from rows
[..., block_size, head_dim] or of int8 groups; and back.
"""

import torch
from torch import Tensor

from services.compute.backends.torch.reference import kv_group

SLAB = 16


def to_slabs(kv: Tensor, head_dim: int) -> Tensor:
    """kv: [2, blocks, kv_heads, block_size, row], as reference.write_kv leaves it. Returns the same
    shape in native order.
    """
    return torch.stack([_parts_to_slab(rows, head_dim, is_value=bool(which)) for which, rows in enumerate(kv)]).view(
        kv.shape
    )


def from_slabs(kv: Tensor, head_dim: int) -> Tensor:
    return torch.stack([_slab_to_parts(rows, head_dim, is_value=bool(which)) for which, rows in enumerate(kv)]).view(
        kv.shape
    )


def _together(head_dim: int, group: int, is_value: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How [16 positions, head_dim] is divided, and in which order its parts stand."""
    width = 4 if group else 2
    return ((SLAB // width, width, head_dim), (0, 2, 1)) if is_value else ((SLAB, head_dim // width, width), (1, 0, 2))


def _parts_to_slab(rows: Tensor, head_dim: int, *, is_value: bool) -> Tensor:
    group = kv_group(rows, head_dim)
    sizes, order = _together(head_dim, group, is_value)
    slabs = rows.reshape(-1, SLAB, rows.shape[-1])
    codes = slabs[..., :head_dim].reshape(-1, *sizes).permute(0, *(1 + each for each in order)).flatten(1)
    if not group:
        return codes.flatten()
    if not is_value:
        codes = codes ^ 0x80
    scales = slabs[..., head_dim:].contiguous().view(torch.float16).transpose(1, 2)
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.cat((codes, scales.flatten(1)), dim=1).flatten()


def _slab_to_parts(rows: Tensor, head_dim: int, *, is_value: bool) -> Tensor:
    group = kv_group(rows, head_dim)
    sizes, order = _together(head_dim, group, is_value)
    slabs = rows.reshape(-1, SLAB * rows.shape[-1])
    shape = [sizes[each] for each in order]
    codes = (
        slabs[:, : SLAB * head_dim]
        .reshape(-1, *shape)
        .permute(0, *(1 + order.index(each) for each in range(3)))
        .reshape(-1, SLAB, head_dim)
    )
    if not group:
        return codes.flatten()
    if not is_value:
        codes = codes ^ 0x80
    scales = (
        slabs[:, SLAB * head_dim :].contiguous().view(torch.float16).view(-1, head_dim // group, SLAB).transpose(1, 2)
    )
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.cat((codes, scales), dim=-1).flatten()
