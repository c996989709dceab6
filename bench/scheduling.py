"""What do the merge step, paging, prediction, prefix caching and chunks bring? And what does a step cost the scheduler?

Method: the same trace through the same Scheduler, once with the policy and once without, all
requests there at once unless said otherwise. By simulation at the size of Llama 2 7B (multi-head
attention: 512 KiB of KV a token) and Llama 3 8B (grouped-query: 128 KiB) on an 80 GB A100 by its
roofline; with --real by running a model on this CPU with a KV cache of 512 blocks, where the clock
moves by the measured seconds of each forward pass and reduction, and lengths are divided by
--shorten. Static batching and separate steps are subclasses here: the product has neither.

    python -m bench.scheduling                                   # simulated, a synthetic trace
    python -m bench.scheduling --trace chats.json --real demo    # ShareGPT's lengths, and the demo
    model on this CPU as well
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.new_step import NewStep
from services.compute.scheduling.offline import run_step
from services.compute.scheduling.policy import PLAIN, StepPolicy
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from services.simulator.hardware import HARDWARE
from services.simulator.models import MODELS
from services.simulator.roofline import Roofline, Work, kv_tokens
from services.simulator.simulator import ReplayResult, percentiles, replay
from services.simulator.trace import TraceRequest, load_trace, with_rate
from shared.model.files import open_model
from shared.model.sampling_params import SamplingParams
from shared.process.settings import ComputeSettings

StepSeconds = Callable[[ScheduledBatch, Scheduler], float]
BLOCK_SIZE = 16
SHARED, LONG_PROMPT = 1000, 4000  # tokens
REAL_BLOCKS, REAL_LONGEST = 512, 1024  # the KV cache, and what a sequence may take of it: 8 sequences of full length


class SeparateSteps(Scheduler):
    """A step is either prompts or single tokens; prompts first."""

    def schedule(self, policy: StepPolicy = PLAIN) -> ScheduledBatch | None:
        self.policy, step = policy, NewStep()
        behind = [sequence for sequence in self.running.values() if sequence.num_uncomputed_tokens > 1]
        self._admit(step, self._schedule_chunks(step, behind, self.max_batched_tokens))
        if not step.chunks:
            self._schedule_decodes(step)
        copies = self.block_manager.take_copies()
        chosen = [*((sequence, 1) for sequence in step.decodes), *step.chunks]
        rows = tuple(self._advance(sequence, num_tokens) for sequence, num_tokens in chosen)
        return ScheduledBatch(rows, len(step.decodes), copies) if rows else None


class StaticBatching(SeparateSteps):
    """Nobody begins until all that began together have ended."""

    def _admit(self, step: NewStep, budget: int) -> None:
        if all(sequence.tokens.num_output <= 1 for sequence in self.running.values()):
            super()._admit(step, budget)


@dataclass(frozen=True)
class Policy:
    name: str
    scheduler: type[Scheduler] = Scheduler
    admission: str = "predicted"
    max_total_tokens: int | None = 4096  # what each request asks for; None: exactly what it will need


@dataclass(frozen=True)
class Machine:
    """Where the steps run, or would."""

    name: str
    step_seconds: StepSeconds
    num_blocks: int
    longest: int  # tokens
    max_num_seqs: int
    max_batched_tokens: int

    def run(
        self, policy: Policy, requests: list[TraceRequest], *, prefix_caching: bool = False, **limits: float | None
    ) -> ReplayResult:
        blocks = BlockManager(self.num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
        options = {"max_num_seqs": self.max_num_seqs, "max_batched_tokens": self.max_batched_tokens, **limits}
        scheduler = policy.scheduler(blocks, make_admission(policy.admission, blocks), **options)  # type: ignore[arg-type]
        return replay(
            scheduler,
            requests,
            lambda batch: self.step_seconds(batch, scheduler),
            max_total_tokens=policy.max_total_tokens,
        )


def simulated(model: str) -> Machine:
    shape, hardware = MODELS[model], HARDWARE["a100-80g"]
    cost = Roofline(shape, hardware)
    return Machine(
        f"{model}, A100 80 GB, simulated",
        lambda batch, _: cost.seconds(Work.of(batch)),
        kv_tokens(shape, hardware) // 16,
        4096,
        256,
        2048,
    )


def real(model: str) -> tuple[Machine, Machine]:
    """A model on this CPU: with a small KV cache, and with one for prompts as long as the model takes."""
    from services.compute.candidates.reduction import reduce
    from services.compute.loop.engine import build_engine

    settings = ComputeSettings(model=model, kv_cache_share=0.1)
    engine = build_engine(settings, open_model(model, weights=True))
    runner, longest = engine.runner, engine.max_model_len

    def step_seconds(batch: ScheduledBatch, scheduler: Scheduler) -> float:
        started = time.perf_counter()
        logits = runner.forward(batch)
        if sampled := batch.sampled:
            reduce(logits, [scheduler.get(handle) for handle, _ in sampled], engine.runner.row_search)
        return time.perf_counter() - started

    name = f"{Path(model).name}, this CPU, measured"
    small = Machine(name, step_seconds, REAL_BLOCKS, min(longest, REAL_LONGEST), 64, 512)
    return small, replace(small, num_blocks=runner.kv_cache.num_blocks, longest=min(longest, LONG_PROMPT + 512))


def compare_policies(machine: Machine, requests: list[TraceRequest], rounds: int) -> None:
    half, whole = machine.longest // 2, machine.longest
    policies = [
        Policy(f"static, reserve {half}", StaticBatching, "reserve", half),
        Policy(f"separate, reserve {half}", SeparateSteps, "reserve", half),
        Policy(f"merged, reserve {half}", Scheduler, "reserve", half),
        Policy(f"merged, reserve {whole}", Scheduler, "reserve", whole),
        Policy("merged, reserve exact", Scheduler, "reserve", None),
        Policy("separate, predicted", SeparateSteps, "predicted", whole),
        Policy("merged, paged", Scheduler, "paged", whole),
        Policy("merged, predicted", Scheduler, "predicted", whole),
    ]
    requests = [fit(request, half) for request in requests]
    print(f"\n{machine.name}: {len(requests)} requests at once, KV cache of {machine.num_blocks * BLOCK_SIZE:,} tokens")
    print(f"{'':24}{'req/s':>8}{'to first':>10}{'seqs':>6}{'preempted':>11}{'TPOT p50':>10}{'p99, ms':>9}")
    first = 0.0
    for policy in policies:
        results = sorted((machine.run(policy, requests) for _ in range(rounds)), key=lambda result: result.qps)
        result = results[len(results) // 2]
        first = first or result.qps
        tpot = percentiles(each.tpot * 1000 for each in result.timelines)
        seqs = result.num_sequence_steps / result.num_steps
        print(
            f"{policy.name:24}{result.qps:8.2f}{result.qps / first:9.2f}x{seqs:6.0f}{result.num_preemptions:11}{tpot[0]:10.1f}{tpot[2]:9.1f}"  # noqa: E501
        )


def shorten(request: TraceRequest, factor: int) -> TraceRequest:
    return replace(
        request,
        num_prompt_tokens=-(-request.num_prompt_tokens // factor),
        num_output_tokens=-(-request.num_output_tokens // factor),
    )


def fit(request: TraceRequest, longest: int) -> TraceRequest:
    """The request, cut to what the model takes."""
    prompt = min(request.num_prompt_tokens, longest // 2)
    return replace(
        request, num_prompt_tokens=prompt, num_output_tokens=min(request.num_output_tokens, longest - prompt)
    )


def compare_prefix_caching(
    machine: Machine, requests: list[TraceRequest], rate: float, shared: int, rounds: int
) -> None:
    """A system prompt of `shared` tokens before every question."""
    longest = machine.longest
    short = [fit(request, (longest - shared) // 2) for request in requests]
    with_system = [
        replace(each, num_prompt_tokens=each.num_prompt_tokens + shared, num_shared_tokens=shared) for each in short
    ]
    arriving = with_rate(with_system, rate)
    print(f"\n{machine.name}: a shared system prompt of {shared} tokens, {rate:g} requests/s")
    for name, caching in (("without", False), ("with", True)):
        medians = [
            percentiles(
                t.ttft * 1000
                for t in machine.run(Policy("", max_total_tokens=longest), arriving, prefix_caching=caching).timelines
            )
            for _ in range(rounds)
        ]
        ttft = [statistics.median(values) for values in zip(*medians, strict=True)]
        print(f"{name:>8} prefix caching: TTFT p50 {ttft[0]:7.1f} ms, p90 {ttft[1]:7.1f}, p99 {ttft[2]:7.1f}")


def compare_chunks(machine: Machine, long_prompt: int, streams: int, rounds: int) -> None:
    """Streams that run; long prompts arrive, one after another. The streams' time between tokens."""
    output = min(400, machine.longest - 64)
    alone = [TraceRequest(32, output) for _ in range(streams)]
    quiet = machine.run(Policy("", max_total_tokens=None), alone)
    usual_ms, length = quiet.itl(50) * 1000, quiet.seconds
    prompts = [TraceRequest(long_prompt, 2, length * at) for at in (0.2, 0.35, 0.5, 0.65)]
    print(
        f"\n{machine.name}: {streams} streams of {usual_ms:.1f} ms a token, four prompts of {long_prompt} tokens arrive"
    )
    whole = max(long_prompt, machine.max_batched_tokens) + streams
    cases: list[tuple[str, dict[str, float | None]]] = [
        ("whole prompts", {"max_batched_tokens": whole}),
        ("chunks of 512", {"max_batched_tokens": 512}),
        ("chunks of 128", {"max_batched_tokens": 128 + streams}),
        (f"target {2 * usual_ms:.1f} ms", {"max_batched_tokens": whole, "target_itl_s": 2 * usual_ms / 1000}),
    ]
    for name, limits in cases:
        worst, p99, ttft = [], [], []
        for _ in range(rounds):
            result = machine.run(Policy("", max_total_tokens=None), alone + prompts, **limits)  # type: ignore[arg-type]
            worst.append(result.itl(100) * 1000)
            p99.append(result.itl(99) * 1000)
            ttft.append(
                max(each.ttft for each in result.timelines if each.request.num_prompt_tokens == long_prompt) * 1000
            )
        itl = f"ITL p99 {statistics.median(p99):7.1f} ms, worst {statistics.median(worst):7.1f}"
        print(f"{name:>16}: {itl}; TTFT of the last long prompt {statistics.median(ttft):7.0f}")


