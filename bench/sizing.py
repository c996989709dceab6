"""What do one Redis, one gateway, one tokenizer and one sampler carry? CPU a token and a request of
each, and how many a deployment needs.

Method: a real Redis (the embedded one, with its log on disk), a real gateway, tokenizer and
sampler, each one process, and HTTP streams of plain sockets. Compute is bench/empty_compute.py: the
protocol without a model, so the other stages are what limits. Each process' CPU seconds come from
the kernel's own clocks, which other programs disturb least. Requests of one token say what a
request costs; streams of many tokens, less that, say what a token costs. Commands and bytes are
Redis' own counts. Where other programs take more than a tenth of a core, a run is made again, at
most three times, and the quietest counts; then the median of the rounds.

A process has one thread that works, so it carries at most 1 / (its CPU seconds a token) on one
core. All processes, compute and client share the cores here, so the tokens/s that are seen are
those of the machine. With several Redis ("cells", each with stages and streams of its own) they
can't be more: what is seen is whether a token costs the same.

    python -m bench.sizing --streams 16 64 256 --rounds 3
    python -m bench.sizing --streams 64 --cells 1 2 3 --publish-interval-ms 0
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import redis
import uvloop

from bench.load import make_request, stream_all
from bench.pipeline import MAX_ATTEMPTS, NOISE, REDIS_COUNTS, busy_seconds, cpu_seconds, free_port, whole_machine
from bench.texts import Prose
from services.operator.redis_server import socket_path, start_server
from shared.model.files import DEMO_MODEL
from shared.wire.streams import LOG_TTL_S

STAGES = {
    "sampler": "services.sampler",
    "tokenizer": "services.tokenizer",
    "gateway": "services.gateway",
    "compute": "bench.empty_compute",
}
CARRIERS = ("gateway", "tokenizer", "sampler", "redis")  # of which a deployment has one or several
CONTEXT = 131_072  # tokens that the model is said to take: nothing computes them
READY_S, SETTLED_S = 60.0, 1.5  # at most, until it is ready; until the stages have trimmed their streams
SHORT, LONG = 32, 4096  # tokens of prompts
AT_ONCE = 32  # requests, where their cost is measured
TEMPERATURE = 1.0  # of the requests whose rows list 64 candidates
LOAD = 0.7  # of a core that a process is planned to take
GOALS = (10_000, 100_000, 1_000_000)  # tokens/s of deployments

Costs = dict[str, float]  # by name: CPU seconds of processes, and Redis' counts


class Cell:
    """One Redis, and one of each stage."""

    def __init__(self, folder: Path, model: Path, publish_interval_ms: float) -> None:
        self.port = free_port()
        url = f"unix://{socket_path(folder)}"
        self.processes = {"redis": start_server(folder)}
        environment = {
            **os.environ,
            "PENSTOCK_REDIS_URL": url,
            "PENSTOCK_MODEL": str(model),
            "PENSTOCK_PORT": str(self.port),
            "PENSTOCK_LOG_LEVEL": "warning",
            "PENSTOCK_FILES_URL": str(folder / "files"),
            "PENSTOCK_PUBLISH_INTERVAL_MS": str(publish_interval_ms),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.log = folder / "stages.log"
        with self.log.open("wb") as log:
            for name, program in STAGES.items():
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", program], env=environment, stdout=log, stderr=log
                )
        self.redis = redis.Redis.from_url(url)
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def work(self) -> Costs:
        """The work that its processes have done since they started: CPU seconds, and what Redis counts."""
        stats = self.redis.info("stats")
        costs = {name: sum(map(cpu_seconds, with_children(process.pid))) for name, process in self.processes.items()}
        return costs | {name: float(stats[key]) for name, key in REDIS_COUNTS.items()}

    def memory(self) -> float:
        """Bytes that Redis' data takes."""
        return float(self.redis.info("memory")["used_memory"])

    def close(self) -> None:
        """The stages, then Redis."""
        for name in reversed(self.processes):
            self.processes[name].terminate()
            try:
                self.processes[name].wait(15)
            except subprocess.TimeoutExpired:
                self.processes[name].kill()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and all(process.poll() is None for process in self.processes.values()):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=2, trust_env=False).status_code == 200:
                    return
            time.sleep(0.3)
        raise SystemExit(f"the stages did not become ready:\n{self.log.read_text()[-2000:]}")


