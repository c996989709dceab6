"""How much could a step gain if its batch were split in two, so that the attention of one half runs
while the other is multiplied?

Method: on paper, the bytes and operations of the two kinds of work, for shapes and hardware that
`penstock simulate` knows. One after the other
they take max(bytes / bandwidth, operations / rate) each. At the same time they take no less than
max(all bytes / bandwidth, all operations / rate), with
the weights' bytes twice, because both halves read them. That is an upper bound: nothing waits, and
neither kind of work slows down the other.
With --measure, on this machine's first two cores: the native kernels of one layer, cold, with both
cores on each kernel in turn, against one core on the
attention of a half and the other on the products of the other half. The two take turns; medians of
--rounds, and their ratio.

    python -m bench.nano_batches
    python -m bench.nano_batches --measure --shape qwen2.5-0.5b --cases 64x512 64x2048
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch

from bench.kernels import COPIES_BYTES, LAYERS_BYTES, layers, make_cache
from services.compute.backends.backend import Backend
from services.compute.backends.choose import choose_backend
from services.compute.backends.matrix import Dense
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.modeltools.make_model import SHAPES, Shape
from services.simulator.hardware import BANDWIDTH_SHARE, FLOPS_SHARE, HARDWARE, Hardware
from services.simulator.models import MODELS, DecoderShape

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Step:
    """Sequences that decode at a context, and a prompt's first tokens."""

    num_decodes: int
    context: int
    num_prompt_tokens: int = 0

    @property
    def name(self) -> str:
        names = [f"{self.num_decodes} x {self.context:,}"] * bool(self.num_decodes) + [
            f"a prompt of {self.num_prompt_tokens:,}"
        ] * bool(self.num_prompt_tokens)
        return " and ".join(names)


@dataclass(frozen=True)
class Work:
    num_bytes: float
    operations: float

    def seconds(self, bandwidth: float, rate: float) -> float:
        return max(self.num_bytes / bandwidth, self.operations / rate)


def products(model: DecoderShape, step: Step) -> Work:
    return Work(2.0 * model.num_parameters, 2.0 * model.num_parameters * (step.num_decodes + step.num_prompt_tokens))


def attention(model: DecoderShape, step: Step) -> Work:
    """A prompt's token sees those before it, whose keys and values are read once for all of them."""
    prompt = step.num_prompt_tokens
    pairs = step.num_decodes * step.context + prompt * (prompt + 1) / 2
    return Work(2.0 * model.kv_values * (step.num_decodes * step.context + prompt), model.attention_operations * pairs)


@dataclass(frozen=True)
class Bound:
    """Shares of the step's time as it is, of which attention takes so much."""

    seconds: float
    attention: float
    gain: float  # at most, if the halves overlap
    cost: float  # if they don't: weights are read twice


def bound(model: DecoderShape, step: Step, bandwidth: float, rate: float) -> Bound:
    """bandwidth in bytes/s, rate in operations/s: those that kernels reach."""
    multiply, attend = products(model, step), attention(model, step)
    twice = Work(2 * multiply.num_bytes, multiply.operations)
    both = Work(twice.num_bytes + attend.num_bytes, twice.operations + attend.operations)
    attend_s = attend.seconds(bandwidth, rate)
    now = multiply.seconds(bandwidth, rate) + attend_s
    split = both.seconds(bandwidth, rate)
    return Bound(now, attend_s / now, max(0.0, now / split - 1), (twice.seconds(bandwidth, rate) + attend_s) / now - 1)


# two cores with AVX-512: as measured by bench.budget on one machine, bf16
TWO_CORES = Hardware(16e9, 42e9, 913e9, 1983e9)
LARGE = [
    Step(1, 1024),
    Step(32, 1024),
    Step(128, 1024),
    Step(256, 1024),
    Step(64, 6144),
    Step(192, 1024, 1856),
    Step(0, 0, 2048),
]
SMALL = [
    Step(1, 512),
    Step(8, 512),
    Step(32, 128),
    Step(32, 512),
    Step(64, 128),
    Step(64, 512),
    Step(64, 2048),
    Step(32, 512, 480),
    Step(0, 0, 512),
]


def print_bounds() -> None:
    cases = [("llama-3-8b", name, LARGE) for name in ("a100-80g", "h100-80g", "h200-141g")]
    rates = {name: (BANDWIDTH_SHARE * each.bandwidth, FLOPS_SHARE * each.flops) for name, each in HARDWARE.items()}
    rates["two cores"] = TWO_CORES.bandwidth, TWO_CORES.flops
    for model, hardware, steps in [*cases, ("qwen2.5-0.5b", "two cores", SMALL)]:
        bandwidth, rate = rates[hardware]
        name = f"{model} on {hardware}: {bandwidth / 1e9:,.0f} GB/s, {rate / 1e12:,.1f} TFLOP/s"
        print(f"\n{name}; products are bound by operations from {rate / bandwidth:.0f} rows on")
        print(f"{'step':36}{'ms':>9}{'attention':>11}{'gain, at most':>15}{'cost, no overlap':>18}")
        for step in steps:
            found = bound(MODELS[model], step, bandwidth, rate)
            print(
                f"{step.name:36}{found.seconds * 1000:9.2f}{found.attention:11.0%}{found.gain:15.1%}{found.cost:18.1%}"
            )


