"""How fast is the model alone? Decode tokens/s by batch and prefill tokens/s by length, beside the
floor that memory and arithmetic set.

Method: scheduler and runner in one process, tokens chosen at once; a round measures every case in
turn, and the median of the rounds counts. The floor of a step is the larger of its layers' bytes
(as stored, scales and all) over the measured read bandwidth, and its multiplications over what the
GEMM itself reaches at 512 rows in the same run. Decode is 128 in and 128 out (32 in at batch 1),
prefill excluded.

    python -m bench.model --shape qwen2.5-0.5b [--modes none w8a8] [--rounds 3]

With --context: decoding of 8 sequences that are so long, with the KV cache in bf16 and in int8 groups, in each mode.

    python -m bench.model --context 4000 --modes w8a8

With --library: the milliseconds of CPU that a step of 1 and of 8 sequences takes, natively and on transformers'
modules, in turns, and how many of the library's the native ones are. One thread, whose own time is counted:
what else the machine does changes little.

    python -m bench.model --library --shape qwen2.5-0.5b --modes none w4
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.model_folder import model_folder
from services.compute.backends.backend import Linear, LogitsProduct, Product, RowSearch
from services.compute.backends.choose import choose_backend
from services.compute.backends.cpu.linear import QUANTIZATIONS, NativeLinear
from services.compute.backends.gathered import own_of
from services.compute.backends.matrix import Dense
from services.compute.execution.model_runner import ModelRunner
from services.compute.loop.engine import build_engine
from services.compute.models.decoder import Decoder
from services.compute.ranks.group.ends import Group
from services.compute.scheduling.offline import run_step
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from shared.model.files import ModelFiles, open_model
from shared.model.sampling_params import SamplingParams
from shared.process.settings import ComputeSettings

BATCHES, PREFILLS = (1, 4, 8, 16, 32), (512, 1024)


@dataclass
class Engine:
    scheduler: Scheduler
    runner: ModelRunner
    row_search: RowSearch
    num_parameters: int
    weight_bytes: int
    num_sequences: int = 0

    def run_steps(self, batch: int, num_in: int, num_out: int) -> int:
        """Returns the number of steps."""
        self.add(batch, num_in, num_out)
        num_steps = 0

        def decide(step: ScheduledBatch, _: list[Sequence]) -> list[int]:
            nonlocal num_steps
            num_steps += 1
            chosen: list[int] = self.row_search.find_largest(self.runner.forward(step), 1)[1][:, 0].tolist()
            return chosen

        while run_step(self.scheduler, decide) is not None:
            pass
        return num_steps

    def add(self, batch: int, num_in: int, num_out: int) -> None:
        """Add sequences to the scheduler."""
        for number in range(batch):
            prompt = [(7 * number + 13 * at) % 2000 + 5 for at in range(num_in)]
            self.scheduler.add(
                Sequence(
                    Request(self.num_sequences + number, "r", SamplingParams(max_tokens=num_out)),
                    Tokens(prompt, num_in),
                )
            )
        self.num_sequences += batch

    def run(self, batch: int, num_in: int, num_out: int) -> tuple[float, float]:
        """Returns decode tokens/s (0 if there was no decoding) and prefill tokens/s."""
        self.add(batch, num_in, num_out)
        tokens, seconds = {"decode": 0, "prefill": 0}, {"decode": 0.0, "prefill": 0.0}

        def decide(step: ScheduledBatch, _: list[Sequence]) -> list[int]:
            kind = "prefill" if step.num_decodes < len(step.rows) else "decode"
            started = time.perf_counter()
            chosen: list[int] = self.row_search.find_largest(self.runner.forward(step), 1)[1][:, 0].tolist()
            seconds[kind] += time.perf_counter() - started
            tokens[kind] += step.num_tokens
            return chosen

        while run_step(self.scheduler, decide) is not None:
            pass
        return tokens["decode"] / seconds["decode"] if seconds["decode"] else 0.0, tokens["prefill"] / seconds[
            "prefill"
        ]


def load(model: Path, mode: str, **more: object) -> Engine:
    settings = ComputeSettings(
        model=str(model),
        dtype="bfloat16",
        quantization=mode,
        prefix_caching=False,
        kv_cache_memory="2GiB",
        max_batched_tokens=1024,
        **more,  # type: ignore[arg-type]
    )
    return load_engine(settings, open_model(str(model), weights=True))


def load_engine(settings: ComputeSettings, files: ModelFiles, group: Group | None = None) -> Engine:
    """The model as settings want it. group: that this process leads."""
    engine = build_engine(settings, files, group)
    scheduler, runner = engine.scheduler, engine.runner
    decoder = runner.model
    if not isinstance(decoder, Decoder):
        return Engine(scheduler, runner, runner.row_search, 0, 0)  # whose floor is not known
    config = decoder.config
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    weights = decoder.weights
    linears: list[Product | LogitsProduct] = [
        weights.lm_head,
        *(each for at in weights.layers for each in (at.qkv, at.output, *at.mlp.linears.values())),
    ]
    own = [found for each in linears if (found := own_of(each)) is not None]
    num_parameters = config.num_layers * layer + config.vocab_size * config.hidden_size
    return Engine(scheduler, runner, engine.runner.row_search, num_parameters, sum(map(stored_bytes, own)))


def stored_bytes(linear: Linear) -> int:
    """Bytes that a layer reads of its own."""
    if isinstance(linear, NativeLinear):
        return sum(part.nbytes for each in (linear, *linear.following) for part in each.parts.values())
    return int(linear.weight.nbytes)  # type: ignore[attr-defined]


def read_bandwidth() -> float:
    """Bytes/s of summing 1 GiB with all threads, the best of five."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    return max(data.nbytes / timed(lambda: data.sum()) for _ in range(5))


