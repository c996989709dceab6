"""A whole model on the CUDA backend in the interpreter: torch's tokens in float32, and a sequence's bits in any company.

`make verify SUITE=cuda-kernels` has more.
"""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen2MoeConfig

from bench.gpu.models import LoadedModel, check_flight, check_model, make_prompts
from services.compute.backends.backend import LargestStep
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.stack import CudaStack
from services.compute.backends.torch.attention import AttentionInputs
from services.compute.batch import BatchRow, ScheduledBatch
from services.compute.models.moe import MoeMlp
from shared.model.sampling_params import SamplingParams
from tests.kernels.backends import CPU, FLOAT32
from tests.kernels.families import reference_model

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, "head_dim": 16,
}  # fmt: skip
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


def test_steps_of_single_tokens_are_recorded_by_bucket_and_filled_in_one_piece(model: Path) -> None:
    """Three sequences are padded to four. From the second step on, the recording of the first computes them, and what is tapped."""
    backend = CudaBackend(torch.float32, CPU)
    loaded, plain = LoadedModel(model, backend), LoadedModel(model, FLOAT32)
    for each in (loaded, plain):
        each.model.tap((1, 0))
    stack = loaded.model.stack
    assert isinstance(stack, CudaStack)
    runs = []
    stack.recordings.record = lambda forward: lambda: runs.append(1) or forward()  # type: ignore[func-returns-value]
    loaded.model.workspace(32, 8, 64)  # the buffers have their size: nothing moves any more
    generation, uploads = backend.buffers.generation, backend.buffers.num_uploads
    found = loaded.answer(make_prompts(64, (3, 4, 5)), 4)
    assert backend.buffers.generation == generation
    assert backend.buffers.num_uploads - uploads == 4  # one a step: the prompts, then three of single tokens
    assert len(stack.recordings) == 1 and len(runs) == 2
    expected = plain.answer(make_prompts(64, (3, 4, 5)), 4)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert loaded.model.taps is not None and plain.model.taps is not None
    torch.testing.assert_close(loaded.model.taps.take(3), plain.model.taps.take(3), atol=1e-4, rtol=1e-4)


def test_a_recording_belongs_to_its_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To all of its layers: another cache may begin where one that is gone began."""
    stack = LoadedModel(model, CudaBackend(torch.bfloat16, CPU)).model.stack
    assert isinstance(stack, CudaStack)
    monkeypatch.setattr(CudaStack, "run", lambda _self, x, *_: x)
    angles = torch.zeros(1, 8)
    plan = stack.attention.plan(AttentionInputs([1], [1], [(0,)], torch.zeros(1, dtype=torch.int64), ((angles, angles),)), 16)
    first, second, third = (torch.zeros(2, 4, 2 * 16 * 16) for _ in range(3))
    for number, layers in enumerate(([first, second], [first, second], [first, third], [first[:, :2], second]), start=1):
        stack(torch.zeros(1, 32), layers, plan)
        assert len(stack.recordings) == max(1, number - 1)


def test_the_largest_step_can_be_run_to_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it says how much memory is left for the KV cache. What a mixture of experts takes between them is measured too."""
    config = Qwen2MoeConfig(
        **SIZES | {"num_hidden_layers": 1}, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    )
    reference_model("qwen2-moe", tmp_path, config=config)
    backend, run_experts = CudaBackend(torch.bfloat16, CPU), MoeMlp._run_experts
    steps: list[LargestStep] = []
    mixed: list[int] = []

    def run_noted(mlp: MoeMlp, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        mixed.append(len(x))
        return run_experts(mlp, x, chosen)

    monkeypatch.setattr(backend, "workspace", steps.append)
    monkeypatch.setattr(MoeMlp, "_run_experts", run_noted)
    LoadedModel(tmp_path, backend).model.workspace(3, 1, 64)
    backend._run_largest(steps[0])
    assert mixed == [3, 1]


def test_no_step_moves_what_recordings_read(model: Path) -> None:
    """The largest step's numbers have their places before the first step: nothing that is recorded is dropped for a longer prompt."""
    backend = CudaBackend(torch.bfloat16, CPU)
    loaded = LoadedModel(model, backend)
    loaded.model.workspace(300, 8, 400)
    runner, generation = loaded.make_runner(32), backend.buffers.generation
    for length in (70, 150, 300):
        row = BatchRow(0, (5,) * length, 0, tuple(range(20)), range(length - 1, length), target_ids=(5,) * (length - 1), first_target=1)
        runner.prepare(ScheduledBatch((row,), 0))
        assert backend.buffers.generation == generation
