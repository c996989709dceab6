"""How far is `penstock simulate` from the machine that it runs on?

Method: the same requests go through the same Scheduler with a clock that moves by what each step
takes. It is measured (each forward pass and reduction
of a real model on this CPU), or simulated twice: by the roofline of this machine, whose data sheet
is what plain reading and a loop of dot products
reach in the same round (bench.budget), with the shares of `penstock simulate`; and by the cost that
the scheduler learned from the measured steps, as
--hardware takes it from a server's /metrics. Steps of one kind alone are compared first. Nothing
else runs: no pipeline, no Redis. Each round measures
all of it; the table has the medians of the rounds, and of the simulated figures over the measured ones.

    python -m bench.simulated --shape smollm2-135m --quantization w8a8 --rounds 3
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.budget import ceilings
from bench.model import read_bandwidth
from bench.model_folder import model_folder
from services.compute.cache.block_manager import BlockManager
from services.compute.candidates.reduction import reduce
from services.compute.loop.engine import Engine, build_engine
from services.compute.models.decoder import Decoder
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence.batch import ScheduledBatch
from services.simulator.hardware import PRECISIONS, Hardware
from services.simulator.machine import Cost, MeasuredCost
from services.simulator.models import find_model
from services.simulator.roofline import Roofline, Work
from services.simulator.simulator import ReplayResult, percentiles, replay
from services.simulator.trace import TraceRequest, load_trace
from shared.model.files import open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings

BLOCK_SIZE, LONGEST = 16, 1024
NUM_STEPS = 12  # of each kind
FIGURES = ("requests/s", "TTFT p50, s", "TPOT p50, ms", "TPOT p99, ms")
KINDS = {
    "1 x 256": (256, 1),
    "16 x 128": (128, 16),
    "16 x 512": (512, 16),
    "prefill of 512": (512, 0),
}  # tokens of context, sequences that decode; 0: a prompt


@dataclass(frozen=True)
class Sizes:
    num_requests: int
    max_num_seqs: int
    max_batched_tokens: int
    num_blocks: int


def step_of(engine: Engine) -> Callable[[ScheduledBatch, Scheduler], float]:
    def seconds(batch: ScheduledBatch, scheduler: Scheduler) -> float:
        started = time.perf_counter()
        logits = engine.runner.forward(batch)
        if sampled := batch.sampled:
            reduce(logits, [scheduler.get(handle) for handle, _ in sampled], engine.runner.row_search)
        return time.perf_counter() - started

    return seconds


def run(
    requests: list[TraceRequest], sizes: Sizes, step_seconds: Callable[[ScheduledBatch, Scheduler], float]
) -> tuple[ReplayResult, Scheduler]:
    blocks = BlockManager(sizes.num_blocks, BLOCK_SIZE, prefix_caching=False)
    admission = make_admission("predicted", blocks)
    scheduler = Scheduler(
        blocks, admission, max_num_seqs=sizes.max_num_seqs, max_batched_tokens=sizes.max_batched_tokens
    )
    return replay(
        scheduler, requests, lambda batch: step_seconds(batch, scheduler), max_total_tokens=LONGEST
    ), scheduler


def by(cost: Cost) -> Callable[[ScheduledBatch, Scheduler], float]:
    return lambda batch, _: cost.seconds(Work.of(batch))


def figures(result: ReplayResult) -> tuple[float, ...]:
    tpot = percentiles(each.tpot * 1000 for each in result.timelines)
    return result.qps, percentiles(each.ttft for each in result.timelines)[0], tpot[0], tpot[2]


def kind_seconds(kind: str, sizes: Sizes, step_seconds: Callable[[ScheduledBatch, Scheduler], float]) -> float:
    """The median of steps of one kind: decodes in which all sequences take part, or a whole prompt."""
    context, count = KINDS[kind]
    found: list[float] = []

    def measured(batch: ScheduledBatch, scheduler: Scheduler) -> float:
        seconds = step_seconds(batch, scheduler)
        if batch.num_decodes == len(batch.rows) == count or (not count and batch.num_tokens == context):
            found.append(seconds)
        return seconds

    num_output = (
        NUM_STEPS + 2 + count * context // (sizes.max_batched_tokens // 2)
    )  # the first ones still run when the last one begins
    requests = [TraceRequest(context, num_output)] * count if count else [TraceRequest(context, 1)] * NUM_STEPS
    run(requests, replace(sizes, max_num_seqs=count or 1), measured)
    return statistics.median(found)


def this_machine(bandwidth: float, rates: dict[str, float]) -> Hardware:
    """A data sheet of what this machine reaches in the best case. A step has no host beside it here."""
    if "bf16" not in rates or "int8" not in rates:
        raise SystemExit("bench.simulated needs a compiler, and a CPU with AVX-512 for int8 and bf16")
    return Hardware(0.0, bandwidth, rates["bf16"], rates["int8"], host_s=0.0, launch_s=0.0)


def compare(model: Path, quantization: str, requests: list[TraceRequest], sizes: Sizes, rounds: int) -> None:
    settings = ComputeSettings(
        model=str(model),
        dtype="bfloat16",
        quantization=quantization,
        prefix_caching=False,
        max_batched_tokens=max(sizes.max_batched_tokens, 512),
        kv_cache_memory="1GiB",
    )
    try:
        engine = build_engine(settings, open_model(str(model), weights=True))
    except StartupError as error:
        raise SystemExit(str(error)) from None
    decoder = engine.runner.model
    if not isinstance(decoder, Decoder) or decoder.stack is None:
        raise SystemExit(
            "this model's layers are not native ones, or have experts: penstock build-kernels compiles what native "
            "ones need"
        )
    sizes = replace(sizes, num_blocks=min(sizes.num_blocks, engine.runner.kv_cache.num_blocks))
    measured = step_of(engine)
    rows: dict[str, list[tuple[float, ...]]] = {}
    steps: dict[str, list[tuple[float, float]]] = {}
    run(requests[:4], sizes, measured)  # memory is new
    for _ in range(rounds):
        bandwidth, (rates, _) = read_bandwidth(), ceilings()
        roofline = Roofline(find_model(str(model)), this_machine(bandwidth, rates), PRECISIONS[quantization])
        rounded = ", ".join(f"{name} {rate / 1e9:,.0f} GOP/s" for name, rate in rates.items())
        print(f"{torch.get_num_threads()} threads; reading {bandwidth / 1e9:.1f} GB/s; {rounded}", flush=True)
        for kind in KINDS:
            steps.setdefault(kind, []).append(
                (kind_seconds(kind, sizes, measured), kind_seconds(kind, sizes, by(roofline)))
            )
        real, scheduler = run(requests, sizes, measured)
        learned = scheduler.step_cost.cost
        assert learned is not None, "too few steps"
        for name, result in (
            ("measured", real),
            ("simulated, roofline", run(requests, sizes, by(roofline))[0]),
            ("simulated, learned cost", run(requests, sizes, by(MeasuredCost(learned)))[0]),
        ):
            rows.setdefault(name, []).append(figures(result))
    print(f"\n{'a step of':24}{'measured, ms':>14}{'roofline':>10}{'ratio':>8}")
    for kind, pairs in steps.items():
        found, said = (statistics.median(values) * 1000 for values in zip(*pairs, strict=True))
        print(f"{kind:24}{found:14.2f}{said:10.2f}{statistics.median(each / real_s for real_s, each in pairs):8.2f}")
    print(f"\n{'':26}" + "".join(f"{figure:>22}" for figure in FIGURES))
    for name, values in rows.items():
        cells = []
        for number in range(len(FIGURES)):
            ratio = statistics.median(
                each[number] / real_each[number] for each, real_each in zip(values, rows["measured"], strict=True)
            )
            cells.append(f"{statistics.median(each[number] for each in values):.2f} ({ratio:.2f})")
        print(f"{name:26}" + "".join(f"{cell:>22}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description="The simulator against measured steps on this CPU.")
    parser.add_argument("--shape", default="smollm2-135m", help="of a model that is made (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a folder to use instead")
    parser.add_argument("--quantization", choices=("none", "w8a8"), default="w8a8", help="default: %(default)s")
    parser.add_argument(
        "--num-requests", type=int, default=64, help="of the synthetic trace, all there at once (default: %(default)s)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--max-batched-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    args = parser.parse_args()
    if args.max_batched_tokens < 512:
        parser.error(f"--max-batched-tokens: a prompt of 512 is one step here, got {args.max_batched_tokens}")
    requests = [
        replace(
            each,
            num_prompt_tokens=min(each.num_prompt_tokens, LONGEST // 2),
            num_output_tokens=min(each.num_output_tokens, LONGEST // 2),
        )
        for each in load_trace("synthetic", args.num_requests)
    ]
    with model_folder(args.model, args.shape) as model:
        compare(
            model,
            args.quantization,
            requests,
            Sizes(args.num_requests, args.max_num_seqs, args.max_batched_tokens, 64 * LONGEST // BLOCK_SIZE),
            args.rounds,
        )


if __name__ == "__main__":
    main()
