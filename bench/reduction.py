"""What does candidate reduction cost, and what share of a step is it? Batch 32, vocabulary 151,936.

Method: `reduce` for four kinds of requests, on logits like a trained model's (token probabilities
by Zipf's law with exponent 1.5), on broad ones (normal, spread 3) and on flat ones, as of random
weights (spread 0.3); the median of --rounds. The step is a forward pass of 32 sequences with 128
tokens each of a made model of shape qwen2.5-0.5b, in bfloat16, measured in turns with the
reductions. The floor is reading the logits once, 19.4 MB.

    python -m bench.reduction [--model FOLDER]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.model_folder import model_folder
from services.compute.candidates.reduction import reduce
from services.compute.loop.engine import Engine, build_engine
from services.compute.scheduling.offline import run_step
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from shared.model.files import open_model
from shared.model.sampling_params import SamplingParams
from shared.process.settings import ComputeSettings

BATCH, VOCABULARY = 32, 151_936
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "plain, T = 1": SamplingParams(temperature=1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Candidate reduction's cost, and its share of a step.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", type=Path, help="a folder made by make-model; by default one is made")
    args = parser.parse_args()
    with model_folder(args.model, "qwen2.5-0.5b") as model:
        engine = make_engine(model)
        step = make_step(engine)
        cases: dict[str, Callable[[], object]] = {"step": step}
        for name, logits in make_logits().items():
            for kind, params in KINDS.items():
                sequences = [Sequence(Request(handle, "r", params), Tokens([1, 2], 1)) for handle in range(BATCH)]
                cases[f"{kind}, {name}"] = partial(reduce, logits, sequences, engine.runner.row_search)
        cases["reading the logits once"] = lambda: logits.max()
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(args.rounds):
            for name, case in cases.items():
                seconds[name].append(timed(case))
    step_ms = statistics.median(seconds.pop("step")) * 1000
    print(f"a step of {BATCH} sequences: {step_ms:.1f} ms")
    for name, values in seconds.items():
        ms = statistics.median(values) * 1000
        print(f"{name:26}{ms:8.2f} ms {ms / (step_ms + ms):7.1%} of the step")


def make_logits() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(BATCH)]) + 1
    normal = torch.randn(BATCH, VOCABULARY, generator=generator)
    return {"trained": -1.5 * ranks.log(), "broad": normal * 3.0, "flat": normal * 0.3}


def make_engine(model: Path) -> Engine:
    settings = ComputeSettings(
        model=str(model), dtype="bfloat16", kv_cache_memory="512MiB", max_batched_tokens=BATCH * 128
    )
    return build_engine(settings, open_model(str(model), weights=True))


def make_step(engine: Engine) -> Callable[[], object]:
    """A decode step of BATCH sequences with 128 tokens each."""
    for number in range(BATCH):
        engine.scheduler.add(
            Sequence(Request(number, str(number), SamplingParams(max_tokens=20)), Tokens([number] * 127, 127))
        )

    def prefill(batch: ScheduledBatch, sampled: list[Sequence]) -> list[int]:
        engine.runner.forward(batch)
        return [1] * len(sampled)

    run_step(engine.scheduler, prefill)
    decode = engine.scheduler.schedule()
    assert decode is not None and decode.num_decodes == BATCH == len(decode.rows)
    return lambda: engine.runner.forward(decode)


def timed(case: Callable[[], object]) -> float:
    started = time.perf_counter()
    case()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
