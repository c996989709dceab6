"""What do ranks cost on one host? Decode and prefill of one process of two threads, beside groups of
two ranks of one thread each: ranks that divide every layer and share memory, the same over gloo (as
between hosts), two stages, and a rank that keeps half of each layer for the other, which has both
threads.

Method: each way is a process of its own with its group, which loads once, waits, and measures a
case when it is told to; ways take turns within a round, so that what else the machine does meets
all. Medians of the ratios within a round count. Decode is 128 in and 64 out, prefill 512 tokens at
once. Memory is what each process holds of its own after loading (its proportional share of what is
mapped by several), and loading is from start to ready.

    python -m bench.ranks --shape smollm2-135m [--model FOLDER] [--quantization none] [--rounds 5]
    [--ways threads ranks gloo stages]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from bench.model import Engine, load_engine
from bench.model_folder import model_folder
from services.compute.ranks.group.ends import open_group
from shared.model.files import open_model
from shared.process.settings import ComputeSettings
from shared.process.stage_settings import environment_of

MASTER = "127.0.0.1:29471"
WAYS: dict[str, dict[str, Any]] = {
    "threads": {"num_threads": 2},
    "ranks": {"tensor_parallel_size": 2, "num_threads": 1},
    "gloo": {"tensor_parallel_size": 2, "num_threads": 1, "master": MASTER, "rank": 0},
    "stages": {"pipeline_parallel_size": 2, "num_threads": 1},
    "sharded": {"tensor_parallel_size": 2, "shard_weights": True, "num_threads": 2},
}
CASES = {
    "decode of 1": (1, 128, 64),
    "decode of 8": (8, 128, 64),
    "decode of 32": (32, 128, 64),
    "prefill": (1, 512, 1),
}


def serve(way: str, model: Path, quantization: str) -> None:
    """Load, and measure the cases that are named on the standard input, a line each; answers are lines of JSON."""
    settings = ComputeSettings(
        model=str(model),
        dtype="bfloat16",
        quantization=quantization,
        prefix_caching=False,
        kv_cache_memory="1GiB",
        max_batched_tokens=1024,
        speculate="off",
        **WAYS[way],
    )
    files, started = open_model(str(model), weights=True), time.perf_counter()
    with ExitStack() as stack:
        group = open_group(settings)
        if group is not None:
            stack.enter_context(group)
        engine = load_engine(settings, files, group)
        print(json.dumps(time.perf_counter() - started), flush=True)
        for line in sys.stdin:
            print(json.dumps(measure(engine, line.strip())), flush=True)
        if group is not None:
            group.close()


def measure(engine: Engine, case: str) -> float:
    """Tokens/s of a case."""
    decode, prefill = engine.run(*CASES[case])
    return prefill if case == "prefill" else decode


class Way:
    """A process that measures, and the ranks beside it."""

    def __init__(self, name: str, model: Path, quantization: str) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.ranks",
            "--serve",
            name,
            "--model",
            str(model),
            "--quantization",
            quantization,
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.others: list[subprocess.Popen[bytes]] = []
        if "master" in WAYS[name]:
            settings = ComputeSettings(
                model=str(model),
                dtype="bfloat16",
                quantization=quantization,
                prefix_caching=False,
                kv_cache_memory="1GiB",
                max_batched_tokens=1024,
                speculate="off",
                **WAYS[name] | {"rank": 1},
            )
            self.others.append(
                subprocess.Popen([sys.executable, "-m", "services.compute"], env=environment_of(settings))
            )
        self.loading_s = self.answer()

    def answer(self) -> float:
        assert self.process.stdout is not None
        return float(json.loads(self.process.stdout.readline()))

    def measure(self, case: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return self.answer()

    def memory(self) -> list[int]:
        """MiB of each process."""
        first = psutil.Process(self.process.pid)
        processes = [first, *first.children(recursive=True), *(psutil.Process(each.pid) for each in self.others)]
        return [each.memory_full_info().pss >> 20 for each in processes]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        for each in self.others:
            each.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description="Groups of ranks on one host beside one process.")
    parser.add_argument("--shape", default="smollm2-135m", help="of a model that is made (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a folder to use instead")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--serve", choices=list(WAYS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve, args.model, args.quantization)
    with model_folder(args.model, args.shape) as model:
        ways = {name: Way(name, model, args.quantization) for name in args.ways}
        for name, way in ways.items():
            way.measure("decode of 1")
            print(f"{name}: loaded in {way.loading_s:.1f} s, MiB of each process: {way.memory()}", flush=True)
        found: dict[str, dict[str, list[float]]] = {case: {name: [] for name in ways} for case in CASES}
        for _ in range(args.rounds):
            for case, rates in found.items():
                for name, way in ways.items():
                    rates[name].append(way.measure(case))
        first = args.ways[0]
        for case, rates in found.items():
            ratios = {
                name: statistics.median(one / other for one, other in zip(rates[name], rates[first], strict=True))
                for name in ways
            }
            print(
                f"{case}: "
                + ", ".join(f"{name} {statistics.median(rates[name]):.1f} ({ratios[name]:.2f})" for name in ways),
                flush=True,
            )
        for way in ways.values():
            way.close()


if __name__ == "__main__":
    main()
