"""GGUF files that people have: $PENSTOCK_TEST_GGUF names some (paths, joined as in PATH).
transformers reads them with `accelerate`, to be installed.
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.model.files import open_model
from tests.kernels.families import Engine

PROMPTS = (
    "The capital of France is",
    "Once on a time there was a little",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5,",
    "Water boils at a temperature of",
)
NUM_TOKENS = 40


@pytest.mark.parametrize(
    "path",
    [Path(path) for path in os.environ.get("PENSTOCK_TEST_GGUF", "").split(os.pathsep) if path],
    ids=lambda path: path.name,
)
def test_it_goes_on_as_transformers_does(path: Path) -> None:
    """Greedy tokens in float32. transformers has readers and dequantization of its own."""
    pytest.importorskip("accelerate")
    files = open_model(str(path))
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    for prompt, found in zip(prompts, Engine(files, dtype=torch.float32).generate(prompts, NUM_TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert found == expected[0, len(prompt) :].tolist(), tokenizer.decode(prompt)
