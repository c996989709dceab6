"""One row of k + 1 sampled positions gives the bits of k + 1 steps of one token: logits, edits,
grammars' masks, candidates. Whatever is computed ahead rests on it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig

from services.compute.backends.cpu.library import VARIABLE
from services.compute.cache.kv_cache import KVCache
from services.compute.candidates.reduction import begin_reduction
from services.compute.execution.model_runner import ModelRunner
from services.compute.sequence import Prefix, Request, RowKey, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.files import open_model
from shared.model.sampling_params import ChainParams, DryParams, SamplingParams
from shared.wire.messages import encode
from tests.kernels.families import Engine, reference_model
from tests.kernels.gguf_files import Writer
from tests.kernels.test_gguf import WIDE, random_model

NUM_BLOCKS, BLOCK_SIZE = 140, 16
# tokens that are known before, and how many are decided at once after them: around the borders of
# blocks, of ranges of keys, and of tiles of rows
CASES = [(1, 0), (15, 4), (16, 1), (17, 5), (3, 15), (30, 16), (40, 2), (254, 4), (33, 34), (1021, 6)]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"top_p": 0.9, "frequency_penalty": 1.3, "presence_penalty": 0.2},
    {"repetition_penalty": 1.4, "min_tokens": 3},
    {"top_k": 20, "dry": DryParams(1.0, base=1.5, allowed_length=1)},
    {"temperature": 1.3, "bad_words_token_ids": ((5,), (7, 9), (8, 8))},
    {"chain": ChainParams(typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.05, dynatemp_range=0.3), "logprobs": 1},
    {"min_p": 0.05, "logit_bias": {4: 3.0}},
]


def sequences_of(vocab_size: int) -> list[Sequence]:
    """Few distinct tokens, so that penalties and bad words have something to do. The last two begin alike."""
    generator = torch.Generator().manual_seed(5)
    found: list[Sequence] = []
    for handle, (known, ahead) in enumerate(CASES):
        token_ids = torch.randint(2, 14, (known + ahead,), generator=generator).tolist()
        token_ids[:known:3] = torch.randint(2, vocab_size, (len(token_ids[:known:3]),), generator=generator).tolist()
        if handle == len(CASES) - 1:
            token_ids[:32] = found[-1].tokens.ids[:32]
        params = SamplingParams(**{"seed": handle, "max_tokens": 200, **PARAMS[handle % len(PARAMS)]})
        found.append(Sequence(Request(handle, str(handle), params, (1,)), Tokens(token_ids, max(1, known - 2))))
    return found


class Steps:
    """Steps of a loaded model on an empty cache. Where blocks are shared, the last sequence reads
    two of the one's before it.
    """

    def __init__(self, loaded: Engine, kv_group: int, *, shares_blocks: bool) -> None:
        model = loaded.runner.model
        self.runner = ModelRunner(
            model, KVCache(model.config, model.backend, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, group=kv_group)
        )
        self.search = model.backend.row_search
        self.shares_blocks = shares_blocks
        free = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(int(shares_blocks))).tolist())
        self.tables = [tuple(next(free) for _ in range(-(-(known + ahead) // BLOCK_SIZE))) for known, ahead in CASES]
        if shares_blocks:
            self.tables[-1] = (*self.tables[-2][:2], *self.tables[-1][2:])

    def row(self, sequence: Sequence, first: int, last: int, sampled: range) -> BatchRow:
        return BatchRow(
            sequence.handle,
            tuple(sequence.tokens.ids[first:last]),
            first,
            self.tables[sequence.handle],
            sampled,
            sequence.tokens.num_prompt,
        )

    def prefill(self, sequences: list[Sequence]) -> None:
        """All but the last of the known tokens."""
        for sequence in sequences:
            first, last = (
                32 if self.shares_blocks and sequence.handle == len(CASES) - 1 else 0,
                CASES[sequence.handle][0] - 1,
            )
            if first < last:
                self.runner.run(ScheduledBatch((self.row(sequence, first, last, range(0)),), 0))

    def decide(self, rows: list[tuple[BatchRow, list[Prefix]]]) -> dict[RowKey, tuple[torch.Tensor, bytes]]:
        """One step: the logits and the message of each of its sampled rows."""
        batch = ScheduledBatch(tuple(row for row, _ in rows), sum(row.num_tokens == 1 for row, _ in rows))
        prefixes = [prefix for _, some in rows for prefix in some]
        assert batch.sampled == [prefix.key for prefix in prefixes]
        logits = self.runner.logits(batch, self.runner.run(batch)).clone()
        found = begin_reduction(logits.clone(), prefixes, self.search).finish()
        assert found.keys == batch.sampled and not found.failures
        return {key: (logits[at], encode(found.message([at], "c", 1, (), []))) for at, key in enumerate(found.keys)}


def check(loaded: Engine, kv_group: int = 0) -> None:
    sequences = sequences_of(loaded.runner.vocab_size)
    one_by_one, at_once = Steps(loaded, kv_group, shares_blocks=False), Steps(loaded, kv_group, shares_blocks=True)
    expected: dict[RowKey, tuple[torch.Tensor, bytes]] = {}
    one_by_one.prefill(sequences)
    for ahead in range(max(ahead for _, ahead in CASES) + 1):
        rows = []
        for sequence, (known, most) in zip(sequences, CASES, strict=True):
            if ahead <= most:
                alone = Sequence(
                    sequence.request, Tokens(sequence.tokens.ids[: known + ahead], sequence.tokens.num_prompt)
                )
                rows.append((one_by_one.row(alone, known + ahead - 1, known + ahead, range(1)), [alone.prefix()]))
        expected |= one_by_one.decide(rows)
    at_once.prefill(sequences)
    rows = []
    for sequence, (known, most) in zip(sequences, CASES, strict=True):
        row = at_once.row(sequence, known - 1, known + most, range(most + 1))
        rows.append((row, [Prefix(sequence, known + ahead) for ahead in range(most + 1)]))
    rows.sort(key=lambda each: each[0].num_tokens)
    found = at_once.decide(rows)
    assert found.keys() == expected.keys()
    wrong = [key for key in found if not torch.equal(found[key][0], expected[key][0])]
    assert not wrong, f"other logits: {wrong}"
    assert {key: message for key, (_, message) in found.items()} == {
        key: message for key, (_, message) in expected.items()
    }


@pytest.mark.pairwise("name")
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("name", "quantization", "kv_group"),
    [
        ("mistral-window", "none", 0),
        ("gemma4-per-layer", "none", 0),
        ("mistral-window", "w8a8", 32),
        ("mistral-window", "w4", 0),
        ("qwen2-moe", "none", 32),
        ("qwen2-moe", "w8a8", 0),
        ("qwen2-moe", "nf4", 0),
        ("gemma2", "none", 0),
        ("gemma2", "none", 32),
        ("gemma2", "w8a8", 0),
        ("gemma2", "nf4", 0),
    ],
)
def test_native_code(name: str, quantization: str, kv_group: int, tmp_path: Path) -> None:
    reference_model(name, tmp_path)
    check(Engine(tmp_path, dtype=torch.bfloat16, quantization=quantization), kv_group)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_K, Kind.Q8_0])
def test_a_gguf_file_whose_blocks_are_kept(kind: Kind, tmp_path: Path) -> None:
    path = Writer(random_model(LlamaConfig(**WIDE)), tmp_path / "model.gguf").write(kind)
    check(Engine(open_model(str(path)), dtype=torch.bfloat16))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "dtype", "kv_group"),
    [
        ("llama2", torch.float32, 0),
        ("mistral-window", torch.float32, 16),
        ("mistral-window", torch.bfloat16, 0),
        ("qwen3", torch.float32, 16),
        ("qwen2-moe", torch.bfloat16, 0),
        ("gemma2", torch.float32, 0),
        ("gemma3", torch.float32, 16),
        ("gemma3", torch.bfloat16, 0),
    ],
)
def test_torch(name: str, dtype: torch.dtype, kv_group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_model(name, tmp_path)
    monkeypatch.setenv(VARIABLE, "torch")
    check(Engine(tmp_path, dtype=dtype), kv_group)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("quantization", ["w8a8", "w4", "nf4"])
def test_quantized_layers_in_torch(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_model("qwen3", tmp_path)
    monkeypatch.setenv(VARIABLE, "torch")
    check(Engine(tmp_path, dtype=torch.bfloat16, quantization=quantization))


def test_a_step_that_was_sent_is_the_step(tmp_path: Path) -> None:
    """An executor gets plain values: a copy that has travelled gives the same bits."""
    reference_model("qwen3", tmp_path)
    loaded, [sequence, *_] = Engine(tmp_path), sequences_of(512)[3:]
    rows = [Steps(loaded, 0, shares_blocks=False) for _ in range(2)]
    batch = ScheduledBatch((rows[0].row(sequence, 0, len(sequence.tokens), range(2, len(sequence.tokens))),), 0)
    sent = pickle.loads(pickle.dumps(batch))
    assert sent == batch and sent is not batch
    here, there = (each.runner.forward(step).clone() for each, step in zip(rows, (batch, sent), strict=True))
    assert len(here) == len(batch.sampled) and torch.equal(here, there)
