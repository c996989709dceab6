"""Where does a step's time go, and how far is each part from its floor?

Method: the same steps are run twice in turns, with the layers in one call, as they are served, and
with every part a call of its own, which is timed. What the parts take, and what is between them,
adds up to the second; the first says what one call saves. Medians over the steps. A part's floor is
the larger of the bytes it has to read over the bandwidth of plain reading with all threads, and of
its multiplications over what a loop of nothing but AVX-512's dot products reaches (ceiling.cpp, one
core, times the threads), both measured in the same run.

    python -m bench.budget --shape smollm2-135m [--model FOLDER] [--quantization w8a8] [--cases 64x530 1x32 prefill-512]
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.model import Engine, load, read_bandwidth, stored_bytes
from bench.model_folder import model_folder
from services.compute.backends.cpu.build import find_compiler
from services.compute.backends.cpu.linear import QUANTIZATIONS, NativeLinear, WeightType
from services.compute.models.decoder import Decoder
from services.compute.scheduling.offline import run_step
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from shared.model.sampling_params import SamplingParams
from shared.process.errors import StartupError

STEPS = 20
MOST_SEQUENCES, MOST_TOKENS = 64, 1024  # of a step, as bench.model loads an engine
PREPARING = "all else"


@dataclass(frozen=True)
class Case:
    """Steps of `batch` sequences that have `context` tokens and decode; or of whole prompts of `context` tokens."""

    batch: int
    context: int
    is_prefill: bool

    @classmethod
    def parse(cls, text: str) -> "Case":
        is_prefill = text.startswith("prefill-")
        batch, context = (1, int(text.removeprefix("prefill-"))) if is_prefill else map(int, text.split("x"))
        if not (1 <= batch <= MOST_SEQUENCES and context >= 1 and (not is_prefill or context <= MOST_TOKENS)):
            raise ValueError(f"{text}: at most {MOST_SEQUENCES} sequences, or a prompt of {MOST_TOKENS} tokens")
        return cls(batch, context, is_prefill)

    @property
    def num_tokens(self) -> int:
        return self.context if self.is_prefill else self.batch

    @property
    def num_scores(self) -> int:
        """Pairs of a query and a key of one head."""
        return self.context * (self.context + 1) // 2 if self.is_prefill else self.batch * self.context


@dataclass
class Step:
    seconds: float
    parts: dict[str, float]


class Timer:
    """Sums up what some functions take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def timed(*arguments: object, **options: object) -> object:
            started = time.perf_counter()
            result = function(*arguments, **options)
            self.seconds[name] += time.perf_counter() - started
            return result

        return timed


class Part:
    """Stands for a part of a layer, and times it."""

    def __init__(self, part: object, timer: Timer, name: str) -> None:
        self.part = part
        self.timed = timer.wrap(name, part)  # type: ignore[arg-type]

    def __call__(self, *arguments: object, **options: object) -> object:
        return self.timed(*arguments, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self.part, name)


