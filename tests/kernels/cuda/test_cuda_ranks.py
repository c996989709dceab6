"""Ranks on the GPU's backend give the bits of one process."""

from pathlib import Path

import pytest
import torch

from bench.gpu.models import LoadedModel
from services.compute.backends.cuda.backend import CudaBackend
from tests.kernels.backends import CPU
from tests.kernels.cuda.ranks import NUM_BLOCKS, Ranks
from tests.kernels.families import reference_model

PROMPTS = [list(range(3, 22)), [7, 9]]


@pytest.mark.more
@pytest.mark.parametrize(("family", "quantization"), [("llama3", "none"), ("qwen3", "w8a8"), ("qwen3-moe", "none")])
def test_ranks_give_the_bits_of_one_process(family: str, quantization: str, tmp_path: Path) -> None:
    reference_model(family, tmp_path)
    alone = LoadedModel(tmp_path, CudaBackend(torch.bfloat16, CPU), quantization=quantization)
    expected = alone.answer(PROMPTS, 2, max_batched_tokens=16, num_blocks=NUM_BLOCKS)
    ranks = Ranks(tmp_path, 2, quantization)
    found = ranks.answer(PROMPTS, 2, max_batched_tokens=16, num_blocks=NUM_BLOCKS)
    ranks.close()
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and torch.equal(one.logits, other.logits)
