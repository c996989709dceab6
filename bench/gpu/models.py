"""Whole models on the CUDA backend: their tokens against the torch backend's, and a sequence's bits alone, in company, and in chunks."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from services.compute.backends.backend import Backend
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.batch import ScheduledBatch
from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import KVCache
from services.compute.model_runner import ModelRunner
from services.compute.models.config import read_config
from services.compute.models.decoder import Decoder
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.loop import run_step
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Sequence
from services.compute.weights.loader import load_weights
from shared.model_files import text_config
from shared.sampling_params import SamplingParams

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    logits: Tensor  # [tokens, vocab] float32


class LoadedModel:
    """A checkpoint on a backend, with greedy decisions."""

    def __init__(self, folder: Path, backend: Backend, *, quantization: str = "none", kv_group: int = 0) -> None:
        config = read_config(text_config(json.loads((folder / "config.json").read_text())), None)
        self.backend = backend
        self.kv_group = kv_group
        self.model = Decoder(config, load_weights(folder, config, backend, quantization=quantization), backend)

    def answer(self, prompts: list[list[int]], num_tokens: int, *, max_batched_tokens: int = 512, num_blocks: int = 256) -> list[Answer]:
        """The most likely continuations."""
        cache = KVCache(self.model.config, self.backend, num_blocks=num_blocks, block_size=16, group=self.kv_group)
        runner, blocks = ModelRunner(self.model, cache), BlockManager(num_blocks, 16)
        scheduler = Scheduler(blocks, make_admission("predicted", blocks), max_num_seqs=len(prompts), max_batched_tokens=max_batched_tokens)
        params = SamplingParams(max_tokens=num_tokens)
        sequences = [Sequence(number, str(number), list(prompt), len(prompt), params) for number, prompt in enumerate(prompts)]
        logits: dict[int, list[Tensor]] = {sequence.handle: [] for sequence in sequences}
        for sequence in sequences:
            scheduler.add(sequence)

        def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> Iterator[int]:
            for sequence, row in zip(sampled, runner.forward(batch).cpu(), strict=True):
                logits[sequence.handle].append(row.clone())
                yield int(row.argmax())

        while scheduler.num_unfinished:
            run_step(scheduler, decide)
        return [Answer(each.token_ids[each.num_prompt_tokens :], torch.stack(logits[each.handle])) for each in sequences]


def make_prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True, slots=True)
class ModelCheck:
    mode: str
    are_tokens_equal: bool | None  # to the torch backend's; None: not compared
    error: float | None  # of the logits, relative, over the same tokens
    are_bits_equal: bool  # alone, in company, in chunks

    @property
    def holds(self) -> bool:
        return self.are_tokens_equal is not False and self.are_bits_equal


def check_model(
    folder: Path, backend: CudaBackend, *, quantization: str = "none", kv_group: int = 0, lengths: tuple[int, ...], num_tokens: int, reference: Backend | None
) -> ModelCheck:
    """reference: whose tokens are compared, quantized alike: in float32 they are the same."""
    model = LoadedModel(folder, backend, quantization=quantization, kv_group=kv_group)
    prompts = make_prompts(model.model.config.vocab_size, lengths)
    together = model.answer(prompts, num_tokens)
    alone = [model.answer([prompt], num_tokens)[0] for prompt in prompts[:2]]
    in_chunks = model.answer(prompts, num_tokens, max_batched_tokens=7)
    are_equal = all(torch.equal(one.logits, other.logits) for found in (alone, in_chunks) for one, other in zip(together, found, strict=False))
    mode = " ".join([str(backend.dtype).removeprefix("torch."), quantization, *([f"KV int8 in groups of {kv_group}"] if kv_group else [])])
    if reference is None:
        return ModelCheck(mode, None, None, are_equal)
    expected = LoadedModel(folder, reference, quantization=quantization, kv_group=kv_group).answer(prompts, num_tokens)
    error = max(float((one.logits - other.logits).norm() / other.logits.norm()) for one, other in zip(together, expected, strict=True))
    return ModelCheck(mode, all(one.tokens == other.tokens for one, other in zip(together, expected, strict=True)), error, are_equal)
