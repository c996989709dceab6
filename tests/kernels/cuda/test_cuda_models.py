"""A whole model on the CUDA backend in the interpreter: torch's tokens in float32, and a sequence's
bits in any company.

`make verify SUITE=cuda-kernels` has more.
"""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen2MoeConfig

from bench.gpu.models import LoadedModel, check_flight, check_model, make_prompts
from services.compute.backends.backend import LargestStep
from services.compute.backends.cuda import attention as attention_module
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.experts import CudaExperts
from services.compute.backends.cuda.graphs import Recordings
from services.compute.backends.cuda.stack import CudaStack
from services.compute.backends.torch.attention import AttentionInputs
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.sampling_params import SamplingParams
from tests.kernels.backends import CPU, FLOAT32
from tests.kernels.families import reference_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
    "head_dim": 16,
}
CONFIG = LlamaConfig(**SIZES | {"num_hidden_layers": 1})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    reference_model("llama", tmp_path, config=CONFIG)
    return tmp_path


def test_tokens_are_those_of_torch_in_float32(model: Path) -> None:
    check = check_model(model, CudaBackend(torch.float32, CPU), lengths=(3, 10), num_tokens=2, reference=FLOAT32)
    assert check.are_tokens_equal and check.are_bits_equal and check.error is not None and check.error < 1e-5


def test_tokens_are_the_same_with_a_step_in_flight(model: Path) -> None:
    """The next step reads them on the device. One ends by its length, the other may end by a token."""
    draws = (SamplingParams(max_tokens=3, top_k=4, seed=1), SamplingParams(max_tokens=5, temperature=0.0))
    check = check_flight(model, CudaBackend(torch.bfloat16, CPU), lengths=(3,), draws=draws)
    assert check.are_tokens_equal and check.num_tokens > 4


def test_short_steps_are_recorded_by_bucket_and_filled_in_one_piece(model: Path) -> None:
    """Three sequences are padded to four. From the second step on, the recording of the first computes
    them, and what is tapped. Their prompts are short enough for a recording, too."""
    backend = CudaBackend(torch.float32, CPU)
    loaded, plain = LoadedModel(model, backend), LoadedModel(model, FLOAT32)
    for each in (loaded, plain):
        each.model.tap((1, 0))
    stack = loaded.model.stack
    assert isinstance(stack, CudaStack)
    runs = []
    stack.recordings.record = lambda forward: lambda: runs.append(1) or forward()  # type: ignore[func-returns-value]
    loaded.model.workspace(32, 64, 64)  # the buffers have their size: nothing moves any more
    generation, uploads = backend.buffers.generation, backend.buffers.num_uploads
    found = loaded.answer(make_prompts(64, (3, 4, 5)), 4)
    assert backend.buffers.generation == generation
    assert backend.buffers.num_uploads - uploads == 4  # one a step: the prompts, then three of single tokens
    assert len(stack.recordings) == 2 and len(runs) == 2
    expected = plain.answer(make_prompts(64, (3, 4, 5)), 4)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert loaded.model.taps is not None and plain.model.taps is not None
    torch.testing.assert_close(loaded.model.taps.take(3), plain.model.taps.take(3), atol=1e-4, rtol=1e-4)


@pytest.mark.more
def test_tokens_with_drafts_are_recorded_and_have_the_bits_of_steps_of_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafts(model, monkeypatch, longest=9)  # 17, the most, in more_models.py