@dataclass(frozen=True, slots=True)
class Run:
    """The costs of some requests, all cells together."""

    num_requests: int
    num_tokens: int
    seconds: float
    others: float  # cores that none of this took
    costs: Costs

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def per_request(self) -> Costs:
        return {name: value / self.num_requests for name, value in self.costs.items()}

    def per_token(self, request: Costs) -> Costs:
        """The costs of a token after its request's first. request: those of one of these requests
        with its first token.
        """
        later = self.num_tokens - self.num_requests
        return {name: max(0.0, value - self.num_requests * request[name]) / later for name, value in self.costs.items()}


def with_children(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def measure(cells: list[Cell], requests: list[bytes], num_tokens: int, at_once: int | None = None) -> Run:
    """The requests, in turns to the cells."""
    memory, before, busy = sum(cell.memory() for cell in cells), sum_of([cell.work() for cell in cells]), busy_seconds()
    addressed = [(cells[number % len(cells)].port, request) for number, request in enumerate(requests)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        load = runner.run(stream_all(addressed, num_tokens, at_once))
    busy, after = busy_seconds() - busy, sum_of([cell.work() for cell in cells])
    costs = {name: value - before[name] for name, value in after.items()} | {"client": load.cpu}
    others = (busy - sum(costs[name] for name in (*STAGES, "redis", "client"))) / load.seconds
    time.sleep(SETTLED_S)
    return Run(
        len(requests),
        len(requests) * num_tokens,
        load.seconds,
        others,
        costs | {"memory": sum(cell.memory() for cell in cells) - memory},
    )


def sum_of(found: list[Costs]) -> Costs:
    return {name: sum(each[name] for each in found) for name in found[0]}


def quietest(cells: list[Cell], make: Callable[[], list[bytes]], num_tokens: int, at_once: int | None = None) -> Run:
    """The run that others disturbed least, of as many as it takes. make: gives new requests."""
    runs: list[Run] = []
    while not runs or (runs[-1].others > NOISE and len(runs) < MAX_ATTEMPTS):
        runs.append(measure(cells, make(), num_tokens, at_once))
        run = runs[-1]
        cpu = ", ".join(f"{name} {us(run.costs[name] / run.num_tokens)}" for name in CARRIERS)
        print(
            f"  {run.num_requests / run.seconds:.0f} requests/s, {run.tokens_per_s:.0f} tokens/s; µs a token: {cpu}; "
            f"others {run.others:.2f} cores",
            flush=True,
        )
    return min(runs, key=lambda run: run.others)


def median(found: list[Costs]) -> Costs:
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of a deployment."""

    num_prompt_tokens: int
    num_output_tokens: int


def per_output_token(token: Costs, short: Costs, long: Costs, shape: Shape) -> Costs:
    """The costs of an output token of such requests, with its share of its request. Between the
    short and the long prompt, they grow evenly.
    """
    place = (shape.num_prompt_tokens - SHORT) / (LONG - SHORT)
    request = {name: short[name] + place * (long[name] - short[name]) for name in short}
    later = {
        name: 0 if name == "tokenizer" else shape.num_output_tokens - 1 for name in short
    }  # it has no part in them: it was idle
    return {name: (request[name] + later[name] * token[name]) / shape.num_output_tokens for name in short}


def needed(tokens_per_s: float, cost_s: float, load: float = LOAD) -> int:
    """How many processes carry so many tokens/s, if one takes cost_s for a token and may take that share of a core."""
    return max(1, math.ceil(tokens_per_s * cost_s / load))


@contextlib.contextmanager
def long_model(given: Path) -> Iterator[Path]:
    """A folder with the model's tokenizer and configuration, which takes CONTEXT tokens. No
    weights: nothing reads them.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / given.name
        shutil.copytree(given, copy, ignore=shutil.ignore_patterns("*.safetensors", "*.gguf", "__pycache__"))
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
        yield copy


@contextlib.contextmanager
def cells_of(count: int, model: Path, publish_interval_ms: float) -> Iterator[list[Cell]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                contextlib.closing(
                    Cell(Path(stack.enter_context(tempfile.TemporaryDirectory())), model, publish_interval_ms)
                )
            )
            for _ in range(count)
        ]


class Bench:
    """The requests of one model, and what they took."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.prose = Prose(model)

    def requests(
        self, count: int, num_prompt_tokens: int, num_tokens: int, *, is_greedy: bool = False, is_chat: bool = False
    ) -> list[bytes]:
        temperature = 0.0 if is_greedy else TEMPERATURE
        return [
            make_request(self.model.name, self.prose.take(num_prompt_tokens), num_tokens, temperature, is_chat=is_chat)
            for _ in range(count)
        ]

    def request_costs(self, cells: list[Cell]) -> dict[str, Costs]:
        """The costs of a request with its first token, by kind."""
        kinds = {
            f"{SHORT} tokens": (SHORT, False),
            f"{LONG:,} tokens": (LONG, False),
            f"a conversation, {SHORT} tokens": (SHORT, True),
        }
        found: dict[str, list[Costs]] = {kind: [] for kind in kinds}
        for _ in range(self.args.rounds):
            for kind, (length, is_chat) in kinds.items():
                print(f"{kind}:")
                make = partial(self.requests, self.args.requests, length, 1, is_chat=is_chat)
                found[kind].append(quietest(cells, make, 1, AT_ONCE).per_request())
        return {kind: median(each) for kind, each in found.items()}

    def token_costs(self, cells: list[Cell], request: Costs, streams: int, *, is_greedy: bool) -> Costs:
        """The costs of a token, with the tokens/s that were seen. streams: of each cell."""
        found = []
        for _ in range(self.args.rounds):
            print(f"{streams} streams at each of {len(cells)} Redis:")
            make = partial(self.requests, streams * len(cells), SHORT, self.args.tokens, is_greedy=is_greedy)
            run = quietest(cells, make, self.args.tokens)
            found.append(run.per_token(request) | {"tokens_per_s": run.tokens_per_s})
        return median(found)

    def all_token_costs(self, cells: list[Cell], request: Costs, suffix: str) -> dict[str, Costs]:
        """The costs of a token for each number of streams; for the last also of greedy requests,
        where one Redis is all.
        """
        measure(cells, self.requests(AT_ONCE, SHORT, 8), 8)  # warm
        found: dict[str, Costs] = {}
        for streams in self.args.streams:
            name = f"{streams} streams" + f" at each of {len(cells)} Redis" * (len(cells) > 1) + suffix
            found[name] = self.token_costs(cells, request, streams, is_greedy=False)
        if len(cells) == 1:
            found[f"{name}, greedy"] = self.token_costs(cells, request, streams, is_greedy=True)
        return found


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def show_requests(kinds: dict[str, Costs]) -> None:
    print(
        "\n| a request with its first token | gateway, ms | tokenizer, ms | sampler, ms | Redis, ms | commands "
        "|\n|---|---|---|---|---|---|"
    )
    for kind, cost in kinds.items():
        print(
            f"| {kind} | " + " | ".join(f"{cost[each] * 1e3:.2f}" for each in CARRIERS) + f" | {cost['commands']:.0f} |"
        )


def show_tokens(tokens: dict[str, Costs]) -> None:
    cores = ("gateway", "sampler", "redis", "compute", "client")
    heads = [
        "a token after the first",
        "tokens/s here",
        *(f"{name}, µs" for name in cores),
        "commands",
        "bytes in, out",
        "memory",
    ]
    print("\n| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for name, cost in tokens.items():
        moved = f"{cost['commands']:.2f} | {cost['bytes_in']:.0f}, {cost['bytes_out']:.0f} | {cost['memory']:.0f}"
        print(
            f"| {name} | {cost['tokens_per_s']:,.0f} | "
            + " | ".join(us(cost[each]) for each in cores)
            + f" | {moved} |"
        )


def show_needs(name: str, cost: Costs, shape: Shape) -> None:
    print(
        f"\n{name}; requests of {shape.num_prompt_tokens:,} tokens in and {shape.num_output_tokens} out; a process "
        f"takes {LOAD:.0%} of a core at most:\n"
    )
    print("| | CPU a token, µs | one carries, tokens/s | " + " | ".join(f"{goal:,} tokens/s" for goal in GOALS) + " |")
    print("|---|---|---|" + "---|" * len(GOALS))
    for each in CARRIERS:
        print(
            f"| {each} | {us(cost[each])} | {LOAD / cost[each]:,.0f} | "
            + " | ".join(str(needed(goal, cost[each])) for goal in GOALS)
            + " |"
        )
    print()
    kept_h = LOG_TTL_S / 3600
    for count in (1, 2, 3):
        rate = count * LOAD / cost["redis"]
        moved = (
            f"{cost['commands'] * rate:,.0f} commands/s, {cost['bytes_in'] * rate / 1e6:.0f} MB/s in, "
            f"{cost['bytes_out'] * rate / 1e6:.0f} MB/s out"
        )
        print(
            f"{count} Redis by calculation: {rate:,.0f} tokens/s, {moved}, "
            f"{cost['memory'] * rate * LOG_TTL_S / 1e9:.1f} GB of logs in {kept_h:g} h"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[16, 64, 256],
        help="at once at each Redis; the last says what a deployment needs (default: 16 64 256)",
    )
    parser.add_argument("--tokens", type=int, default=512, help="of each stream (default: %(default)s)")
    parser.add_argument(
        "--requests",
        type=int,
        default=512,
        help="of each kind, where a request's cost is measured (default: %(default)s)",
    )
    parser.add_argument(
        "--publish-interval-ms", type=float, nargs="+", default=[0, 50], help="of compute, as its flag (default: 0 50)"
    )
    parser.add_argument(
        "--cells", type=int, nargs="+", default=[1], help="Redis, each with stages of its own (default: 1)"
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=2,
        default=[1155, 211],
        metavar=("IN", "OUT"),
        help="tokens of a request (default: 1155 211, a chat's)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--model",
        type=Path,
        default=DEMO_MODEL,
        help="a folder with a tokenizer and a configuration; by default the demo's",
    )
    args = parser.parse_args()
    if min(args.tokens, args.requests, args.rounds, *args.streams, *args.cells, *args.shape) < 1 or args.tokens < 2:
        parser.error("counts start from 1, and --tokens from 2")
    if not (args.model / "tokenizer.json").is_file():
        parser.error(f"--model {args.model}: a folder with tokenizer.json and config.json is wanted")
    with whole_machine(), long_model(args.model) as model:
        bench = Bench(model, args)
        with cells_of(1, model, 0) as cells:
            measure(cells, bench.requests(AT_ONCE, SHORT, 8), 8)  # warm
            kinds = bench.request_costs(cells)
        short, long = list(kinds.values())[:2]
        tokens: dict[str, Costs] = {}
        for interval in args.publish_interval_ms:
            for count in args.cells:
                with cells_of(count, model, interval) as cells:
                    tokens |= bench.all_token_costs(cells, short, f", every {interval:.0f} ms" * (interval > 0))
    show_requests(kinds)
    show_tokens(tokens)
    for name, cost in tokens.items():
        if name.startswith(f"{args.streams[-1]} streams") and "greedy" not in name and "each of" not in name:
            show_needs(name, per_output_token(cost, short, long, Shape(*args.shape)), Shape(*args.shape))
    rounded = {
        kind: {name: float(f"{value:.4g}") for name, value in cost.items()} for kind, cost in (kinds | tokens).items()
    }
    print(json.dumps({"rounds": args.rounds, **rounded}))


if __name__ == "__main__":
    main()
