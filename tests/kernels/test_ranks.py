"""Ranks that divide every layer give the bits of one process: every family, every way of holding weights, any number of ranks."""

from pathlib import Path

import pytest
import torch

from services.compute.backends.cpu.library import open_context
from tests.kernels.families import CONFIGS, Engine, reference_model
from tests.kernels.teams import Team

pytestmark = pytest.mark.skipif(open_context() is None, reason="ranks need the native kernels")

PROMPTS = [list(range(3, 40)), list(range(90, 95)), [7]]
NUM_TOKENS = 6


def generate(engine: Engine) -> tuple[list[list[int]], list[torch.Tensor]]:
    tokens = engine.generate(PROMPTS, NUM_TOKENS)
    return tokens, [torch.stack(engine.logits[number]) for number in range(len(PROMPTS))]


def assert_same(location: Path, sizes: tuple[int, ...], **options: object) -> None:
    """A team of each size computes the logits of one process, bit by bit."""
    kv_group = int(str(options.get("kv_group", 0)))
    packing = {name: value for name, value in options.items() if name != "kv_group"}
    alone = Engine(location, dtype=torch.bfloat16, kv_group=kv_group, max_batched_tokens=16, **packing)
    tokens, logits = generate(alone)
    for size in sizes:
        with Team(location, size, kv_group=kv_group, **packing) as team:
            together = Engine(alone, dtype=torch.bfloat16, max_batched_tokens=16)  # with another scheduler, whose prefix cache is empty
            together.runner = team.runner
            found_tokens, found = generate(together)
        assert found_tokens == tokens
        for one, other in zip(found, logits, strict=True):
            assert torch.equal(one, other), f"{size} ranks"


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family(family: str, tmp_path: Path) -> None:
    reference_model(family, tmp_path)
    assert_same(tmp_path, (2, 3))
