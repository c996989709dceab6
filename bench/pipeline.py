"""What does the pipeline cost? Output tokens/s at the HTTP client over those of the compute loop alone.

Method: a model (by default random weights in the shape qwen2.5-0.5b) in bfloat16, S streams at once, 128 tokens in, 128 out, greedy, eos ignored.
The loop alone is the same scheduler, runner and candidate reduction in one process at compute's niceness, its decisions taken inline. Both stay
loaded and take turns on the same machine; each round gives a ratio, the median is reported. Tokens are counted from the first submission to the
last event (TTFT included) on both sides. Ceiling: 1.0, for the pipeline does the same steps; what is missing went into HTTP, the other stages and
the client, which share the machine's cores. The tokens may differ between the two: they are timed, not compared.

    python -m bench.pipeline --streams 1 8 64 --shape smollm2-135m --rounds 3

Beside the ratio: where a step's time goes on both sides, by compute's own meter, and what a step costs in commands and bytes at Redis.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import redis

from services.redis_server import socket_path

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
PORT = 18_431
PARTS = ("schedule", "forward", "reduce", "publish", "wait")


def prompts(count: int) -> list[list[int]]:
    return [[(7 * number + 13 * at) % 2000 + 5 for at in range(PROMPT_TOKENS)] for number in range(count)]


def bare_loop(arguments: list[str]) -> None:
    """The compute loop alone, as a process of its own: reads a number of streams a line, answers with seconds and the time of each part."""
    from services.compute.batch import ScheduledBatch
    from services.compute.candidates.reduction import reduce
    from services.compute.engine import build_engine
    from services.compute.scheduling.loop import run_step
    from services.compute.sequence import Sequence
    from shared.model_files import open_model
    from shared.sampling_params import SamplingParams
    from shared.settings import ComputeSettings, load_settings

    os.nice(5)
    settings = load_settings(ComputeSettings, arguments)
    engine = build_engine(settings, open_model(settings.model, weights=True))
    num_added = 0

    def generate(streams: int, num_tokens: int) -> dict[str, float]:
        nonlocal num_added
        parts = {"steps": 0.0, "forward": 0.0, "reduce": 0.0}

        def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> list[int]:
            began_at = time.perf_counter()
            logits = engine.runner.forward(batch)
            ran_at = time.perf_counter()
            chosen: list[int] = reduce(logits, sampled).chosen.tolist() if sampled else []
            parts["steps"] += 1
            parts["forward"] += ran_at - began_at
            parts["reduce"] += time.perf_counter() - ran_at
            return chosen

        started = time.perf_counter()
        for prompt in prompts(streams):
            num_added += 1
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
            engine.scheduler.add(Sequence(num_added, str(num_added), list(prompt), len(prompt), params))
        while run_step(engine.scheduler, decide) is not None:
            pass
        return {"seconds": time.perf_counter() - started, **parts}

    generate(1, 4)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(int(line), OUTPUT_TOKENS)), flush=True)


async def run_http(model: str, streams: int) -> tuple[float, list[float]]:
    """Seconds from the first submission to the last event, and each stream's time to its first event.

    A plain socket each: a client library that parses every chunk in Python would take more of the cores than the gateway does.
    """

    async def one(prompt: list[int]) -> float:
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        started, first, received = time.perf_counter(), 0.0, bytearray()
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        writer.write((head + body).encode())
        while data := await reader.read(65536):
            received += data
            if not first and b"data:" in data:
                first = time.perf_counter() - started
        writer.close()
        if not received.startswith(b"HTTP/1.1 200") or b'"finish_reason":"length"' not in received or b"data: [DONE]" not in received:
            raise SystemExit(f"an incomplete stream: {bytes(received[:300])!r}")
        return first

    started = time.perf_counter()
    ttft = await asyncio.gather(*(one(prompt) for prompt in prompts(streams)))
    return time.perf_counter() - started, list(ttft)


class Served:
    """`penstock up` on the model."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "services.cli", "up", "--data-dir", str(folder / "data"), "--port", str(PORT), *arguments]
        self.log = (folder / "up.log").open("wb")
        self.process = subprocess.Popen(command, env={**os.environ, "PENSTOCK_LOG_LEVEL": "error"}, stdout=self.log, stderr=self.log)
        self.redis = redis.Redis(unix_socket_path=str(socket_path(folder / "data")))
        self.url = f"http://127.0.0.1:{PORT}"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready", timeout=2, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise SystemExit(f"the pipeline did not become ready: {Path(self.log.name).read_text()[-2000:]}")

    def counts(self) -> dict[str, float]:
        """Totals so far: compute's steps and their parts in s, Redis' commands and bytes. Compute says what it has once a second."""
        time.sleep(2.2)
        text = httpx.get(f"{self.url}/metrics", timeout=5, trust_env=False).text
        found = {part: float(value) for part, value in re.findall(r'^penstock_step_seconds_total\{part="(\w+)",[^}]*\} (\S+)$', text, re.MULTILINE)}
        [steps] = re.findall(r"^penstock_steps_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
        info = self.redis.info()
        return {
            **found,
            "steps": float(steps),
            "commands": info["total_commands_processed"],
            "bytes": info["total_net_input_bytes"] + info["total_net_output_bytes"],
        }


@contextmanager
def both(folder: Path, arguments: list[str]) -> Iterator[tuple["subprocess.Popen[str]", Served]]:
    """The bare loop and the pipeline, loaded and idle."""
    code = f"import bench.pipeline as b; b.bare_loop({arguments!r})"
    bare = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    served = Served(folder, arguments)
    try:
        assert bare.stdout is not None and bare.stdout.readline() == "ready\n", "the bare loop did not start"
        served.wait_ready()
        yield bare, served
    finally:
        for process in (bare, served.process):
            process.terminate()
            process.wait(30)


def measure(bare: "subprocess.Popen[str]", served: Served, model: str, streams: int) -> dict[str, float]:
    """One round."""
    assert bare.stdin is not None and bare.stdout is not None
    bare.stdin.write(f"{streams}\n")
    bare.stdin.flush()
    alone = json.loads(bare.stdout.readline())
    before = served.counts()
    seconds, ttft = asyncio.run(run_http(model, streams))
    after = served.counts()
    steps = after["steps"] - before["steps"]
    tokens = streams * OUTPUT_TOKENS
    found = {"ratio": alone["seconds"] / seconds, "bare_tokens_per_s": tokens / alone["seconds"], "served_tokens_per_s": tokens / seconds}
    found |= {"bare_step_ms": alone["seconds"] / alone["steps"] * 1e3, "served_step_ms": seconds / steps * 1e3}
    found |= {f"bare_{part}_ms": alone[part] / alone["steps"] * 1e3 for part in ("forward", "reduce")}
    found |= {f"served_{part}_ms": (after[part] - before[part]) / steps * 1e3 for part in PARTS}
    found |= {"commands_per_step": (after["commands"] - before["commands"]) / steps, "bytes_per_step": (after["bytes"] - before["bytes"]) / steps}
    return found | {"ttft_s": statistics.median(ttft)}


def main() -> None:
    parser = argparse.ArgumentParser(description="The pipeline's cost: HTTP tokens/s over the compute loop's.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[8], help="at once; several are measured one after the other (default: 8)")
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of a model that is made (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a folder to use instead")
    parser.add_argument("--quantization", default="none", help="of weights (default: %(default)s)")
    parser.add_argument("--run-ahead", default="1", help="undecided tokens upon which a sequence is computed (default: %(default)s)")
    args = parser.parse_args()
    medians = {}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / args.shape
        if args.model is None:
            subprocess.run([sys.executable, "-m", "services.cli", "make-model", str(model), "--shape", args.shape], check=True, stderr=subprocess.DEVNULL)
        flags = ["--no-prefix-caching", "--dtype", "bfloat16", "--kv-cache-memory", "2GiB", "--quantization", args.quantization, "--run-ahead", args.run_ahead]
        with both(Path(folder), ["--model", str(model), *flags]) as (bare, served):
            for streams in args.streams:
                measure(bare, served, model.name, streams)  # warm: the first of a size allocates
                rounds = [measure(bare, served, model.name, streams) for _ in range(args.rounds)]
                medians[str(streams)] = {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}
                ratios = " ".join(f"{each['ratio']:.3f}" for each in rounds)
                print(f"{model.name}, {streams} streams, ratio {ratios}; medians:")
                print("  " + "  ".join(f"{name} {value:.3f}" for name, value in medians[str(streams)].items()), flush=True)
    print(json.dumps({"model": model.name, "quantization": args.quantization, "run_ahead": args.run_ahead, "streams": medians}))


if __name__ == "__main__":
    main()