def ceilings() -> tuple[dict[str, float], float]:
    """Operations/s of all threads, by type of number, and the clock's rate in Hz; empty and 0 without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        return {}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ceiling"
        subprocess.run(
            [compiler, "-O2", "-std=c++17", str(Path(__file__).with_name("ceiling.cpp")), "-o", str(program)],
            check=True,
        )
        found = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    rates = {name: float(rate) for name, rate in map(str.split, found.splitlines())}
    hertz = rates.pop("hertz")
    return {name: rate * torch.get_num_threads() for name, rate in rates.items()}, hertz


def run(engine: Engine, case: Case, timer: Timer) -> list[Step]:
    """The case's steps, and nothing of the steps on the way there."""
    num_out = 1 if case.is_prefill else STEPS + case.batch * case.context // 1024 + 2
    steps: list[Step] = []

    def decide(batch: ScheduledBatch, _: list[Sequence]) -> list[int]:
        timer.seconds.clear()
        started = time.perf_counter()
        logits = engine.runner.forward(batch)
        chosen: list[int] = timer.wrap("reduction", engine.runner.row_search.find_largest)(logits, 1)[1][:, 0].tolist()  # type: ignore[index]
        seconds = time.perf_counter() - started
        is_of_case = batch.num_tokens == case.num_tokens and (case.is_prefill or batch.num_decodes == len(batch.rows))
        if is_of_case:
            steps.append(Step(seconds, dict(timer.seconds)))
        return chosen

    for _ in range(STEPS // 2 if case.is_prefill else 1):
        for number in range(case.batch):
            prompt = [(7 * number + 13 * at) % 2000 + 5 for at in range(case.context)]
            engine.scheduler.add(
                Sequence(
                    Request(engine.num_sequences + number, "r", SamplingParams(max_tokens=num_out, ignore_eos=True)),
                    Tokens(prompt, case.context),
                ),
            )
        engine.num_sequences += case.batch
        while run_step(engine.scheduler, decide) is not None:
            pass
    return steps


def parts_of(model: Decoder, timer: Timer) -> None:
    """Make every part of the model a timed one."""
    for layer in model.weights.layers:
        for name in ("qkv", "output", "mlp"):
            object.__setattr__(layer, name, Part(getattr(layer, name), timer, name))
    model.attention = Part(model.attention, timer, "attention")  # type: ignore[assignment]
    head = model.weights.lm_head
    head.logits = timer.wrap("LM head", head.logits)  # type: ignore[method-assign, assignment]


def floors(
    model: Decoder, case: Case, bandwidth: float, rates: dict[str, float], kv_token_bytes: int
) -> dict[str, float]:
    """Seconds that each part takes at least. kv_token_bytes: of all layers."""

    def of(linears: list[NativeLinear], rows: int) -> float:
        total = 0.0
        for each in linears:
            rate = rates.get("bf16" if each.form.kind == WeightType.BF16 else "int8", float("inf"))
            total += max(stored_bytes(each) / bandwidth, 2 * rows * each.struct.n * each.struct.k / rate)
        return total

    layers, config = model.weights.layers, model.config
    cached = 0 if case.is_prefill else case.batch * case.context
    scores = 4 * case.num_scores * config.num_heads * config.head_dim * config.num_layers
    return {
        "qkv": of([layer.qkv for layer in layers], case.num_tokens),  # type: ignore[misc]
        "output": of([layer.output for layer in layers], case.num_tokens),  # type: ignore[misc]
        "mlp": of([each for layer in layers for each in layer.mlp.linears.values()], case.num_tokens),  # type: ignore[misc]
        "attention": max(cached * kv_token_bytes / bandwidth, scores / rates.get("bf16", float("inf"))),
        "LM head": of([model.weights.lm_head], case.batch),  # type: ignore[list-item]
        "reduction": case.batch * config.vocab_size * 4 / bandwidth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A step's time, part by part, and the floor of each.")
    parser.add_argument("--shape", default="smollm2-135m", help="of a model that is made (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a folder to use instead")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="w8a8")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument(
        "--cases", nargs="+", type=Case.parse, default=[Case.parse(each) for each in ("64x530", "1x32", "prefill-512")]
    )
    args = parser.parse_args()
    with model_folder(args.model, args.shape) as model:
        try:
            served, apart = (load(model, args.quantization, kv_cache_dtype=args.kv_cache_dtype) for _ in range(2))
        except StartupError as error:
            raise SystemExit(str(error)) from None
    timer, unused = Timer(), Timer()  # the second for what is not looked at
    decoder = apart.runner.model
    assert isinstance(decoder, Decoder)
    if decoder.stack is None:
        raise SystemExit("this model's layers are not native ones, or have experts")
    decoder.stack = None
    cache = apart.runner.kv_cache
    kv_token_bytes = sum(layer.nbytes for layer in cache.layers) // (cache.num_blocks * cache.block_size)
    bandwidth, (rates, hertz) = read_bandwidth(), ceilings()
    print(
        f"{torch.get_num_threads()} threads; reading {bandwidth / 1e9:.1f} GB/s; "
        + ", ".join(
            f"{name} {rate / 1e9:,.0f} GOP/s, {rate / hertz / torch.get_num_threads():.0f} a cycle and core"
            for name, rate in rates.items()
        )
    )
    least = [floors(decoder, case, bandwidth, rates, kv_token_bytes) for case in args.cases]
    parts_of(decoder, timer)
    for case, floor in zip(args.cases, least, strict=True):
        for engine in (served, apart):
            run(engine, case, unused)  # memory is new
        show(
            case, run(apart, case, timer), statistics.median(step.seconds for step in run(served, case, unused)), floor
        )


def show(case: Case, steps: list[Step], together: float, least: dict[str, float]) -> None:
    whole = statistics.median(step.seconds for step in steps)
    print(
        f"\n{'prefill of' if case.is_prefill else f'{case.batch} x'} {case.context}: {together * 1e3:.2f} ms a step "
        f"in one call, {whole * 1e3:.2f} in parts"
    )
    named = {name: statistics.median(step.parts[name] for step in steps) for name in least}
    for name, seconds in (named | {PREPARING: whole - sum(named.values())}).items():
        floor = f"{least[name] * 1e3:10.2f}{least[name] / seconds:10.0%}" if name in least else ""
        print(f"{name:12}{seconds * 1e3:10.2f} ms{seconds / whole:8.0%}{floor}")
    print(
        f"{'all parts':12}{whole * 1e3:10.2f} "
        f"ms{'':8}{sum(least.values()) * 1e3:10.2f}{sum(least.values()) / together:10.0%} of it in one call"
    )


if __name__ == "__main__":
    main()
