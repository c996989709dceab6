"""The simulator: traces, costs, and that a replay accounts for every token."""

import json
from pathlib import Path

import numpy as np
import pytest

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import STRATEGIES, OutputLengths, make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.scheduling.step_cost import StepCost, StepCostFit
from services.operator.cli import main
from services.simulator.hardware import HARDWARE
from services.simulator.models import MODELS, find_model
from services.simulator.roofline import Roofline, Work, kv_tokens
from services.simulator.simulator import replay
from services.simulator.trace import TraceRequest, load_trace, with_rate
from shared.model.files import DEMO_MODEL
from shared.process.errors import StartupError


def test_synthetic_requests_are_like_chat_turns() -> None:
    requests = load_trace("synthetic", 20_000)
    prompts = np.array([request.num_prompt_tokens for request in requests])
    answers = np.array([request.num_output_tokens for request in requests])
    assert 90 < prompts.mean() < 115 and 25 < np.median(prompts) < 50
    assert 290 < answers.mean() < 330 and 230 < np.median(answers) < 300
    assert load_trace("synthetic", 50) == load_trace("synthetic", 50) != load_trace("synthetic", 50, seed=1)


def test_files_of_requests(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a" * 41}, {"from": "gpt", "value": "b" * 400}]
    (tmp_path / "chats.json").write_text(json.dumps([{"id": "x", "conversations": turns}]))
    [request] = load_trace(str(tmp_path / "chats.json"), None)
    assert (request.num_prompt_tokens, request.num_output_tokens) == (10, 100)
    (tmp_path / "log.jsonl").write_text(
        '{"prompt_tokens": 5, "output_tokens": 7, "arrived_at": 2.5}\n{"prompt_tokens": 1, "output_tokens": 2}\n'
    )
    assert [request.arrived_at for request in load_trace(str(tmp_path / "log.jsonl"), 4)] == [2.5, 0.0, 5.0, 2.5]
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    (tmp_path / "azure.csv").write_text(
        head + "2023-11-16 18:59:59.9799600,374,44\n2023-11-16 19:00:01.2299600,396,109\n"
    )
    assert load_trace(str(tmp_path / "azure.csv"), None) == [TraceRequest(374, 44, 0.0), TraceRequest(396, 109, 1.25)]
    (tmp_path / "bad.json").write_text('[{"id": 1}]')
    (tmp_path / "bad.csv").write_text(head + "2023-11-16 18:59:59.9799600,374\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "unordered.csv").write_text(head + "2023-11-16 18:59:59,3,4\n2023-11-16 18:59:58,3,4\n")
    for name in ("bad.json", "missing.json", "bad.csv", "other.csv", "unordered.csv"):
        with pytest.raises(StartupError, match="--trace"):
            load_trace(str(tmp_path / name), None)


def test_a_step_costs_its_bytes_or_its_operations() -> None:
    """Llama 2 7B on an A100: 13.2 GB of weights that are read, at 1.63 TB/s; 13.0 GFLOP a token in
    the layers, at 187 TFLOP/s.
    """
    cost = Roofline(MODELS["llama-2-7b"], HARDWARE["a100-80g"])
    one = cost.seconds(Work(1, 0, 0, 1))
    assert one == pytest.approx(13.21e9 / 1.632e12 + 1.5e-3, rel=1e-3)
    assert cost.seconds(Work(1, 1000, 1000, 1)) - one == pytest.approx(1000 * 524288 / 1.632e12, rel=1e-6)
    head_s = 2 * 32_000 * 4096 / 1.632e12
    assert cost.seconds(Work(4096, 0, 0, 1)) == pytest.approx(4096 * 12.95e9 / 187.2e12 + head_s + 1.5e-3, rel=1e-3)
    pairs_s = 4 * 32 * 4096 / 187.2e12
    assert cost.seconds(Work(4096, 4096, 4096 * 2048, 1)) - cost.seconds(Work(4096, 0, 0, 1)) == pytest.approx(
        4096 * 2048 * pairs_s, rel=1e-3
    )
    assert kv_tokens(MODELS["llama-2-7b"], HARDWARE["a100-80g"]) == pytest.approx(113_906, rel=1e-3)
    assert find_model(str(DEMO_MODEL)).kv_values == 2 * 4 * 2 * 64


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replay_accounts_for_every_token(strategy: str) -> None:
    requests = with_rate(load_trace("synthetic", 150), 40.0)
    blocks = BlockManager(700, 16, prefix_caching=False)
    scheduler = Scheduler(blocks, make_admission(strategy, blocks), max_num_seqs=64, max_batched_tokens=512)
    cost = StepCost(0.005, 1e-5, 1e-7)
    computed = 0

    def step_seconds(batch: object) -> float:
        nonlocal computed
        computed += batch.num_tokens  # type: ignore[attr-defined]
        return cost.seconds(batch.num_tokens, batch.num_context_tokens)  # type: ignore[attr-defined]

    result = replay(scheduler, requests, step_seconds, max_total_tokens=4096)
    needed = sum(request.num_prompt_tokens + request.num_output_tokens - 1 for request in requests)
    assert computed >= needed and (computed == needed) == (result.num_preemptions == 0)
    assert result.num_sequence_steps == sum(request.num_output_tokens for request in requests)
    assert all(
        each.ttft > 0 and each.request.arrived_at < each.first_at <= each.last_at <= result.seconds
        for each in result.timelines
    )
    gaps = len(result.gaps) + sum(count for _, count in result.steps)
    assert gaps == sum(request.num_output_tokens - 1 for request in requests)
    assert result.itl(50) <= result.itl(99)
    fitted = scheduler.step_cost.cost
    assert fitted is not None
    assert (fitted.fixed_s, fitted.per_token_s, fitted.per_context_token_s) == pytest.approx(
        (0.005, 1e-5, 1e-7), rel=1e-3
    )


def test_a_noisy_step_cost_is_found_and_never_negative() -> None:
    rng = np.random.default_rng(0)
    fit = StepCostFit()
    for _ in range(600):
        tokens, context = int(rng.integers(1, 300)), int(rng.integers(1, 20_000))
        fit.observe(tokens, context, (0.02 + 2e-4 * tokens) * float(rng.lognormal(0, 0.1)))
    assert fit.cost is not None
    assert fit.cost.fixed_s == pytest.approx(0.02, rel=0.15) and fit.cost.per_token_s == pytest.approx(2e-4, rel=0.15)
    assert 0 <= fit.cost.per_context_token_s < 1e-7
    assert fit.cost.tokens_within(0.04, 0) == pytest.approx(100, rel=0.3)


def test_answers_that_still_run_count_as_longer() -> None:
    """Five answers by hand: two end, at 2 and at 4; one is out of sight from 3 on, two from 6. Two
    imagined ones end at 1 in 512 a token.
    """
    lengths = OutputLengths()
    assert lengths.survival(np.array([0, 512])) == pytest.approx([1.0, np.exp(-1)])
    lengths.add(2, ended_by_itself=True)
    lengths.add(4, ended_by_itself=True)
    lengths.add(3, ended_by_itself=False)
    lengths.estimate([6, 6])
    usual = 2 / 512
    hazards = np.array([usual / 7, usual / 7, (1 + usual) / 7, usual / 6, (1 + usual) / 5, usual / 4, usual / 4])
    expected = np.cumprod(1 - hazards)
    assert lengths.survival(np.arange(7)) == pytest.approx(expected)
    assert lengths.survival(np.array([6 + 1024])) == pytest.approx(expected[-1:] * np.exp(-2))


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", "--num-requests", "200", "--rate", "10"]) == 0
    printed = capsys.readouterr().out
    assert "requests/s" in printed and "TPOT, ms" in printed and "0 preemptions" in printed
    (tmp_path / "mine.json").write_text(
        json.dumps({"fixed_s": 0.01, "per_token_s": 1e-4, "per_context_token_s": 1e-7, "kv_tokens": 50_000})
    )
    assert (
        main(
            ["simulate", "--num-requests", "20", "--hardware", str(tmp_path / "mine.json"), "--model", str(DEMO_MODEL)]
        )
        == 0
    )
    (tmp_path / "free.json").write_text(
        json.dumps({"fixed_s": 0, "per_token_s": 0, "per_context_token_s": 0, "kv_tokens": 50_000})
    )
    (tmp_path / "empty.jsonl").write_text('{"prompt_tokens": 0, "output_tokens": 7}\n')
    for bad in (
        ["--hardware", "abacus"],
        ["--hardware", str(tmp_path / "free.json")],
        ["--model", "gpt-9"],
        ["--model", "llama-3-70b"],
        ["--max-total-tokens", "100"],
        ["--trace", str(tmp_path / "empty.jsonl")],
    ):
        assert main(["simulate", *bad]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"penstock: {bad[0]}")
    for flag, value in (("--rate", "0"), ("--seed", "-1")):
        with pytest.raises(SystemExit):
            main(["simulate", flag, value])
        assert capsys.readouterr().err.startswith(f"penstock: {flag}: {value!r} is not a ")
