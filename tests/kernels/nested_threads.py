"""`python -m tests.kernels.nested_threads`: a step of many sequences, over both forms of cache, and
a layer of four bits.

A program of its own: OpenMP reads its number of threads once a process, and this one imports little.
"""

import torch

from services.compute.backends.matrix import Dense
from services.compute.backends.torch.attention import AttentionInputs, Heads
from tests.kernels.backends import native_backend

HEADS, COUNT, BLOCK_SIZE = Heads(8, 4, 64), 24, 16


def attend_and_multiply(group: int) -> None:
    backend = native_backend()
    attention = backend.make_attention(HEADS)
    kv = backend.make_kv_layer(COUNT, BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim, group=group)
    tables = [(each,) for each in range(COUNT)]
    no_rotation = torch.ones(COUNT, 32), torch.zeros(COUNT, 32)
    inputs = AttentionInputs([1] * COUNT, [10] * COUNT, tables, torch.arange(COUNT) * BLOCK_SIZE + 9, (no_rotation,))
    found = attention(
        torch.randn(COUNT, 16 * 64).bfloat16(),
        kv,
        attention.plan(inputs, BLOCK_SIZE),
        window=None,
        norms=(None, None),
        eps=1e-6,
    )
    layer = backend.make_linear(Dense(torch.randn(64, 512).bfloat16()), quantization="w4")
    assert torch.isfinite(found.float()).all() and torch.isfinite(layer(found).float()).all()


if __name__ == "__main__":
    torch.manual_seed(0)
    for group in (0, 8):
        attend_and_multiply(group)
