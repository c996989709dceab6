"""What does the pipeline cost? Output tokens/s at the HTTP client over those of the compute loop alone.

Method: a random model of the shape qwen2.5-0.5b in bfloat16, 8 streams at once, 128 tokens in, 128 out, greedy, eos ignored. The loop alone is
the same scheduler, runner and candidate reduction in one process, its decisions taken inline. The two take turns on the same machine;
each round gives a ratio, the median is reported. Tokens are counted from the first submission to the last event (TTFT included) on both
sides. Ceiling: 1.0, for the pipeline does the same steps; what is missing went into round trips, HTTP and the client, which share
the machine's cores. The tokens themselves may differ between the two: they are timed, not compared.

    python -m bench.pipeline --rounds 3
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128


def prompts(count: int) -> list[list[int]]:
    return [[(7 * number + 13 * at) % 2000 + 5 for at in range(PROMPT_TOKENS)] for number in range(count)]


def run_inline(model: Path, streams: int, out: Path) -> None:
    """The compute loop alone, in a process of its own; writes seconds and the share of each part."""
    code = f"import bench.pipeline as b; b.inline({str(model)!r}, {streams}, {str(out)!r})"
    subprocess.run(["nice", "-n", "5", sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)


def inline(model: str, streams: int, out: str) -> None:
    from services.compute.__main__ import build_engine
    from services.compute.candidates.reduction import reduce
    from services.compute.sequence import Sequence
    from shared.model_files import open_model
    from shared.sampling_params import SamplingParams
    from shared.settings import ComputeSettings

    settings = ComputeSettings(model=model, dtype="bfloat16", prefix_caching=False)
    scheduler, runner, _ = build_engine(settings, open_model(model, weights=True))
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)

    def generate(num_tokens: int) -> dict[str, float]:
        parts = {"forward_s": 0.0, "reduce_s": 0.0}
        started = time.perf_counter()
        for number, prompt in enumerate(prompts(streams)):
            scheduler.add(Sequence(number, str(number), list(prompt), len(prompt), params))
        while (batch := scheduler.schedule()) is not None:
            at = time.perf_counter()
            logits = runner.forward(batch)
            parts["forward_s"] += time.perf_counter() - at
            at = time.perf_counter()
            sampled = batch.sampled
            scheduler.advance(batch)
            if sampled:
                rows = reduce(logits, sampled)
                for sequence, token_id in zip(sampled, rows.token_ids[:, 0].tolist(), strict=True):
                    scheduler.append(sequence, token_id)
                    if sequence.num_output_tokens == num_tokens:
                        scheduler.finish(sequence)
            parts["reduce_s"] += time.perf_counter() - at
        return {"seconds": time.perf_counter() - started, **parts}

    generate(4)
    Path(out).write_text(json.dumps(generate(OUTPUT_TOKENS)))


async def run_http(url: str, model: str, streams: int) -> tuple[float, list[float]]:
    """Seconds from the first submission to the last event, and each stream's time to its first event.

    A plain socket each: a client library that parses every chunk in Python would take more of the cores than the gateway does.
    """
    host, port = url.removeprefix("http://").split(":")

    async def one(prompt: list[int]) -> float:
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        started, first, received = time.perf_counter(), 0.0, b""
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((head + body).encode())
        while data := await reader.read(65536):
            received += data
            if not first and b"data:" in data:
                first = time.perf_counter() - started
        writer.close()
        if b" 200 OK" not in received[:20] or received.count(b"\nid: ") < OUTPUT_TOKENS or not received.rstrip().endswith(b"0"):
            raise SystemExit(f"an incomplete stream: {received[:300]!r}")
        return first

    started = time.perf_counter()
    ttft = await asyncio.gather(*(one(prompt) for prompt in prompts(streams)))
    return time.perf_counter() - started, list(ttft)


def wait_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("the pipeline did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description="The pipeline's cost: HTTP tokens/s over the compute loop's.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--model", type=Path, help="a folder made by make-model; by default one is made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / args.shape
        if args.model is None:
            subprocess.run([sys.executable, "-m", "services.cli", "make-model", str(model), "--shape", args.shape], check=True)
        port = 18_431
        url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "services.cli",
            "up",
            "--model",
            str(model),
            "--no-prefix-caching",
            "--dtype",
            "bfloat16",
            "--data-dir",
            f"{folder}/data",
            "--port",
            str(port),
        ]
        environment = {**os.environ, "PENSTOCK_LOG_LEVEL": "error"}
        rounds = []
        for number in range(args.rounds):
            run_inline(model, args.streams, Path(folder) / "inline.json")
            alone = json.loads((Path(folder) / "inline.json").read_text())
            with (Path(folder) / "up.log").open("wb") as log:
                up = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                try:
                    wait_ready(url, up)
                    asyncio.run(run_http(url, model.name, 1))  # warm
                    seconds, ttft = asyncio.run(run_http(url, model.name, args.streams))
                finally:
                    up.terminate()
                    up.wait(30)
            tokens = args.streams * OUTPUT_TOKENS
            rounds.append({
                "inline_tokens_per_s": tokens / alone["seconds"], "http_tokens_per_s": tokens / seconds, "ratio": alone["seconds"] / seconds,
                "forward_share": alone["forward_s"] / alone["seconds"], "reduce_share": alone["reduce_s"] / alone["seconds"],
                "extra_ms_per_step": (seconds - alone["seconds"]) / OUTPUT_TOKENS * 1e3, "ttft_s": statistics.median(ttft),
            })  # fmt: skip
            print(f"round {number + 1}: " + "  ".join(f"{name} {value:.3f}" for name, value in rounds[-1].items()), flush=True)
        print(json.dumps({name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}))


if __name__ == "__main__":
    main()