def make_products(backend: Backend, shape: Shape, rows: int) -> Callable[[], None]:
    """One layer's products, each time with weights that are not in the caches."""
    sizes = layers(shape)
    del sizes["LM head"]
    sizes["output"] = shape.hidden_size, shape.num_heads * shape.head_dim
    copies = max(2, COPIES_BYTES // sum(2 * n * k for n, k in sizes.values()))
    inputs = {k: torch.randn(rows, k).bfloat16() for _, k in sizes.values()}
    made = [
        [(backend.make_linear(Dense(torch.randn(n, k).bfloat16())), inputs[k]) for n, k in sizes.values()]
        for _ in range(min(8, copies))
    ]
    turns = cycle(made)

    def multiply() -> None:
        for layer, x in next(turns):
            layer(x)

    return multiply


def make_attention(backend: Backend, shape: Shape, sequences: int, context: int) -> Callable[[], None]:
    """One layer's attention of sequences that decode, each time with another cache."""
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    attend, blocks = backend.make_attention(heads), -(-context // BLOCK_SIZE)
    tables = [tuple(range(number * blocks, (number + 1) * blocks)) for number in range(sequences)]
    slots = torch.tensor(
        [table[(context - 1) // BLOCK_SIZE] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE for table in tables]
    )
    angles = torch.zeros(sequences, shape.head_dim // 2)
    plan = attend.plan(
        AttentionInputs([1] * sequences, [context] * sequences, tables, slots, ((angles.cos(), angles.sin()),)),
        BLOCK_SIZE,
    )
    qkv = torch.randn(sequences, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim).bfloat16()
    num_bytes = 4 * sequences * context * shape.num_kv_heads * shape.head_dim
    turns = cycle([make_cache(backend, heads, blocks * sequences, 0) for _ in range(max(2, LAYERS_BYTES // num_bytes))])

    def attend_once() -> None:
        attend(qkv, next(turns), plan, window=None, norms=(None, None), eps=1e-6)

    return attend_once


def on_one_core(work: Callable[[], None], count: int, start: threading.Barrier) -> None:
    """Both kinds of work begin each of their turns together."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        for _ in range(count):
            start.wait()
            work()
    start.wait()


def measure(shape: Shape, sequences: int, context: int, rounds: int) -> tuple[float, float, dict[str, float]]:
    """Return a layer's seconds with both cores on each kernel, and with a core for each kind of work;
    and the seconds of its parts on both cores and on one.
    """
    backend, count = choose_backend(torch.bfloat16, torch.device("cpu")), 20
    whole = {
        "products": make_products(backend, shape, sequences),
        "attention": make_attention(backend, shape, sequences, context),
    }
    half = {
        "products": make_products(backend, shape, sequences // 2),
        "attention": make_attention(backend, shape, sequences // 2, context),
    }
    in_turn, at_once = [], []
    parts: dict[str, list[float]] = {}
    for _ in range(rounds):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, work in whole.items():
                started = time.perf_counter()
                for _ in range(count):
                    work()
                parts.setdefault(f"{name}, {threads}", []).append((time.perf_counter() - started) / count)
        in_turn.append(parts["products, 2"][-1] + parts["attention, 2"][-1])
        start = threading.Barrier(3)
        workers = [threading.Thread(target=on_one_core, args=(work, 2 * count, start)) for work in half.values()]
        for worker in workers:
            worker.start()
        start.wait()
        started = time.perf_counter()
        for _ in range(2 * count):
            start.wait()
        at_once.append((time.perf_counter() - started) / count)
        for worker in workers:
            worker.join()
    return (
        statistics.median(in_turn),
        statistics.median(at_once),
        {name: statistics.median(values) for name, values in parts.items()},
    )


def print_measured(name: str, cases: list[str], rounds: int) -> None:
    print(f"{name}, one layer in bf16, two cores; ms")
    print(
        f"{'decodes':>10}{'products, 1':>13}{'2 cores':>9}{'attention, 1':>14}{'2 cores':>9}{'in turn':>9}{'halves at once':>16}{'gain':>8}"  # noqa: E501
    )
    for case in cases:
        sequences, context = map(int, case.split("x"))
        with torch.inference_mode():
            in_turn, at_once, parts = measure(SHAPES[name], sequences, context, rounds)
        cells = [parts[key] * 1000 for key in ("products, 1", "products, 2", "attention, 1", "attention, 2")]
        sizes = (13, 9, 14, 9)
        line = f"{case:>10}" + "".join(f"{cell:{size}.3f}" for cell, size in zip(cells, sizes, strict=True))
        print(f"{line}{in_turn * 1000:9.3f}{at_once * 1000:16.3f}{in_turn / at_once - 1:8.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The bound of overlapping attention with products, and with --measure an experiment."
    )
    parser.add_argument("--measure", action="store_true", help="run the native kernels on two cores; else only count")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="qwen2.5-0.5b", help="of --measure (default: %(default)s)"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["64x128", "64x512", "64x2048"],
        metavar="BxC",
        help="of --measure: sequences x context",
    )
    parser.add_argument("--rounds", type=int, default=7, help="of --measure (default: %(default)s)")
    args = parser.parse_args()
    if args.measure:
        print_measured(args.shape, args.cases, args.rounds)
    else:
        print_bounds()


if __name__ == "__main__":
    main()
