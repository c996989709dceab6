"""A sequence's logits are the same bits alone, in any batch, in chunks of any size, and after they
were computed again: whole models in native code.
"""

from pathlib import Path

import pytest
import torch

from shared.model.files import DEMO_MODEL
from tests.kernels.families import SIZES, Engine, reference_model

pytestmark = pytest.mark.usefixtures("instruction_set")
NUM_OUT = 12
LENGTHS = (1, 15, 16, 33, 5, 90, 64, 47, 100, 11)
ALONE = (2, 4, 8, 10)  # of the prompts: a whole block, a part of one, one beyond windows, and one that shares a prefix
# Every mode on one model with windows; every form of weights in experts; and of each other model
# the kernels that only it has, with and without int8.
CASES = [
    *(("mistral-window", quantization, group) for quantization in ("none", "w8a8", "w4", "nf4") for group in (0, 32)),
    *(("qwen2-moe", quantization, 0) for quantization in ("none", "w8a8", "w4", "nf4")),
    *(("glm4-moe", quantization, 0) for quantization in ("none", "w8a8")),
    ("minimax-m2", "none", 32),
    ("ernie4-5-moe", "none", 0),
    ("hunyuan-moe", "none", 0),
    ("qwen3", "none", 32),
    ("qwen3", "w8a8", 0),
    ("demo", "none", 0),
    ("demo", "w4", 0),
    ("demo", "w8a8", 32),
    ("gemma3", "none", 32),
    ("gemma3", "w8a8", 0),
    ("gemma4", "none", 32),
    ("gemma4", "w8a8", 0),
    ("gemma4-moe", "none", 0),
    ("gemma4-per-layer", "none", 32),
    ("gemma4-per-layer", "w8a8", 0),
    ("gemma4-moe", "w4", 32),
    ("olmo2", "none", 32),
    ("olmo2", "w4", 0),
    *((name, "none", 32) for name in ("gemma2", "granite", "hunyuan-dense", "ministral3", "phi3-longrope", "smollm3")),
    *(("qwen3-5", quantization, 0) for quantization in ("none", "w8a8")),
    ("qwen3-next", "none", 32),
    ("lfm2", "none", 0),
    ("granite4-h", "none", 0),
    ("granite4-dense", "w8a8", 0),
]


def random_prompts() -> list[list[int]]:
    """33, of which some share a prefix."""
    generator = torch.Generator().manual_seed(3)
    some = [torch.randint(2, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]
    some += [some[8][:70] + some[5][:20], some[8][:50]]
    return some + [
        torch.randint(2, SIZES["vocab_size"], (3 + 5 * number,), generator=generator).tolist()
        for number in range(33 - len(some))
    ]


@pytest.mark.pairwise("name")
@pytest.mark.parametrize(("name", "quantization", "kv_group"), CASES)
def test_a_sequence_has_the_same_logits_in_any_company(
    name: str, quantization: str, kv_group: int, tmp_path: Path
) -> None:
    reference_model(name, tmp_path)
    loaded = Engine(DEMO_MODEL if name == "demo" else tmp_path, dtype=torch.bfloat16, quantization=quantization)
    prompts = random_prompts()

    def run(
        some: list[list[int]], num_out: int = NUM_OUT, **options: object
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        engine = Engine(loaded, dtype=torch.bfloat16, kv_group=kv_group, **options)
        outputs = engine.generate(some, num_out)
        return outputs, [torch.stack(engine.logits[number]) for number in range(len(some))]

    everything, together = run(prompts)
    cases: list[tuple[int, dict[str, object]]] = [
        (7, {"max_batched_tokens": 9}),
        (12, {"max_num_seqs": 7, "max_batched_tokens": 33, "block_size": 32}),
        (12, {"num_blocks": 18, "strategy": "paged"}),
        (33, {"max_batched_tokens": 50}),
    ]
    for number in ALONE:
        assert torch.equal(run([prompts[number]])[1][0], together[number]), number
    for count, options in cases:
        for expected, found in zip(together, run(prompts[:count], **options)[1], strict=False):
            assert torch.equal(expected, found), (count, options)
    for chunk in (1, 32):  # on its own, so that most steps want no logits
        assert torch.equal(together[7], run(prompts[7:8], max_batched_tokens=chunk)[1][0])
    for at in (1, 5, 11):  # what was decoded is a part of the prompt now
        again = run(
            [prompt + output[:at] for prompt, output in zip(prompts[:8], everything, strict=False)], NUM_OUT - at
        )[1]
        for expected, found in zip(together, again, strict=False):
            assert torch.equal(expected[at:], found), at
