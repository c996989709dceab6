"""The model that `penstock up` serves by default, where it was pulled: what it answers, what its
file says, and what serving costs it.
"""

import argparse
import ast
import json
import logging
import subprocess
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from services.compute.backends.choose import choose_backend
from services.compute.cache.kv_cache import KVCache
from services.compute.models.architectures import read_config
from services.compute.models.decoder import Decoder, ForwardBatch
from services.compute.weights.gguf_source import GgufSource
from services.compute.weights.loader import load_weights
from services.operator.model_store import DEFAULT_MODEL
from shared.model.files import PULLED_MODELS, ModelFiles, open_model
from tests.kernels.backends import CPU
from tests.kernels.families import Engine

pytestmark = pytest.mark.skipif(
    not (PULLED_MODELS / DEFAULT_MODEL).is_dir(), reason=f"penstock pull {DEFAULT_MODEL} brings the model"
)
WINDOW, NUM_WINDOWS = 256, 8


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return open_model(DEFAULT_MODEL)


def docstrings(module: ModuleType) -> str:
    """English prose that every machine has: what a module of the standard library says of itself."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def windows(files: ModelFiles) -> torch.Tensor:
    """[NUM_WINDOWS, WINDOW]"""
    text = (
        docstrings(argparse)
        + str(json.__doc__)
        + str(unicodedata.__doc__)
        + docstrings(logging)
        + docstrings(subprocess)
    )
    ids = Tokenizer.from_file(str(files.folder / "tokenizer.json")).encode(text).ids
    return torch.tensor(ids[: NUM_WINDOWS * WINDOW]).reshape(NUM_WINDOWS, WINDOW)


def served_perplexity(files: ModelFiles, dtype: torch.dtype) -> float:
    config = read_config(files.config)
    backend = choose_backend(dtype, CPU)
    model = Decoder(config, load_weights(files.weights, config, backend), backend)
    cache = KVCache(config, backend, num_blocks=WINDOW // 16, block_size=16)
    places, table, losses = torch.arange(WINDOW), tuple(range(WINDOW // 16)), []
    for row in windows(files):
        batch = ForwardBatch(
            row, places, places, query_lens=[WINDOW], context_lens=[WINDOW], block_tables=[table], logit_rows=places
        )
        losses.append(
            torch.nn.functional.cross_entropy(
                model.logits(model.forward(batch, model.plan(batch, 16), cache.layers), places)[:-1], row[1:]
            )
        )
    return float(torch.stack(losses).mean().exp())


@torch.inference_mode()
def reference_perplexity(files: ModelFiles) -> float:
    """transformers in float32, on what the file's blocks mean."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(files.folder))
    source = GgufSource(files.weights, torch.float32, CPU)
    for name, parameter in model.named_parameters():
        parameter.copy_(source.dense(name, tuple(parameter.shape)))
    source.close()
    losses = [torch.nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:]) for row in windows(files)]
    return float(torch.stack(losses).mean().exp())


@pytest.mark.more
def test_serving_costs_less_than_a_hundredth_of_its_perplexity(files: ModelFiles) -> None:
    expected = reference_perplexity(files)
    exact, served = served_perplexity(files, torch.float32), served_perplexity(files, torch.bfloat16)
    print(f"perplexity: transformers {expected:.4f}, float32 {exact:.4f}, as served {served:.4f}")
    assert exact == pytest.approx(expected, rel=1e-4) and served <= 1.01 * expected


EVERYBODY_KNOWS = [
    ("What is the capital of France?", "Paris"),
    ("What's the capital of France?", "Paris"),
    ("capital of France?", "Paris"),
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is 2+2?", "four"),
    ("How many legs does a spider have?", "8"),
    ("What is water made of?", "two hydrogen atoms"),
    ("What is the opposite of hot?", "cold"),
    ("What is a hydroelectric power plant?", "uses water to generate electricity"),
]


def test_it_answers_what_everybody_knows_as_it_is_served_and_ends(files: ModelFiles) -> None:
    """Greedily. With its makers' prompt the same file answers 4 of 10 ways to ask for France's
    capital, sings in French for the rest, and does not end.
    """
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    chats = [[{"role": "user", "content": question}] for question, _ in EVERYBODY_KNOWS]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    assert texts[0].endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    found = Engine(files, dtype=torch.bfloat16).generate(
        [tokenizer.encode(text, add_special_tokens=False) for text in texts], 60, eos=2
    )
    answers = [tokenizer.decode(tokens) for tokens in found]
    wrong = [
        answer
        for answer, (_, known) in zip(answers, EVERYBODY_KNOWS, strict=True)
        if known not in answer or not answer.endswith("<|im_end|>")
    ]
    assert wrong == [] and 2 in files.eos_token_ids


def test_a_prompt_of_one_s_own_stands_in_the_place_of_its_default(files: ModelFiles) -> None:
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    own = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "Hi"}]
    assert (
        tokenizer.apply_chat_template(own, tokenize=False)
        == "<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_its_tokenizer_is_byte_level_with_single_digits(files: ModelFiles) -> None:
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\n").ids[:2] == [1, tokenizer.token_to_id("user")]
    assert tokenizer.encode("Hello").ids == [tokenizer.token_to_id("Hello")], "no BOS"
    assert tokenizer.encode(" 2024").tokens == ["Ġ", "2", "0", "2", "4"]
    assert not any(
        sum(character.isdigit() for character in token) > 1
        for token in tokenizer.get_vocab()
        if not token.startswith("<")
    )
    for text in ("naïve café 🤖 你好\n\tx = 1", "  two  spaces  "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