def check_drafts(model: Path, monkeypatch: pytest.MonkeyPatch, *, longest: int) -> None:
    """Rows of one token, of some, and of more than a tile's eight queries; over more than one range,
    and over more than there are programs. Where the steps of one kind differ, one recording
    computes them, and where nothing is recorded the bits are the same."""
    monkeypatch.setattr(attention_module, "RANGE", 64)
    monkeypatch.setattr(attention_module, "SPLITS", 1)
    monkeypatch.setattr(attention_module, "ROWS", 16)  # eight queries
    backend = CudaBackend(torch.bfloat16, CPU)
    loaded = LoadedModel(model, backend)
    loaded.model.workspace(100, 64, 128)
    runner, stack, replayed = loaded.make_runner(18), loaded.model.stack, []
    assert isinstance(stack, CudaStack)
    stack.recordings = Recordings(lambda: lambda forward: lambda: replayed.append(1) or forward())  # type: ignore[func-returns-value]
    [tokens] = make_prompts(64, (80,))

    def row(number: int, first: int, last: int) -> BatchRow:
        return BatchRow(
            number, tuple(tokens[first:last]), first, tuple(range(6 * number, 6 * number + 6)), range(last - first)
        )

    def logits_of(*steps: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Logits by sequence, of the tokens of `spans`. steps: (sequence, first, last) of each."""
        found: list[list[torch.Tensor]] = [[] for _ in spans]
        for kv, before in zip(runner.kv_cache.layers, prompts, strict=True):
            kv.copy_(before)
        for step in steps:
            rows = tuple(row(*each) for each in step)
            logits = runner.forward(ScheduledBatch(rows, sum(each.num_tokens == 1 for each in rows)))
            for each, some in zip(rows, torch.split(logits, [each.num_tokens for each in rows]), strict=True):
                found[each.handle].append(some.clone())
        return [torch.cat(some) for some in found]

    spans = [(0, 20, 21), (1, 40, 45), (2, 60, 60 + longest)]
    runner.run(ScheduledBatch(tuple(row(number, 0, first) for number, first, _ in spans), 0))
    prompts = [kv.clone() for kv in runner.kv_cache.layers]
    one_by_one = logits_of(
        *(
            [(number, first + at, first + at + 1) for number, first, last in spans if first + at < last]
            for at in range(longest)
        )
    )
    num_kinds = len(stack.recordings)
    replayed.clear()
    at_once, in_two = logits_of(spans), logits_of([(0, 20, 21), (1, 40, 42), spans[2]], [(1, 42, 45)])
    assert len(stack.recordings) == num_kinds + 1, "three tokens fewer are of the same kind"
    assert len(replayed) == 2, "and three of one row are of that of three rows"
    monkeypatch.setattr(attention_module, "MAX_TOKENS", 0)
    launched = logits_of(spans)
    assert len(replayed) == 2 and len(stack.recordings) == num_kinds + 1
    for found in (at_once, in_two, launched):
        assert all(torch.equal(one, other) for one, other in zip(found, one_by_one, strict=True))


def test_a_recording_belongs_to_its_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To all of its layers: another cache may begin where one that is gone began."""
    stack = LoadedModel(model, CudaBackend(torch.bfloat16, CPU)).model.stack
    assert isinstance(stack, CudaStack)
    monkeypatch.setattr(CudaStack, "run", lambda _self, x, *_: x)
    angles = torch.zeros(1, 8)
    plan = stack.attention.plan(
        AttentionInputs([1], [1], [(0,)], torch.zeros(1, dtype=torch.int64), ((angles, angles),)), 16
    )
    first, second, third = (torch.zeros(2, 4, 2 * 16 * 16) for _ in range(3))
    for number, layers in enumerate(
        ([first, second], [first, second], [first, third], [first[:, :2], second]), start=1
    ):
        stack(torch.zeros(1, 32), layers, plan)
        assert len(stack.recordings) == max(1, number - 1)


@pytest.mark.more
def test_the_largest_step_can_be_run_to_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it says how much memory is left for the KV cache. What a mixture of experts takes
    between them is measured too.
    """
    config = Qwen2MoeConfig(
        **SIZES | {"num_hidden_layers": 1},
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    reference_model("qwen2-moe", tmp_path, config=config)
    backend, run = CudaBackend(torch.bfloat16, CPU), CudaExperts.run
    steps: list[LargestStep] = []
    mixed: list[int] = []

    def run_noted(experts: CudaExperts, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        mixed.append(len(x))
        return run(experts, x, chosen)

    monkeypatch.setattr(backend, "workspace", steps.append)
    monkeypatch.setattr(CudaExperts, "run", run_noted)
    LoadedModel(tmp_path, backend).model.workspace(3, 1, 64)
    backend._run_largest(steps[0])
    assert mixed == [3, 1]


def test_no_step_moves_what_recordings_read(model: Path) -> None:
    """The largest step's numbers have their places before the first step: nothing that is recorded
    is dropped for a longer prompt.
    """
    backend = CudaBackend(torch.bfloat16, CPU)
    loaded = LoadedModel(model, backend)
    loaded.model.workspace(300, 8, 400)
    runner, generation = loaded.make_runner(32), backend.buffers.generation
    for length in (70, 150, 300):
        row = BatchRow(
            0,
            (5,) * length,
            0,
            tuple(range(20)),
            range(length - 1, length),
            target_ids=(5,) * (length - 1),
            first_target=1,
        )
        runner.prepare(ScheduledBatch((row,), 0))
        assert backend.buffers.generation == generation
