"""How fast is a server? Any with OpenAI's completions: requests/s, TTFT, TPOT, ITL, errors; and
does the crowd change what it answers?

Method: N requests of English prose (Python's own reference manual, cut at a different place for
each request), greedy, end tokens ignored, streamed, each on a connection of its own; all at once,
or at random times with a rate (a Poisson process). What comes is kept with its time and read when
all is over. TTFT: from sending to the first text. ITL: between two pieces of text of a stream;
servers may put several tokens into one, so look at TPOT, the time per token after the first, beside
it. Tokens are counted by the server's own usage. Servers are compared in turns, in one run of the
machine: this program measures one of them once.

With --invariance every request is sent again alone, and the texts that differ from those in the crowd are counted.

    python -m bench.served http://127.0.0.1:8000 --num-requests 64
    python -m bench.served http://127.0.0.1:8000 --rate 4 --lengths synthetic --plot itl.png
    python -m bench.served http://127.0.0.1:8000 --num-requests 24 --invariance
"""

import argparse
import asyncio
import bisect
import itertools
import json
import math
import re
import statistics
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop

from bench.load import Stream, post
from services.simulator.trace import TraceRequest, load_trace, with_rate

WORDS_PER_TOKEN = 0.6  # of the manual's prose and code, roughly; what the server counts is reported
CROWD = ((100, 900), (30, 130))  # prompt and output tokens, evenly distributed


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's. Times in seconds from its sending."""

    text: str
    error: str  # empty: none
    num_prompt_tokens: int
    num_output_tokens: int
    times: list[float]  # of each piece of text
    ended_at: float

    @property
    def tpot_s(self) -> float:
        """Per token after the first; not a number with fewer than two."""
        return (
            (self.times[-1] - self.times[0]) / (self.num_output_tokens - 1)
            if self.num_output_tokens > 1 and self.times
            else math.nan
        )


def lengths_of(source: str, count: int, seed: int) -> list[TraceRequest]:
    """`crowd`, or what a trace says."""
    if source != "crowd":
        return load_trace(source, count, seed=seed)
    rng = np.random.default_rng(seed)
    return [
        TraceRequest(int(rng.integers(*CROWD[0], endpoint=True)), int(rng.integers(*CROWD[1], endpoint=True)))
        for _ in range(count)
    ]


def prose(requests: list[TraceRequest]) -> list[str]:
    """A prompt for each request, of about its length; no two begin alike."""
    words = re.findall(r"\S+\s*", " ".join(topics[name] for name in sorted(topics)))
    starts = np.linspace(
        0, len(words) - max(request.num_prompt_tokens for request in requests), len(requests), dtype=int
    )
    return [
        "".join(words[at : at + max(1, int(request.num_prompt_tokens * WORDS_PER_TOKEN))])
        for at, request in zip(starts, requests, strict=True)
    ]


def first_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        return str(json.load(reply)["data"][0]["id"])


def server_of(url: str, model: str | None) -> tuple[str, str]:
    """The server's address, without /v1, and the model to ask: its first, unless one is named.
    Raises SystemExit if it lists none.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        return url, model or first_model(url)
    except (OSError, ValueError, LookupError) as error:
        raise SystemExit(f"{url}: no list of models: {error}") from None


async def ask(url: str, model: str, prompt: str, request: TraceRequest) -> Answer:
    """Send it when its time has come, and read what came of it."""
    await asyncio.sleep(request.arrived_at)
    parts = urlsplit(url)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        packed = post(parts.netloc, parts.path.rstrip("/") + "/v1/completions", body)
        connection, stream = await asyncio.get_running_loop().create_connection(
            lambda: Stream(packed), parts.hostname or "localhost", parts.port or 80
        )
    except OSError as error:
        return Answer("", str(error), 0, 0, [], 0.0)
    try:
        await stream.ended
    finally:
        connection.close()  # of one that is given up
    return read(stream)


def read(stream: Stream) -> Answer:
    """The events of a stream, each at the time at which its last byte came."""
    head, _, _ = stream.received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return Answer("", stream.received[:500].decode(errors="replace") or "the connection was closed", 0, 0, [], 0.0)
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    text: list[str] = []
    times: list[float] = []
    usage: dict[str, int] = {}
    error = "the stream has no end"
    at = stream.sent_at
    for at, line in lines_of(stream, len(head) + 4, is_chunked=is_chunked):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            error = ""
            break
        try:
            chunk: dict[str, Any] = json.loads(data)
        except ValueError:
            error = "the stream ends in the middle of an event"
            break
        if "error" in chunk:
            error = str(chunk["error"])
            break
        usage = chunk.get("usage") or usage
        if chunk.get("choices") and chunk["choices"][0].get("text"):
            text.append(chunk["choices"][0]["text"])
            times.append(at - stream.sent_at)
    return Answer(
        "".join(text),
        error,
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0),
        times,
        at - stream.sent_at,
    )


def lines_of(stream: Stream, start: int, *, is_chunked: bool) -> Iterator[tuple[float, bytes]]:
    """The lines of a body that begins at `start`, each with the time at which its end arrived."""
    ends = list(itertools.accumulate(len(data) for _, data in stream.arrivals))
    rest = b""
    for at, piece in pieces_of(stream.received, start) if is_chunked else [(start, stream.received[start:])]:
        *lines, rest = (rest + piece).split(b"\n")
        position = at + len(piece) - len(rest) - sum(len(line) + 1 for line in lines)
        for line in lines:
            position += len(line) + 1
            yield stream.arrivals[bisect.bisect_left(ends, position)][0], line.rstrip(b"\r")
    if rest:
        yield stream.arrivals[-1][0], rest


def pieces_of(received: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """The chunks of a body in chunked transfer coding, and where they begin."""
    while (end := received.find(b"\r\n", at)) >= 0 and (size := int(received[at:end] or b"0", 16)):
        yield end + 2, received[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


async def ask_all(
    url: str, model: str, prompts: list[str], requests: list[TraceRequest], *, at_once: int
) -> list[Answer]:
    """at_once: how many may be under way."""
    places = asyncio.Semaphore(at_once)

    async def one(prompt: str, request: TraceRequest) -> Answer:
        async with places:
            return await ask(url, model, prompt, request)

    return await asyncio.gather(*(one(prompt, request) for prompt, request in zip(prompts, requests, strict=True)))


def summarize(answers: list[Answer], requests: list[TraceRequest]) -> dict[str, float]:
    """Figures of a run; times in ms."""
    good = [answer for answer in answers if not answer.error and answer.times]
    figures: dict[str, float] = {"requests": len(answers), "errors": len(answers) - len(good)}
    if not good:
        return figures
    seconds = max(request.arrived_at + answer.ended_at for answer, request in zip(answers, requests, strict=True))
    prompt_tokens, output_tokens = (
        sum(getattr(answer, name) for answer in good) for name in ("num_prompt_tokens", "num_output_tokens")
    )
    figures |= {
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
    }
    figures |= {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    itl = [late - early for answer in good for early, late in zip(answer.times, answer.times[1:], strict=False)]
    times = {
        "ttft": [answer.times[0] for answer in good],
        "tpot": [answer.tpot_s for answer in good if answer.tpot_s >= 0],
        "itl": itl,
    }
    for name, values in times.items():
        if values:
            figures |= {
                f"{name}_{share}_ms": float(np.percentile(values, int(share[1:]))) * 1e3 for share in ("p50", "p99")
            }
            figures[f"{name}_mean_ms"] = statistics.fmean(values) * 1e3
    return figures


def plot(answers: list[Answer], file: Path) -> None:
    """Text over time, a line for each request, and the distribution of ITL."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found]
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(10, 7))
    lines, bars = figure.subplots(2, 1)
    for answer in answers:
        lines.plot(answer.times, range(1, len(answer.times) + 1), linewidth=0.7)
    lines.set(xlabel="seconds since it was sent", ylabel="pieces of text")
    itl = [
        1e3 * (late - early) for answer in answers for early, late in zip(answer.times, answer.times[1:], strict=False)
    ]
    bars.hist(itl, bins=80, log=True)
    bars.set(xlabel="ITL, ms", ylabel="count")
    figure.tight_layout()
    figure.savefig(file)


