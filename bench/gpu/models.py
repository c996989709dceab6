"""Whole models on the CUDA backend: their tokens against the torch backend's, and a sequence's bits
alone, in company, and in chunks.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.steps import Steps
from services.compute.backends.backend import Backend
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.torch.recurrent import LOG_LENGTH
from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import KVCache
from services.compute.cache.state_slots import StateSlots
from services.compute.execution.model_runner import ModelRunner
from services.compute.models.architectures import read_config
from services.compute.models.config import ModelConfig
from services.compute.models.decoder import Decoder
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.offline import run_step
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from services.compute.weights.loader import load_weights
from shared.model.files import text_config
from shared.model.sampling_params import SamplingParams

NUM_SLOTS = 16  # of a model that keeps states: sequences at once


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    logits: Tensor  # [tokens, vocab] float32


class LoadedModel:
    """A checkpoint on a backend, with greedy decisions."""

    def __init__(self, folder: Path, backend: Backend, *, quantization: str = "none", kv_group: int = 0) -> None:
        config = self.config_of(folder)
        self.backend = backend
        self.kv_group = kv_group
        self.model = Decoder(config, load_weights(folder, config, backend, quantization=quantization), backend)

    @staticmethod
    def config_of(folder: Path) -> ModelConfig:
        return read_config(text_config(json.loads((folder / "config.json").read_text())), None)

    def make_runner(self, num_blocks: int) -> ModelRunner:
        """With a cache of its own, in blocks of 16 tokens."""
        return ModelRunner(
            self.model,
            KVCache(self.model.config, self.backend, num_blocks=num_blocks, block_size=16, group=self.kv_group),
            num_slots=NUM_SLOTS,
        )

    def answer(
        self, prompts: list[list[int]], num_tokens: int, *, max_batched_tokens: int = 512, num_blocks: int = 256
    ) -> list[Answer]:
        """The most likely continuations."""
        assert len(prompts) <= NUM_SLOTS
        slots = StateSlots(NUM_SLOTS, LOG_LENGTH) if self.model.state_bytes else None
        runner, blocks = self.make_runner(num_blocks), BlockManager(num_blocks, 16, slots=slots)
        scheduler = Scheduler(
            blocks,
            make_admission("predicted", blocks),
            max_num_seqs=len(prompts),
            max_batched_tokens=max_batched_tokens,
        )
        params = SamplingParams(max_tokens=num_tokens)
        sequences = [
            Sequence(Request(number, str(number), params), Tokens(list(prompt)))
            for number, prompt in enumerate(prompts)
        ]
        logits: dict[int, list[Tensor]] = {sequence.handle: [] for sequence in sequences}
        for sequence in sequences:
            scheduler.add(sequence)

        def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> Iterator[int]:
            for sequence, row in zip(sampled, runner.forward(batch).cpu(), strict=True):
                logits[sequence.handle].append(row.clone())
                yield int(row.argmax())

        while scheduler.num_unfinished:
            run_step(scheduler, decide)
        return [
            Answer(each.tokens.ids[each.tokens.num_prompt :], torch.stack(logits[each.handle])) for each in sequences
        ]


def make_prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True, slots=True)
class FlightCheck:
    """The same requests with a step in flight and without: greedy ones, drawn ones, and some whose
    logits are edited.
    """

    mode: str
    num_tokens: int
    # rows that were computed for nothing: one for each end that only a token tells, and each draw
    # that the host draws otherwise
    num_surplus: int
    are_tokens_equal: bool

    @property
    def holds(self) -> bool:
        return self.are_tokens_equal


@dataclass(frozen=True, slots=True)
class ModelCheck:
    mode: str
    are_tokens_equal: bool | None  # to the torch backend's; None: not compared
    error: float | None  # of the logits, relative, over the same tokens
    are_bits_equal: bool  # alone, in company, in chunks

    @property
    def holds(self) -> bool:
        return self.are_tokens_equal is not False and self.are_bits_equal


DRAWS = (
    SamplingParams(max_tokens=6, temperature=0.0),
    SamplingParams(max_tokens=5, top_k=20, seed=2),
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, top_p=0.9, temperature=0.7, frequency_penalty=1.0),
    SamplingParams(max_tokens=9, min_p=0.05, logprobs=2, min_tokens=4),
)


def check_flight(
    folder: Path, backend: Backend, *, lengths: tuple[int, ...], draws: tuple[SamplingParams, ...] = DRAWS
) -> FlightCheck:
    """Requests of `draws`, each with a prompt of every length; a quarter of the first tokens ends them."""
    num_blocks = 256
    model = LoadedModel(folder, backend)
    found: list[list[list[int]]] = []
    num_surplus = 0
    for is_ahead in (False, True):
        runner, blocks = model.make_runner(num_blocks), BlockManager(num_blocks, 16)
        admission = make_admission("predicted", blocks)
        scheduler = Scheduler(blocks, admission, max_num_seqs=5, max_batched_tokens=64, run_ahead=4 if is_ahead else 0)
        sequences: list[Sequence] = []
        for params in draws:
            for prompt in make_prompts(model.model.config.vocab_size, lengths):
                sequence = Sequence(
                    Request(len(sequences), str(len(sequences)), params, eos_token_ids=tuple(range(0, 60, 4))),
                    Tokens(list(prompt)),
                )
                sequences.append(sequence)
                scheduler.add(sequence)
        steps = Steps(scheduler, runner, backend.row_search, is_ahead=is_ahead)
        while scheduler.num_unfinished:
            steps.step()
        found.append([each.tokens.ids[each.tokens.num_prompt :] for each in sequences])
        num_surplus = steps.num_surplus
    mode = str(backend.dtype).removeprefix("torch.")
    return FlightCheck(mode, sum(map(len, found[0])), num_surplus, found[0] == found[1])


def check_model(
    folder: Path,
    backend: CudaBackend,
    *,
    quantization: str = "none",
    kv_group: int = 0,
    lengths: tuple[int, ...],
    num_tokens: int,
    reference: Backend | None,
) -> ModelCheck:
    """reference: whose tokens are compared, quantized alike: in float32 they are the same."""
    model = LoadedModel(folder, backend, quantization=quantization, kv_group=kv_group)
    prompts = make_prompts(model.model.config.vocab_size, lengths)
    together = model.answer(prompts, num_tokens)
    alone = [model.answer([prompt], num_tokens)[0] for prompt in prompts[:2]]
    in_chunks = model.answer(prompts, num_tokens, max_batched_tokens=7)
    are_equal = all(
        torch.equal(one.logits, other.logits)
        for found in (alone, in_chunks)
        for one, other in zip(together, found, strict=False)
    )
    mode = " ".join(
        [
            str(backend.dtype).removeprefix("torch."),
            quantization,
            *([f"KV int8 in groups of {kv_group}"] if kv_group else []),
        ]
    )
    if reference is None:
        return ModelCheck(mode, None, None, are_equal)
    expected = LoadedModel(folder, reference, quantization=quantization, kv_group=kv_group).answer(prompts, num_tokens)
    error = max(
        float((one.logits - other.logits).norm() / other.logits.norm())
        for one, other in zip(together, expected, strict=True)
    )
    return ModelCheck(
        mode, all(one.tokens == other.tokens for one, other in zip(together, expected, strict=True)), error, are_equal
    )