def gemm_rate(mode: str) -> float:
    """Multiplications/s of one layer of 8192 x 2048 at 512 rows, the best of five."""
    layer = choose_backend(torch.bfloat16, torch.device("cpu")).make_linear(
        Dense(torch.randn(8192, 2048)), quantization=mode
    )
    x = torch.randn(512, 2048).bfloat16()
    return max(512 * 8192 * 2048 / timed(lambda: layer(x)) for _ in range(5))


def timed(function: object) -> float:
    started = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - started


def long_contexts(model: Path, modes: list[str], context: int, rounds: int) -> None:
    """Prints decode tokens/s of 8 sequences by mode and by the cache's format."""
    caches: dict[str, dict[str, object]] = {"bf16": {}}
    caches |= {f"int8/{group}": {"kv_cache_dtype": "int8", "kv_cache_group": group} for group in ("64", "32", "8")}
    for mode in modes:
        engines = {name: load(model, mode, **more) for name, more in caches.items()}
        found: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():
                found[name].append(engine.run(8, context, 32)[0])
        print(
            f"{mode}, 8 x {context}: "
            + ", ".join(f"KV {name} {statistics.median(rates):.0f}" for name, rates in found.items()),
            flush=True,
        )


def compare_with_library(model: Path, modes: list[str], rounds: int) -> None:
    """Prints, for each mode and number of sequences, the medians and their ratio."""
    torch.set_num_threads(1)
    for mode in modes:
        engines = {name: load(model, mode, model_impl=name, num_threads=1) for name in ("native", "transformers")}
        for streams in (1, 8):
            found: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(rounds):
                for name, engine in engines.items():
                    started = time.thread_time()
                    num_steps = engine.run_steps(streams, 32, 64)
                    found[name].append(1e3 * (time.thread_time() - started) / num_steps)
            native, library = (statistics.median(found[name]) for name in engines)
            print(
                f"{mode}, {streams}: native {native:.1f} ms, library {library:.1f} ms, {native / library:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode and prefill tokens/s of the model alone, and their floor.")
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of a model that is made (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a folder to use instead")
    parser.add_argument("--modes", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, help="tokens that each of 8 sequences has when it decodes")
    parser.add_argument("--library", action="store_true", help="compare the native model with transformers' modules")
    args = parser.parse_args()
    with model_folder(args.model, args.shape) as model:
        if args.library:
            return compare_with_library(model, args.modes, args.rounds)
        if args.context is not None:
            return long_contexts(model, args.modes, args.context, args.rounds)
        engines = {mode: load(model, mode) for mode in args.modes}
        for engine in engines.values():
            engine.run(1, 32, 8)
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(args.rounds):
            for mode, engine in engines.items():
                for batch in BATCHES:
                    decode, _ = engine.run(batch, 32 if batch == 1 else 128, 128)
                    found.setdefault((mode, f"decode, batch {batch}"), []).append(decode)
                for length in PREFILLS:
                    found.setdefault((mode, f"prefill, {length}"), []).append(engine.run(1, length, 1)[1])
        bandwidth = read_bandwidth()
        print(
            f"{torch.get_num_threads()} threads, memory read at {bandwidth / 1e9:.1f} GB/s; tokens/s, the floor's in "
            "brackets"
        )
        rates = {mode: gemm_rate(mode) for mode in args.modes}
        print(f"{'':18}" + "".join(f"{mode:>20}" for mode in args.modes))
        for case in [f"decode, batch {batch}" for batch in BATCHES] + [f"prefill, {length}" for length in PREFILLS]:
            rows = int(case.split()[-1])
            cells = []
            for mode, engine in engines.items():
                step = max(engine.weight_bytes / bandwidth, rows * engine.num_parameters / rates[mode])
                cells.append(f"{statistics.median(found[mode, case]):11.0f} ({rows / step:6.0f})")
            print(f"{case:18}" + "".join(f"{cell:>20}" for cell in cells))
        print("GEMM at 512 rows: " + ", ".join(f"{mode} {2 * rate / 1e9:,.0f} GOP/s" for mode, rate in rates.items()))


if __name__ == "__main__":
    main()
