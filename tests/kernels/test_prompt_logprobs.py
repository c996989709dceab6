"""The logprobs of a prompt: as transformers has them, and the same bits alone, in chunks, in a
batch, after a preemption, and beside a prefix cache.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.compute.backends.backend import RowSearch
from services.compute.candidates.prompt_logprobs import NOT_FINITE, prompt_logprobs, score_prompts, score_rows
from services.compute.execution import model_runner
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.files import DEMO_MODEL
from shared.model.sampling_params import SamplingParams
from shared.wire.logprobs import PromptLogprobs
from shared.wire.messages import RequestError
from tests.kernels.families import SIZES, Engine, reference_model

LENGTHS = (1, 2, 15, 16, 17, 33, 90, 64, 65, 100)


def random_prompts() -> list[list[int]]:
    """Some of them with a beginning in common."""
    generator = torch.Generator().manual_seed(5)
    some = [torch.randint(2, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]
    return [*some, some[9][:70] + some[6][:20], some[9][:50], some[9]]


def bits(found: PromptLogprobs | None) -> list[bytes]:
    """Everything in it, exactly."""
    assert found is not None
    return [
        each.tobytes()
        for each in (found.token_ids, found.logprobs, found.ranks, found.top_token_ids, found.top_logprobs)
    ]


# One without and one with a window, experts, tied heads, a cap and a multiplier of logits: what
# comes before logits is of test_models.py.
@pytest.mark.parametrize("name", ["llama2", "mistral-window", "qwen3-moe", "qwen2", "gemma2", "granite", "demo"])
def test_they_are_log_softmax_of_transformers_logits(name: str, tmp_path: Path) -> None:
    reference = reference_model(name, tmp_path)
    prompts = random_prompts()
    engine = Engine(DEMO_MODEL if name == "demo" else tmp_path, max_batched_tokens=70)
    engine.generate(prompts, 2, prompt_logprobs=5)
    for number, prompt in enumerate(prompts):
        found = engine.prompts[number]
        assert found is not None and found.token_ids.tolist() == prompt
        if len(prompt) == 1:
            assert found.num_top == len(found.logprobs) == 0
            continue
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(dim=-1)
        rows, targets = torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])
        torch.testing.assert_close(torch.from_numpy(found.logprobs), expected[rows, targets], atol=1e-4, rtol=1e-4)
        top, top_ids = expected.topk(5, dim=-1)
        torch.testing.assert_close(torch.from_numpy(found.top_logprobs.reshape(-1, 5)), top, atol=1e-4, rtol=1e-4)
        clear = (top[:, :-1] - top[:, 1:]).amin(dim=1) > 1e-3  # no two are so near that rounding decides
        assert clear.any()
        assert found.top_token_ids.reshape(-1, 5)[clear.numpy()].tolist() == top_ids[clear].tolist()
        own = expected[rows, targets]
        near = ((expected - own[:, None]).abs() < 1e-3).sum(dim=1) > 1
        ranks = 1 + (expected > own[:, None]).sum(dim=1)
        assert found.ranks[~near.numpy()].tolist() == ranks[~near].tolist()


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("name", "quantization", "kv_group"), [("mistral-window", "none", 0), ("qwen3", "w4", 0), ("demo", "w8a8", 32)]
)
def test_they_are_the_same_bits_in_any_company(
    name: str, quantization: str, kv_group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference_model(name, tmp_path)
    folder = DEMO_MODEL if name == "demo" else tmp_path
    prompts = random_prompts()
    loaded = Engine(folder, dtype=torch.bfloat16, quantization=quantization)

    def run(some: list[list[int]], num_out: int = 3, num_top: int = 4, **options: Any) -> list[list[bytes]]:
        made = Engine(loaded, dtype=torch.bfloat16, kv_group=kv_group, **options)
        made.generate(some, num_out, prompt_logprobs=num_top)
        assert made.num_scored == sum(len(prompt) - 1 for prompt in some), "each row once, also of who was preempted"
        return [bits(made.prompts[number]) for number in range(len(some))]

    alone = [run([prompt])[0] for prompt in prompts]
    assert run(prompts) == alone
    for options in (
        {"max_batched_tokens": 13},
        {"max_batched_tokens": 50, "block_size": 32, "max_num_seqs": 4},
        {"num_blocks": 18, "strategy": "paged"},
    ):
        assert run(prompts, **options) == alone, options
    for chunk in (1, 32, 64, 100):
        assert run([prompts[9]], max_batched_tokens=chunk) == [alone[9]]
    monkeypatch.setattr(model_runner, "PROMPT_ROWS", 7)
    assert run(prompts) == alone, "in other slices"
    fewer = run([prompts[9]], num_top=0)[0]
    assert fewer[:3] == alone[9][:3] and fewer[3:] == [b"", b""]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("is_cached", [False, True])
def test_who_is_preempted_within_its_prompt_goes_on_where_it_was(is_cached: bool) -> None:
    """Its blocks are gone, its logprobs are not; and what it finds in the prefix cache it skips as
    far as those reach.
    """
    prompt = random_prompts()[9]
    alone = Engine(DEMO_MODEL, dtype=torch.bfloat16)
    alone.generate([prompt], 2, prompt_logprobs=3)
    engine = Engine(DEMO_MODEL, dtype=torch.bfloat16, max_num_seqs=2, max_batched_tokens=40)
    engine.scheduler.block_manager.prefix_caching = is_cached
    sequence = Sequence(Request(1, "1", SamplingParams(max_tokens=2, prompt_logprobs=3)), Tokens(list(prompt)))
    engine.scheduler.add(sequence)
    starts: list[int] = []
    targets: list[int] = []
    while sequence.kv.num_computed < len(prompt):
        batch = engine.scheduler.schedule()
        assert batch is not None
        starts.append(batch.rows[0].num_computed_tokens)
        targets += batch.rows[0].target_ids
        hidden = engine.runner.run(batch)
        assert (
            score_prompts(engine.runner.prompt_logits(batch, hidden), batch, engine.scheduler.get, engine.row_search)
            == {}
        )
        if len(starts) == 2:
            engine.scheduler.max_num_seqs = 1
            intruder = Sequence(
                Request(2, "2", SamplingParams(max_tokens=1), tenant_id="another", priority=-1), Tokens([9] * 20, 20)
            )
            sequence.rank = intruder.request.arrived_at + 1
            engine.scheduler.add(intruder)
            assert engine.scheduler.schedule() is not None and sequence.kv.num_computed == 0
            engine.scheduler.finish(intruder)
    assert starts == ([0, 40, 80] if is_cached else [0, 40, 0, 40, 80])
    assert targets == prompt[1:], "each once"
    assert bits(prompt_logprobs(sequence)) == bits(alone.prompts[0])


@pytest.mark.usefixtures("instruction_set")
def test_a_cached_prompt_is_computed_again_for_its_logprobs_and_serves_others() -> None:
    prompt = random_prompts()[9]
    engine = Engine(DEMO_MODEL, dtype=torch.bfloat16)
    engine.generate([prompt], 2)
    engine.generate([prompt], 2, prompt_logprobs=2)
    assert engine.scheduler.prefixes.num_hits == 0
    first = bits(engine.prompts[0])
    engine.generate([prompt], 2, prompt_logprobs=2)
    assert bits(engine.prompts[0]) == first and engine.num_scored == 2 * (len(prompt) - 1)
    engine.generate([prompt], 2)
    assert engine.scheduler.prefixes.num_hits == len(prompt) - 1


@pytest.mark.usefixtures("instruction_set")
def test_choices_of_one_prompt_have_it_computed_once() -> None:
    prompt = random_prompts()[9]
    engine = Engine(DEMO_MODEL, dtype=torch.bfloat16, max_batched_tokens=33)
    engine.generate([prompt] * 4, 5, group_id="choices", prompt_logprobs=2)
    assert engine.num_scored == len(prompt) - 1
    assert len({tuple(bits(engine.prompts[number])) for number in range(4)}) == 1
    cramped = Engine(DEMO_MODEL, dtype=torch.bfloat16, num_blocks=9, strategy="paged")
    cramped.generate([prompt] * 4, 5, group_id="choices", prompt_logprobs=2)
    assert all(bits(cramped.prompts[number]) == bits(engine.prompts[0]) for number in range(4))


def test_a_token_has_the_same_logprob_as_an_answer_and_as_a_prompt() -> None:
    """Decoded one by one, and in a chunk."""
    prompt = random_prompts()[5]
    engine = Engine(DEMO_MODEL, dtype=torch.bfloat16)
    [tokens] = engine.generate([prompt], 12)
    logits = torch.stack(engine.logits[0])
    decoded = score_rows(logits, np.array(tokens), 2, engine.row_search)
    engine.generate([prompt + tokens], 1, prompt_logprobs=2)
    found = engine.prompts[0]
    assert found is not None
    assert found.logprobs[-12:].tobytes() == decoded.logprobs.tobytes()
    assert found.top_token_ids[-24:].tolist() == decoded.top_token_ids.ravel().tolist()


def test_ties_and_minus_infinity(search: RowSearch) -> None:
    logits = torch.full((2, 200), -torch.inf)
    logits[:, 10:14] = 1.0
    logits[1, 12] = 2.0
    found = score_rows(logits, np.array([13, 0]), 3, search)
    assert found.ranks.tolist() == [1, 5]
    assert found.logprobs[0] == pytest.approx(-np.log(4)) and found.logprobs[1] == -np.inf
    assert found.top_token_ids.tolist() == [[10, 11, 12], [12, 10, 11]]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_prompt_whose_numbers_are_not_finite_fails_alone(wrong: float, search: RowSearch) -> None:
    sequences = {
        handle: Sequence(
            Request(handle, str(handle), SamplingParams(max_tokens=1, prompt_logprobs=handle)), Tokens([1, 2, 3], 3)
        )
        for handle in (0, 1, 2)
    }
    batch = ScheduledBatch(
        tuple(BatchRow(handle, (1, 2, 3), 0, (0,), range(2, 3), 3, 1, (2, 3)) for handle in sequences), 0
    )
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    logits[3, 100] = wrong
    assert score_prompts([logits[:4], logits[4:]], batch, sequences.__getitem__, search) == {
        1: RequestError(NOT_FINITE)
    }
    for handle, rows in ((0, slice(0, 2)), (2, slice(4, 6))):
        [found] = sequences[handle].scored
        assert found.logprobs == pytest.approx(logits[rows].log_softmax(dim=1)[[0, 1], [2, 3]].numpy(), abs=1e-5)
        assert found.top_token_ids.shape == (2, handle)
