"""An EAGLE-3 head on the CUDA backend in the interpreter: places that are only written, several of
a sequence at once, and single ones.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.compute.backends.backend import Backend
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.matrix import Dense
from services.compute.cache.kv_cache import KVCache
from services.compute.models.architectures import read_config
from services.compute.speculation.eagle_file import EagleWeights, read_eagle
from services.compute.speculation.eagle_head import EagleChunk, EagleHead
from tests.kernels.backends import CPU, FLOAT32
from tests.kernels.families import SIZES
from tests.kernels.test_eagle import HIDDEN, VOCAB, of_another_width, random, write

BLOCK, TABLE = 16, (3, 5)


def results(weights: EagleWeights, embedding: Tensor, states: Tensor, backend: Backend) -> list[Tensor]:
    """Logits of the places that two steps run."""
    head = EagleHead(weights, embedding, backend.make_linear(Dense(embedding)), VOCAB, backend)
    kv = KVCache(weights.config, backend, num_blocks=8, block_size=BLOCK).layers[0]
    assert head.workspace(32, 64).own > 0
    fused = head.fuse(states)
    head.write([EagleChunk(0, list(range(20)), TABLE)], fused[:20], kv, BLOCK)
    first = head.run(
        [EagleChunk(20, [5, 6], TABLE), EagleChunk(0, [9], (2,)), EagleChunk(0, [9], (1,))], fused[20:24], kv, BLOCK
    )
    found = [head.logits(first).clone()]
    second = head.run(
        [EagleChunk(22, [7], TABLE), EagleChunk(1, [9], (2,))], head.next_states(first[[1, 2]]), kv, BLOCK
    )
    return [*found, head.logits(second).clone()]


@pytest.mark.more
@torch.inference_mode()
def test_a_head_computes_what_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors, config = of_another_width()
    target = read_config(SIZES | {"architectures": ["LlamaForCausalLM"]})
    weights = read_eagle(write(tmp_path / "head", tensors, config), config, target, torch.float32, CPU)
    embedding, states = random(VOCAB, HIDDEN), random(24, 3 * HIDDEN, spread=1.0)
    found, expected = (
        results(weights, embedding, states, backend) for backend in (CudaBackend(torch.float32, CPU), FLOAT32)
    )
    for some, others in zip(found, expected, strict=True):
        torch.testing.assert_close(some, others, atol=1e-3, rtol=1e-3)