def measure_overhead() -> None:
    """Decoding sequences, and a queue of as many behind them that does not fit."""
    print("\nthe scheduler alone: schedule and append; median of steps")
    print(f"{'running':>8}{'decoding only':>16}{'with 1 arrival and 1 end a step':>34}")
    for running in (32, 256, 512, 1024, 2048):
        steady = step_microseconds(running, churn=False)
        churned = step_microseconds(running, churn=True)
        print(f"{running:8}{steady:13.0f} us{churned:31.0f} us")


def step_microseconds(running: int, *, churn: bool) -> float:
    blocks = BlockManager(running * 80, BLOCK_SIZE)
    scheduler = Scheduler(
        blocks, make_admission("predicted", blocks), max_num_seqs=running, max_batched_tokens=running + 2048
    )
    params = SamplingParams(max_tokens=1000)
    for number in range(running + 400):
        scheduler.add(
            Sequence(Request(number, str(number), params, arrived_at=float(number)), Tokens([number] * 100, 100))
        )
    seconds = []
    for _ in range(300):
        started = time.perf_counter()
        batch = run_step(scheduler, lambda _, sampled: [0] * len(sampled), is_over=lambda _: False)
        assert batch is not None
        if churn and len(scheduler.running) == running:
            scheduler.finish(next(iter(scheduler.running.values())), is_complete=True)
        if len(batch.sampled) >= running - 1:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="The scheduler's policies against each other, and its overhead.")
    parser.add_argument(
        "--trace",
        default="synthetic",
        help="synthetic, or a file of requests as for penstock simulate (default: %(default)s)",
    )
    parser.add_argument("--num-requests", type=int, help="default: all of a file, 1000 synthetic ones; 128 really")
    parser.add_argument("--real", metavar="MODEL", help="also run a model on this CPU, some minutes: demo, or a folder")
    parser.add_argument(
        "--shorten", type=int, default=1, help="divide the lengths of what really runs (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="runs of each real case; their median counts (default: %(default)s)",
    )
    args = parser.parse_args()
    requests = load_trace(args.trace, args.num_requests)
    for model in ("llama-2-7b", "llama-3-8b"):
        machine = simulated(model)
        compare_policies(machine, requests, 1)
        compare_prefix_caching(machine, requests, 6.0, SHARED, 1)
        compare_chunks(machine, LONG_PROMPT, 32, 1)
    if args.real:
        machine, long = real(args.real)
        some = [shorten(request, args.shorten) for request in requests[: args.num_requests or 128]]
        compare_policies(machine, some, args.rounds)
        compare_prefix_caching(long, some[:40], 0.5, min(SHARED, long.longest // 2), args.rounds)
        compare_chunks(long, min(LONG_PROMPT, long.longest - 124), 8, args.rounds)
    measure_overhead()


if __name__ == "__main__":
    main()
