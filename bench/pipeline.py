"""What does the pipeline cost? Output tokens/s at the HTTP client over those of the compute loop
alone, and where the rest goes.

Method: a random model of a real shape in bfloat16 (or a checkpoint); 1, 8 and 64 streams at once,
128 tokens in, 128 out, greedy, eos ignored. `penstock up` and the loop alone (bench/loop.py: the
same scheduler, runner and reduction, built from the same flags, in a process of its own) are loaded
once and take turns: in each round and at each number of streams one runs right after the other (the
pipeline's processes are stopped while the loop runs), the first in one round being the second in
the next. Medians of the rounds count. Tokens are counted from the first submission to the last
event (TTFT included) on both sides. Ceiling: 1.0, for the pipeline does the same steps; what is
missing went into waiting, and into the work of gateway, sampler, Redis and client, who share the
machine's cores with compute. The tokens themselves may differ between the two: they are timed, not
compared.

CPU a token is what noise disturbs least: each process' own seconds. Of compute it is what its main
thread takes beside the forward pass, and the loop does not.

The parts of a step are compute's own meter, as /metrics shows it; "outside" is what of the client's
time is no part of a step: the way to compute, and the way of the last tokens back. Redis counts
commands, the commands inside scripts among them; its reads are what came to its sockets in one
piece: about a round trip each. "Others" is how many cores whatever is none of this took meanwhile:
a pair with more than a tenth is measured again, at most three times, and the quietest counts.

    python -m bench.pipeline --rounds 3
    python -m bench.pipeline --shape smollm2-135m --streams 64 --quantization w8a8 --run-ahead 0
    python -m bench.pipeline --device cuda --shape llama-3-8b --streams 1 32 64 --kv-cache-memory 4GiB

On a GPU, which holds the model twice then, the loop has a step in flight as well, and only its whole time is told.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import redis

from bench.load import generate
from bench.loop import Loop, prompts
from bench.model_folder import model_folder
from services.operator.redis_server import socket_path
from shared.wire.load import STEP_PARTS

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
READY_S, REPORTED_S = 180.0, 20.0  # at most, until it is ready, and until compute's report of a run is in
REVIVED_S = 2.5  # after a stop: replicas report once a second, and gateways look once a second
NOISE, MAX_ATTEMPTS = 0.1, 4  # cores that others may take while a pair is measured; beyond, it is measured again
REDIS_COUNTS = {
    "commands": "total_commands_processed",
    "reads": "total_reads_processed",
    "bytes_in": "total_net_input_bytes",
    "bytes_out": "total_net_output_bytes",
}


class Served:
    """`penstock up`, from outside."""

    def __init__(self, flags: list[str], folder: Path, model: str) -> None:
        self.model = model
        self.port = free_port()
        self.log = folder / "up.log"
        command = [
            sys.executable,
            "-m",
            "services.operator.cli",
            "up",
            *flags,
            "--data-dir",
            str(folder / "data"),
            "--port",
            str(self.port),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, "PENSTOCK_LOG_LEVEL": "error"}, stdout=log, stderr=log
            )
        self.launcher, self.children = psutil.Process(self.process.pid), []
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        self.redis = redis.Redis(unix_socket_path=str(socket_path(folder / "data")))
        self.children = self.launcher.children(recursive=True)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile it takes nothing of the machine; idle it would take half a percent."""
        self.suspend()
        try:
            yield
        finally:
            self.revive()
        time.sleep(REVIVED_S)
        self._wait_ready()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """One that is suspended works meanwhile."""
        self.revive()
        time.sleep(REVIVED_S)
        self._wait_ready()
        try:
            yield
        finally:
            self.suspend()

    def suspend(self) -> None:
        for process in (self.launcher, *self.children):
            process.suspend()

    def revive(self) -> None:
        for process in (self.launcher, *self.children):
            process.resume()

    def run(self, streams: int, num_out: int) -> dict[str, float]:
        """Seconds, TTFT, cores that others took, and totals of the run: compute's steps and their
        parts, Redis' counts, CPU seconds by process.
        """
        before, busy, cpu = self._totals(), busy_seconds(), self._cpu_seconds()
        load = generate(self.port, self.model, prompts(streams, PROMPT_TOKENS), num_out)
        busy, cpu = (
            busy_seconds() - busy,
            {name: value - cpu[name] for name, value in self._cpu_seconds().items()} | {"cpu client": load.cpu},
        )
        deadline = time.monotonic() + REPORTED_S
        while (after := self._totals())["tokens"] < before["tokens"] + streams * num_out:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"compute has decided {after['tokens'] - before['tokens']:.0f} tokens of {streams * num_out}"
                )
            time.sleep(0.2)
        totals = {name: after[name] - before[name] for name in after}
        return {
            "seconds": load.seconds,
            "ttft": load.ttft_s,
            "others": (busy - sum(cpu.values())) / load.seconds,
            **cpu,
            **totals,
        }

    def close(self) -> None:
        if self.process.poll() is None:
            self.revive()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _totals(self) -> dict[str, float]:
        counts = self.redis.info("stats")
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=10, trust_env=False).text
        totals: dict[str, float] = {
            part: metric(text, "penstock_step_seconds_total", f'part="{part}"') for part in STEP_PARTS
        }
        totals |= {
            "steps": metric(text, "penstock_steps_total"),
            "tokens": metric(text, "penstock_computed_generation_tokens_total"),
        }
        return totals | {f"redis {name}": float(counts[key]) for name, key in REDIS_COUNTS.items()}

    def _cpu_seconds(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for process in self.children:
            name = f"cpu {stage_of(process)}"
            seconds[name] = seconds.get(name, 0.0) + cpu_seconds(process)
        return seconds

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=2, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise SystemExit(f"the pipeline did not become ready:\n{self.log.read_text()[-2000:]}")


def measure_pair(loop: Loop, served: Served, streams: int, *, is_served_first: bool) -> dict[str, float]:
    """Both sides, one right after the other."""
    there = served.run(streams, OUTPUT_TOKENS) if is_served_first else None
    alone = run_alone(loop, served, streams)
    return compare(alone, there or served.run(streams, OUTPUT_TOKENS), streams)


@contextlib.contextmanager
def whole_machine() -> Iterator[None]:
    """One such benchmark at a time; and nothing it has started outlives it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with (Path(tempfile.gettempdir()) / "penstock-bench.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another benchmark has the machine: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_alone(loop: Loop, served: Served, streams: int) -> dict[str, float]:
    """The loop's seconds, those of its parts, and cores that others took."""
    with served.stopped():
        busy = busy_seconds()
        result = loop.run(streams, PROMPT_TOKENS, OUTPUT_TOKENS)
        return result | {"others": (busy_seconds() - busy - result["cpu"]) / result["seconds"]}


def busy_seconds() -> float:
    """Seconds of all cores since the machine started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(process: psutil.Process) -> float:
    """That its threads had. To the nanosecond, where the kernel's own times have ticks of 10 ms."""
    try:
        return (
            sum(
                int(Path(f"/proc/{process.pid}/task/{thread.id}/schedstat").read_text().split()[0])
                for thread in process.threads()
            )
            / 1e9
        )
    except (OSError, psutil.Error):  # the kernel keeps no such figures, or a thread has ended meanwhile
        return float(sum(process.cpu_times()[:2]))


def stage_of(process: psutil.Process) -> str:
    """gateway, tokenizer, compute, sampler or redis."""
    found = re.search(r"services\.(\w+)", " ".join(process.cmdline()))
    return found[1] if found else "redis"


def metric(text: str, name: str, label: str = "") -> float:
    """The sum of a metric's samples that have the label."""
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{") and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def compare(alone: dict[str, float], served: dict[str, float], streams: int) -> dict[str, float]:
    """One round's figures; ms are of a step."""
    tokens, steps, loop_steps = streams * OUTPUT_TOKENS, served["steps"], alone["steps"]
    figures = {
        "ratio": alone["seconds"] / served["seconds"],
        "served_tokens_per_s": tokens / served["seconds"],
        "loop_tokens_per_s": tokens / alone["seconds"],
        "ttft_ms": served["ttft"] * 1e3,
        "others_cores": max(served["others"], alone["others"]),
        "steps": steps,
        "loop_steps": loop_steps,
    }
    loop_parts = {
        "forward": alone["forward"],
        "reduce": alone["reduce"],
        "schedule": alone["seconds"] - alone["forward"] - alone["reduce"],
    }
    served_parts = {part: served[part] for part in STEP_PARTS} | {
        "outside": served["seconds"] - sum(served[part] for part in STEP_PARTS)
    }
    figures |= {
        f"loop_{part}_ms": seconds / loop_steps * 1e3
        for part, seconds in (loop_parts | {"step": alone["seconds"]}).items()
    }
    figures |= {
        f"{part}_ms": seconds / steps * 1e3 for part, seconds in (served_parts | {"step": served["seconds"]}).items()
    }
    figures |= {
        f"{name.replace(' ', '_')}_ms": seconds / steps * 1e3
        for name, seconds in served.items()
        if name.startswith("cpu ")
    }
    figures["cpu_loop_ms"] = alone["cpu"] / loop_steps * 1e3
    figures |= {
        f"{name.removeprefix('cpu ')}_us_a_token": seconds / tokens * 1e6
        for name, seconds in served.items()
        if name.startswith("cpu ") and name != "cpu compute"
    }
    beside = {
        part: sum(seconds for name, seconds in parts.items() if name not in ("forward", "outside"))
        for part, parts in (("loop", loop_parts), ("served", served_parts))
    }
    figures["compute_us_a_token"] = (beside["served"] - served["wait"] - beside["loop"]) / tokens * 1e6
    return figures | {f"redis_{name}": served[f"redis {name}"] / steps for name in REDIS_COUNTS}


def show(streams: int, figures: dict[str, float]) -> None:
    rates = (
        f"{figures['served_tokens_per_s']:.1f} tokens/s served, {figures['loop_tokens_per_s']:.1f} by the loop alone"
    )
    steps = f"{figures['steps']:.0f} steps, {figures['loop_steps']:.0f} of the loop"
    print(
        f"\n{streams} streams: ratio {figures['ratio']:.3f} ({rates}); TTFT {figures['ttft_ms']:.0f} ms; {steps}; "
        f"others {figures['others_cores']:.2f} cores"
    )
    print(f"{'ms a step':>12}{'loop':>10}{'served':>10}{'more':>10}")
    for part in (*STEP_PARTS, "outside", "step"):
        alone, served = figures.get(f"loop_{part}_ms", 0.0), figures[f"{part}_ms"]
        print(f"{part:>12}{alone:10.3f}{served:10.3f}{served - alone:+10.3f}")
    print(
        "CPU, ms a step: "
        + ", ".join(f"{name[4:-3]} {value:.2f}" for name, value in figures.items() if name.startswith("cpu_"))
    )
    print(
        "CPU, us a token: "
        + ", ".join(f"{name[:-11]} {value:.1f}" for name, value in figures.items() if name.endswith("_us_a_token"))
    )
    kilobytes = f"{figures['redis_bytes_in'] / 1e3:.1f} kB in, {figures['redis_bytes_out'] / 1e3:.1f} kB out"
    print(
        f"Redis, a step: {figures['redis_commands']:.1f} commands in {figures['redis_reads']:.1f} reads, {kilobytes}",
        flush=True,
    )


def measure(loop: Loop, served: Served, all_streams: list[int], rounds: int) -> dict[int, dict[str, float]]:
    """The median figures by the number of streams."""
    loop.run(max(all_streams), PROMPT_TOKENS, 8)  # warm
    served.run(max(all_streams), 8)
    found: dict[int, list[dict[str, float]]] = {streams: [] for streams in all_streams}
    for number in range(rounds):
        for streams in all_streams:
            attempts: list[dict[str, float]] = []
            while not attempts or (attempts[-1]["others_cores"] > NOISE and len(attempts) < MAX_ATTEMPTS):
                attempts.append(measure_pair(loop, served, streams, is_served_first=number % 2 == 1))
                print(
                    f"round {number + 1}, {streams} streams: ratio {attempts[-1]['ratio']:.3f}, others "
                    f"{attempts[-1]['others_cores']:.2f} cores",
                    flush=True,
                )
            found[streams].append(min(attempts, key=lambda figures: figures["others_cores"]))
    return {
        streams: {name: statistics.median(each[name] for each in some) for name in some[0]}
        for streams, some in found.items()
    }


def compare_on(
    model: Path, flags: list[str], folder: Path, all_streams: list[int], rounds: int
) -> tuple[int, dict[int, dict[str, float]]]:
    """The loop's threads, and the median figures by the number of streams. flags: compute's, of
    both sides; folder: for logs and data.
    """
    flags = ["--model", str(model), "--dtype", "bfloat16", "--no-prefix-caching", "--speculate", "off", *flags]
    loop = Loop(flags, folder / "loop.log")
    try:
        served = Served(flags, folder, model.name)
        try:
            return loop.num_threads, measure(loop, served, all_streams, rounds)
        finally:
            served.close()
    finally:
        loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The pipeline's cost: HTTP tokens/s over the compute loop's, and where the rest goes."
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of a model that is made (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a folder to use instead")
    parser.add_argument("--quantization", default="none", help="of weights, on both sides (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of both sides (default: %(default)s)")
    parser.add_argument("--kv-cache-memory", default="1GiB", help="of each side (default: %(default)s)")
    parser.add_argument("--run-ahead", type=int, help="of the pipeline's compute; by default the product's")
    args = parser.parse_args()
    with whole_machine(), model_folder(args.model, args.shape) as model, tempfile.TemporaryDirectory() as folder:
        flags = [
            "--quantization",
            args.quantization,
            "--device",
            args.device,
            "--kv-cache-memory",
            args.kv_cache_memory,
        ]
        if args.run_ahead is not None:
            flags += ["--run-ahead", str(args.run_ahead)]
        num_threads, found = compare_on(model, flags, Path(folder), args.streams, args.rounds)
    for streams, figures in found.items():
        show(streams, figures)
    head = {
        "model": model.name,
        "device": args.device,
        "quantization": args.quantization,
        "run_ahead": args.run_ahead,
        "rounds": args.rounds,
        "threads": num_threads,
    }
    rounded = {
        streams: {name: round(value, 4) for name, value in figures.items()} for streams, figures in found.items()
    }
    print(json.dumps(head | {"streams": rounded}))


if __name__ == "__main__":
    main()