def show(figures: dict[str, float]) -> None:
    print(f"{figures['requests']:.0f} requests, {figures['errors']:.0f} errors")
    if "seconds" in figures:
        print(
            f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.1f} output tokens/s in "
            f"{figures['seconds']:.1f} s"
        )
        for name in ("ttft", "tpot", "itl"):
            shown = [
                f"{kind} {figures[f'{name}_{kind}_ms']:9.1f} ms"
                for kind in ("p50", "p99", "mean")
                if f"{name}_{kind}_ms" in figures
            ]
            print(f"{name.upper():5}{'   '.join(shown)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests/s, TTFT, TPOT and ITL of an OpenAI-compatible server.")
    parser.add_argument("url", help="as in http://127.0.0.1:8000")
    parser.add_argument("--model", help="by default the server's first")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--rate", type=float, help="requests/s, at random times; by default all at once")
    parser.add_argument(
        "--lengths",
        default="crowd",
        help=(
            "crowd (100 to 900 tokens in, 30 to 130 out), synthetic (chat turns), or a trace file (default: "
            "%(default)s)"
        ),
    )
    parser.add_argument("--warm", type=int, default=4, help="requests before the measurement (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--invariance", action="store_true", help="send each again, alone, and count the texts that differ"
    )
    parser.add_argument("--plot", type=Path, help="a picture's file")
    args = parser.parse_args()
    url, model = server_of(args.url, args.model)
    requests = lengths_of(args.lengths, args.num_requests, args.seed)
    if args.rate:
        requests = with_rate(requests, args.rate, seed=args.seed)
    prompts = prose(requests)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        warm = [TraceRequest(request.num_prompt_tokens, 8) for request in requests[: args.warm]]
        runner.run(ask_all(url, model, [prompt[1:] for prompt in prompts[: args.warm]], warm, at_once=args.warm or 1))
        answers = runner.run(ask_all(url, model, prompts, requests, at_once=len(requests)))
        figures = summarize(answers, requests)
        show(figures)
        for problem in sorted({answer.error for answer in answers if answer.error}):
            print(f"error: {problem[:300]}")
        if args.invariance:
            unhurried = [TraceRequest(request.num_prompt_tokens, request.num_output_tokens) for request in requests]
            alone = runner.run(ask_all(url, model, prompts, unhurried, at_once=1))
            pairs = [
                (one.text, other.text)
                for one, other in zip(answers, alone, strict=True)
                if not one.error and not other.error
            ]
            figures["texts_compared"], figures["texts_that_differ"] = (
                len(pairs),
                sum(one != other for one, other in pairs),
            )
            print(
                f"{figures['texts_that_differ']:.0f} of {len(pairs)} texts differ from those of the same requests alone"
            )
    if args.plot:
        plot(answers, args.plot)
    described = {"url": url, "model": model, "lengths": args.lengths, "rate": args.rate, "seed": args.seed}
    print(json.dumps(described | {name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
