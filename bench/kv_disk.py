"""The worth of --kv-disk: the time to the first token of a long prompt, computed, found in memory,
found on the disk by a restarted compute stage, and computed by another replica of the host; and the
rate of requests whose prefixes do not fit in memory together.

Method: `penstock up` with the flag and without, a prompt of --words random numbers each round.
Compute is killed by -9 between two requests; its successor is warm: it has answered another prompt
before. Another replica that names the same folder answers what the killed one has computed. Then
--prefixes long prompts are asked for in turns, twice each, with a KV cache that holds some of them.

    python -m bench.kv_disk --model FILE_OR_FOLDER [--words 1200] [--rounds 3]
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from bench.pipeline import Served, stage_of
from services.operator.redis_server import url_of
from shared.wire.registry import look

BACK_S = 120.0  # until a killed stage has a successor
SETTLE_S = 15.0


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(str(rng.randrange(1000)) for _ in range(count))


def ask(served: Served, model: str, text: str) -> tuple[float, str, int, int]:
    """Seconds of a request for two tokens, its text, its prompt's tokens, and those that were found."""
    body = {"model": model, "prompt": text, "max_tokens": 2, "temperature": 0, "seed": 0, "ignore_eos": True}
    started_at = time.perf_counter()
    answer = (
        httpx.post(f"http://127.0.0.1:{served.port}/v1/completions", json=body, timeout=600, trust_env=False)
        .raise_for_status()
        .json()
    )
    usage = answer["usage"]
    return (
        time.perf_counter() - started_at,
        answer["choices"][0]["text"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def kill_compute(served: Served, model: str) -> None:
    [compute] = [each for each in served.launcher.children(recursive=True) if stage_of(each) == "compute"]
    os.kill(compute.pid, signal.SIGKILL)
    deadline = time.monotonic() + BACK_S
    while True:
        try:
            ask(served, model, "warm")
            served.children = served.launcher.children(recursive=True)
            return
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def measure_restart(model_path: str, folder: Path, num_words: int, rounds: int) -> dict[str, list[float]]:
    served = Served(["--model", model_path, "--kv-disk", f"{folder / 'kv'},8GiB"], folder / "restart", "")
    found: dict[str, list[float]] = {"computed": [], "in memory": [], "on disk": []}
    try:
        model = httpx.get(f"http://127.0.0.1:{served.port}/v1/models", trust_env=False).json()["data"][0]["id"]
        ask(served, model, words(num_words, 99))
        for number in range(rounds):
            text = words(num_words, number)
            answers = [ask(served, model, text), ask(served, model, text)]
            time.sleep(1.0)  # what is staged is written
            kill_compute(served, model)
            answers.append(ask(served, model, text))
            assert len({answer for _, answer, _, _ in answers}) == 1, "other bytes"
            for name, (seconds, _, num_tokens, num_cached) in zip(found, answers, strict=True):
                found[name].append(seconds)
                print(
                    f"round {number + 1}, {name}: {seconds:.3f} s, {num_cached} of {num_tokens} tokens found",
                    flush=True,
                )
    finally:
        served.close()
    return found


def measure_other(model_path: str, folder: Path, num_words: int, rounds: int) -> list[float]:
    """Seconds of requests for prompts that another replica of this host has computed, which is killed just before."""
    place = f"{folder / 'kv-of-two'},8GiB"
    served = Served(["--model", model_path, "--kv-disk", place], folder / "other", "")
    command = [
        sys.executable,
        "-m",
        "services.operator.cli",
        "serve",
        "compute",
        "--model",
        model_path,
        "--kv-disk",
        place,
    ]
    environment = {**os.environ, "PENSTOCK_LOG_LEVEL": "error", "PENSTOCK_REDIS_URL": url_of(folder / "other" / "data")}
    other: subprocess.Popen[bytes] | None = None
    found = []
    try:
        model = httpx.get(f"http://127.0.0.1:{served.port}/v1/models", trust_env=False).json()["data"][0]["id"]
        texts = [words(num_words, 200 + number) for number in range(rounds)]
        expected = [ask(served, model, text)[1] for text in texts]
        other = subprocess.Popen(command, env=environment)
        deadline = time.monotonic() + BACK_S
        while len(look(served.redis).of("compute")) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        with ThreadPoolExecutor(8) as pool:  # both are warm
            list(pool.map(lambda number: ask(served, model, words(20, 300 + number)), range(32)))
        for number, (text, answer) in enumerate(zip(texts, expected, strict=True)):
            [first] = [each for each in served.launcher.children(recursive=True) if stage_of(each) == "compute"]
            os.kill(first.pid, signal.SIGKILL)
            seconds, again, num_tokens, num_cached = ask(served, model, text)
            assert again == answer, "other bytes"
            found.append(seconds)
            print(
                f"round {number + 1}, of another replica: {seconds:.3f} s, {num_cached} of {num_tokens} tokens found",
                flush=True,
            )
            time.sleep(SETTLE_S)  # its successor is there, and it is forgotten
    finally:
        if other is not None:
            other.terminate()
            other.wait(30)
        served.children = served.launcher.children(recursive=True)
        served.close()
    return found


def measure_turns(model_path: str, folder: Path, num_words: int, prefixes: int, cache: str, *, has_disk: bool) -> float:
    """Requests/s of the second turn."""
    flags = [
        "--model",
        model_path,
        "--kv-cache-memory",
        cache,
        *(["--kv-disk", f"{folder / 'kv2'},8GiB"] if has_disk else []),
    ]
    served = Served(flags, folder / f"turns-{has_disk}", "")
    try:
        model = httpx.get(f"http://127.0.0.1:{served.port}/v1/models", trust_env=False).json()["data"][0]["id"]
        for number in range(prefixes):
            ask(served, model, words(num_words, 100 + number))
        started_at = time.perf_counter()
        for number in range(prefixes):
            ask(served, model, words(num_words, 100 + number))
        return prefixes / (time.perf_counter() - started_at)
    finally:
        served.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What is --kv-disk worth?")
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--words", type=int, default=1200, help="of a prompt, of some 3.3 tokens each (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefixes", type=int, default=8, help="that are asked for in turns (default: %(default)s)")
    parser.add_argument("--cache", default="256MiB", help="the KV cache that holds some of them (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("restart", "other", "turns-False", "turns-True"):
            (folder / name).mkdir()
        found = measure_restart(args.model, folder, args.words, args.rounds)
        found["of another"] = measure_other(args.model, folder, args.words, args.rounds)
        rates = {
            name: measure_turns(args.model, folder, args.words, args.prefixes, args.cache, has_disk=name == "with")
            for name in ("without", "with")
        }
    for name, seconds in found.items():
        print(f"{name:12} {statistics.median(seconds):7.3f} s")
    print(f"in turns     {rates['without']:7.2f} requests/s without the disk, {rates['with']:.2f} with it")
    print(json.dumps({"model": args.model, "seconds": found, "requests_per_s": rates}))


if __name__ == "__main__":
    main()
