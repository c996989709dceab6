"""A step's torch operations. No kernel runs here: this is about what lies between them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2MoeConfig
from triton.runtime.interpreter import InterpretedFunction

from bench.gpu.models import LoadedModel
from services.compute.backends.backend import LargestStep
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.stack import CudaStack
from services.compute.candidates.reduction import begin_reduction
from services.compute.execution.executor import DrawnTokens
from services.compute.sequence import PENDING, Request, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.sampling_params import SamplingParams
from tests.kernels.backends import CPU
from tests.kernels.cuda.test_cuda_models import SIZES
from tests.kernels.families import LINEAR_ROPE, LOCAL_ROPE, reference_model

MEMORY = {
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.view.default",
    "aten.slice.Tensor",
}  # taken, and looked at
VENDORS = {
    "none": {"aten.matmul.default"},
    "w8a8": {"aten._int_mm.default", "aten.matmul.default"},
    "w4": {"aten._int_mm.default", "aten.matmul.default"},
}
READS = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
    "repeat_interleave.Tensor",
)  # the host waits for their results
DRAWS = (
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=9, frequency_penalty=0.5, repetition_penalty=1.1, min_tokens=3, logit_bias={3: 1.0}),
)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels' names, which are not run."""
    found: list[str] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *_, **__: found.append(kernel.__name__))
    yield found


def singles(count: int) -> ScheduledBatch:
    return ScheduledBatch(tuple(BatchRow(handle, (5,), 0, (0,), range(1)) for handle in range(count)), count)


@pytest.mark.parametrize("quantization", VENDORS)
@pytest.mark.parametrize("is_variant", [False, True])
def test_a_recording_holds_kernels_and_memory_and_nothing_else(
    quantization: str, is_variant: bool, tmp_path: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While CUDA records nothing may be copied from or read by the host."""
    reference_model("llama", tmp_path, config=LlamaConfig(**SIZES | {"num_hidden_layers": 2}))
    recorded, run, per_step = Operations(), CudaStack.run, []

    def watched(stack: CudaStack, *args: Any) -> torch.Tensor:
        first = len(launches)
        with recorded:
            result = run(stack, *args)
        per_step.append(len(launches) - first)
        return result

    monkeypatch.setattr(CudaStack, "run", watched)
    backend = CudaBackend(torch.bfloat16, CPU, allow_batch_variance=is_variant)
    runner = LoadedModel(tmp_path, backend, quantization=quantization).make_runner(16)
    for count in (3, 70):
        runner.run(singles(count))
    assert recorded.seen <= MEMORY | (VENDORS[quantization] | {"aten.numpy_T.default"} if is_variant else set())
    assert recorded.seen & VENDORS[quantization] or not is_variant, "70 rows are multiplied by the vendor's"
    assert per_step[0] == 2 * (9 if quantization == "none" else 11), (
        "launches a layer, as docs/understand/gpu.md counts them"
    )


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_a_mixtures_layers_are_recorded_like_others(
    quantization: str, tmp_path: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of launches does not depend on the number of experts, and nothing asks how many rows one gets."""
    config = Qwen2MoeConfig(
        **SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24
    )
    reference_model("qwen2-moe", tmp_path, config=config)
    recorded, run = Operations(), CudaStack.run

    def watched(stack: CudaStack, *args: Any) -> torch.Tensor:
        launches.clear()
        with recorded:
            return run(stack, *args)

    monkeypatch.setattr(CudaStack, "run", watched)
    LoadedModel(tmp_path, CudaBackend(torch.bfloat16, CPU), quantization=quantization).make_runner(16).run(singles(3))
    # a router's weights are a sum of matrices, and so are its scores
    assert recorded.seen <= MEMORY | {"aten.chunk.default", "aten.add.Tensor"}
    is_plain = quantization == "none"
    assert len(launches) == SIZES["num_hidden_layers"] * (17 if is_plain else 22)
    assert {"choose_experts", "group_pairs", "multiply_experts", "add_experts"} <= set(launches)


def test_nothing_of_a_step_waits_for_the_device(tmp_path: Path, launches: list[str]) -> None:
    """Before its candidates are read: it is prepared on tokens that the device has drawn, its
    logits are edited, and searched.
    """
    reference_model("llama", tmp_path, config=LlamaConfig(**SIZES))
    backend = CudaBackend(torch.bfloat16, CPU)
    runner = LoadedModel(tmp_path, backend).make_runner(16)
    for lens in ([1] * 9, [1, 1, 40]):
        rows = [
            BatchRow(handle, (5,) * (length - 1) + (5 if handle else PENDING,), 0, (0, 1, 2), range(length - 1, length))
            for handle, length in enumerate(lens)
        ]
        batch = ScheduledBatch(tuple(rows), lens.count(1))
        sequences = [
            Sequence(
                Request(row.handle, "", DRAWS[row.handle % len(DRAWS)], eos_token_ids=(1,)),
                Tokens([5, *row.token_ids], 1),
            )
            for row in rows
        ]
        with Operations() as asked:
            hidden = runner.run(batch, DrawnTokens(torch.tensor([7, 8]), {batch.rows[0].key(lens[0] - 1): 1}))
            begin_reduction(
                runner.logits(batch, hidden), [sequence.prefix() for sequence in sequences], backend.row_search
            )
        assert asked.seen and not [name for name in asked.seen if any(each in name for each in READS)]
        assert {"rotate_and_write", "attend", "multiply", "largest_logits", "sum_masses", "draw_tokens"} <= set(
            launches
        )


@pytest.mark.usefixtures("launches")
def test_memory_is_set_aside_for_all_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the largest a device has 1,000 bytes less, after six more nothing less, for the driver
    takes memory by chunks: for each of the other 21 a sixth of one. There are eleven sizes, each
    with holes and without. The model's layers rotate in two ways."""
    ropes = {"rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE}}
    more = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    reference_model("gemma3", tmp_path, config=Gemma3TextConfig(**SIZES | more, **ropes))
    backend, steps = CudaBackend(torch.bfloat16, CPU), list[LargestStep]()
    monkeypatch.setattr(backend, "workspace", steps.append)
    LoadedModel(tmp_path, backend).model.workspace(64, 8, 64)
    left = iter((9000, *[8000] * 7))
    assert backend._recording_bytes(steps[0], lambda: next(left)) == 1000 + 21 * (2 << 20) // 6
