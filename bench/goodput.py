"""How many requests/s does a server answer in time? And how fast is it if all come at once?

Goodput (Zhong et al., DistServe, OSDI 2024): the largest rate at which nine of ten requests meet a
limit of TTFT and one of TPOT. The limits are those of MLPerf Inference's LLM workloads, by name,
times a scale that the output says. MLPerf asks them of 99 of 100 requests, on its own models: these
are no results of MLPerf.

Method: a trace with arrival times (Azure's CSV) is replayed at one rate after the other: its times
are stretched, so its bursts stay. The rate is doubled or halved until one is met and one is not,
then the interval is halved on a logarithmic scale until its ends differ by a tenth. A replay ends
as soon as too many requests are late. Prompts are prose of as many tokens as the trace says, by the
model's tokenizer, times --lengths; no two begin alike. End tokens are ignored. TTFT: from sending
to the first text. TPOT: from there to the last text, by token.

With --texts, a ShareGPT-like JSON is asked instead, all at once, with its own texts, and asked for
as many tokens as its answers have. The four figures are those of PPL.LLM's benchmark: output
tokens/s, TTFT, TPOT, requests/s.

`penstock up` is started here; a peer by --peer, which takes turns with it: the other one is stopped
meanwhile, and each round begins with the other. Medians of the rounds, and their ratio.

    python -m bench.goodput --model SmolLM2-W8A8 --trace AzureLLMInferenceTrace_conv.csv --lengths
    0.25 --up="--no-prefix-caching"
    python -m bench.goodput --model M --texts chats.json --num-requests 128 --peer "vllm-serve M
    8123" --peer-url http://127.0.0.1:8123
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import uvloop

from bench.pipeline import Served, whole_machine
from bench.served import Answer, ask, ask_all, first_model, server_of, show, summarize
from bench.texts import Prose
from services.simulator.reading import reason
from services.simulator.trace import TraceRequest, load_trace
from shared.process.errors import StartupError

MET_SHARE = 0.9  # of the requests, in time
PRECISION = 1.1  # between a rate that was met and one that was not
FIRST_STEP, NEXT_STEP = 2.0, 1.25  # between the rates of a first search, and of one that knows the last one's result
MIN_REQUESTS = 20  # of a trial
PAUSE_S = 1.5  # after a trial: what was given up is cancelled there
PEER_READY_S = 300.0


@dataclass(frozen=True, slots=True)
class Limits:
    """In seconds."""

    ttft_s: float
    tpot_s: float

    def scaled(self, scale: float) -> "Limits":
        return Limits(self.ttft_s * scale, self.tpot_s * scale)

    def are_met(self, answer: Answer) -> bool:
        """One token has no TPOT."""
        return (
            not answer.error
            and bool(answer.times)
            and answer.times[0] <= self.ttft_s
            and not answer.tpot_s > self.tpot_s
        )


MLPERF = {  # loadgen/mlperf.conf of MLPerf Inference: the server and the interactive scenario
    "llama3.1-8b": Limits(2.0, 0.1),
    "llama3.1-8b-interactive": Limits(0.5, 0.03),
    "llama2-70b": Limits(2.0, 0.2),
    "llama2-70b-interactive": Limits(0.45, 0.04),
    "mixtral-8x7b": Limits(2.0, 0.2),
    "llama3.1-405b": Limits(6.0, 0.175),
    "llama3.1-405b-interactive": Limits(4.5, 0.08),
    "deepseek-r1": Limits(2.0, 0.08),
    "deepseek-r1-interactive": Limits(1.5, 0.015),
}


def highest_rate(meets: Callable[[float], bool], first: float, step: float, max_trials: int) -> float:
    """The highest rate that was met, within PRECISION of one that was not unless the trials are used
    up; 0: none was met. step: between rates until there is one of each."""
    low, high, rate = 0.0, math.inf, first
    for _ in range(max_trials):
        if meets(rate):
            low = rate
        else:
            high = rate
        if low and high / low <= PRECISION:
            break
        rate = low * step if high == math.inf else high / step if not low else math.sqrt(low * high)
    return low


def at_rate(requests: list[TraceRequest], rate: float) -> list[TraceRequest]:
    """The requests from the first one's arrival on, at `rate` requests/s in the mean, and their
    gaps as long to each other as they were.
    """
    first, last = requests[0].arrived_at, requests[-1].arrived_at
    stretch = (len(requests) - 1) / rate / (last - first) if last > first else 0.0
    return [replace(each, arrived_at=(each.arrived_at - first) * stretch) for each in requests]


def scaled(requests: list[TraceRequest], lengths: float, longest: int) -> list[TraceRequest]:
    """Lengths times a factor, from one token up; prompts are cut so that prompt and answer have
    `longest` tokens at most.
    """
    found = []
    for each in requests:
        num_output = min(longest - 1, max(1, round(each.num_output_tokens * lengths)))
        num_prompt = min(longest - num_output, max(1, round(each.num_prompt_tokens * lengths)))
        found.append(replace(each, num_prompt_tokens=num_prompt, num_output_tokens=num_output))
    return found


def window(requests: list[TraceRequest], number: int, count: int) -> list[TraceRequest]:
    """The requests of a round: `count` of them that follow each other; each round has others, as
    long as there are some.
    """
    start = number * count % max(1, len(requests) - count + 1)
    return requests[start : start + count]


async def try_rate(
    url: str, model: str, prompts: list[str], requests: list[TraceRequest], limits: Limits
) -> list[Answer] | None:
    """The answers of a replay; None as soon as too many are late."""
    tasks = [
        asyncio.create_task(ask(url, model, prompt, request)) for prompt, request in zip(prompts, requests, strict=True)
    ]
    num_late, may_be_late = 0, len(tasks) - math.ceil(MET_SHARE * len(tasks))
    try:
        for task in asyncio.as_completed(tasks):
            num_late += not limits.are_met(await task)
            if num_late > may_be_late:
                return None
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [each.result() for each in tasks]


class Peer:
    """A server of somebody else's, from outside."""

    def __init__(self, command: str, url: str, folder: Path) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.log = folder / "peer.log"
        with self.log.open("wb") as log:
            try:
                self.process = subprocess.Popen(shlex.split(command), stdout=log, stderr=log, start_new_session=True)
            except OSError as error:
                raise SystemExit(f"--peer: {error}") from None
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """One that is suspended works meanwhile."""
        self._each(psutil.Process.resume)
        try:
            yield
        finally:
            self.suspend()

    def suspend(self) -> None:
        self._each(psutil.Process.suspend)

    def close(self) -> None:
        self._each(psutil.Process.resume)
        self._each(psutil.Process.terminate)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self._each(psutil.Process.kill)

    def _each(self, order: Callable[[psutil.Process], None]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (
                *psutil.Process(self.process.pid).children(recursive=True),
                psutil.Process(self.process.pid),
            ):
                with contextlib.suppress(psutil.NoSuchProcess):
                    order(process)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + PEER_READY_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError, LookupError):
                if not asyncio.run(ask(self.url, first_model(self.url), "Hello", TraceRequest(1, 1))).error:
                    return
            time.sleep(1.0)
        raise SystemExit(f"the peer did not become ready:\n{self.log.read_text(errors='replace')[-2000:]}")


@dataclass
class Side:
    """A server, and its figures by round."""

    name: str
    server: Served | Peer
    url: str
    model: str
    rounds: list[dict[str, float]] = field(default_factory=list)
    rate: float = 0.0  # of the last search

    def median(self, figure: str) -> float:
        return statistics.median(each.get(figure, math.nan) for each in self.rounds)


def search(
    runner: asyncio.Runner,
    side: Side,
    prose: Prose,
    requests: list[TraceRequest],
    limits: Limits,
    args: argparse.Namespace,
) -> dict[str, float]:
    """The side's goodput on these requests, and the latencies at it."""
    best: list[tuple[list[Answer], list[TraceRequest]]] = []

    def meets(rate: float) -> bool:
        timed = at_rate(requests[: max(MIN_REQUESTS, math.ceil(rate * args.seconds))], rate)
        answers = runner.run(
            try_rate(side.url, side.model, [prose.take(each.num_prompt_tokens) for each in timed], timed, limits)
        )
        print(
            f"  {side.name}: {rate:.2f} requests/s ({len(timed)} requests) {'in time' if answers else 'too many late'}",
            flush=True,
        )
        if answers is not None:
            best.append((answers, timed))
        time.sleep(PAUSE_S)
        return answers is not None

    side.rate = highest_rate(meets, side.rate or args.first_rate, NEXT_STEP if side.rate else FIRST_STEP, args.trials)
    return {"goodput": side.rate} | (summarize(*best[-1]) if best else {})


def conversations(file: Path, prose: Prose, lengths: float, longest: int) -> list[tuple[str, TraceRequest]]:
    """The first question of each conversation, and the lengths of it and its answer. Raises
    StartupError for a file of another form.
    """
    tokenizer, found = prose.tokenizer, []
    try:
        for conversation in json.loads(file.read_text(encoding="utf-8")):
            question, answer = (
                tokenizer.encode(turn["value"], add_special_tokens=False).ids
                for turn in conversation["conversations"][:2]
            )
            [request] = scaled([TraceRequest(len(question), len(answer))], lengths, longest)
            found.append(
                (tokenizer.decode(question[: request.num_prompt_tokens], skip_special_tokens=False) or " ", request)
            )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StartupError(f"--texts {file}: not ShareGPT's JSON: {reason(error)}") from None
    return found


def show_goodput(sides: list[Side], requests: list[TraceRequest], limits: Limits, args: argparse.Namespace) -> None:
    lengths = [
        np.percentile([getattr(each, name) for each in requests], (50, 90))
        for name in ("num_prompt_tokens", "num_output_tokens")
    ]
    print(
        f"\n{args.trace.name}, lengths times {args.lengths:g}: {lengths[0][0]:.0f} and {lengths[0][1]:.0f} tokens in "
        "at p50 and p90, "
        f"{lengths[1][0]:.0f} and {lengths[1][1]:.0f} out. {MET_SHARE:.0%} of the requests meet MLPerf's limits of "
        f"{args.limits} times {args.limit_scale:g}: "
        f"TTFT {limits.ttft_s * 1e3:.0f} ms, TPOT {limits.tpot_s * 1e3:.0f} ms."
    )
    show_table(
        sides,
        {
            "goodput": "goodput, requests/s",
            "output_tokens_per_s": "output tokens/s",
            "ttft_p50_ms": "TTFT p50, ms",
            "tpot_p50_ms": "TPOT p50, ms",
        },
    )


def show_table(sides: list[Side], figures: dict[str, str]) -> None:
    """Medians of the rounds, the rounds of the first figure, and the ratio of two sides' medians."""
    print("\n| | " + " | ".join(side.name for side in sides) + " | ratio |\n|---|" + "---|" * (len(sides) + 1))
    for place, (figure, head) in enumerate(figures.items()):
        cells = [f"{side.median(figure):.2f}" for side in sides]
        if not place:
            cells = [
                f"{cell} ({', '.join(f'{each[figure]:.2f}' for each in side.rounds)})"
                for cell, side in zip(cells, sides, strict=True)
            ]
        ratio = (
            f"{sides[0].median(figure) / sides[1].median(figure):.2f}"
            if len(sides) > 1 and sides[1].median(figure)
            else ""
        )
        print(f"| {head} | " + " | ".join(cells) + f" | {ratio} |")
    print(
        json.dumps(
            {
                side.name: {figure: round(side.median(figure), 4) for figure in figures} | {"rounds": len(side.rounds)}
                for side in sides
            }
        )
    )


def take_turns(sides: list[Side], rounds: int, measure: Callable[[int, Side], dict[str, float]]) -> None:
    """Each round has all sides, and begins with another."""
    for number in range(rounds):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            with side.server.awake():
                side.rounds.append(measure(number, side))


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[list[Side]]:
    """`penstock up`, and the peer if there is one. All are suspended."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ["--model", str(args.model), *shlex.split(args.up)]
        served = stack.enter_context(contextlib.closing(Served(flags, folder, args.model.name)))
        sides = [Side("Penstock", served, *server_of(f"http://127.0.0.1:{served.port}", None))]
        served.suspend()
        if args.peer:
            peer = stack.enter_context(contextlib.closing(Peer(args.peer, args.peer_url, folder)))
            sides.append(Side(args.peer_name, peer, *server_of(peer.url, None)))
            peer.suspend()
        yield sides


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="a checkpoint folder with tokenizer.json, which all servers serve"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, help="a .csv of TIMESTAMP,ContextTokens,GeneratedTokens: search for the goodput"
    )
    source.add_argument("--texts", type=Path, help="a ShareGPT-like .json: all requests at once")
    parser.add_argument("--num-requests", type=int, default=64, help="of --texts, in each round (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=float,
        default=1.0,
        help="factor of prompts' and answers' lengths, for small machines (default: %(default)s)",
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=2048,
        help="tokens of prompt and answer; longer prompts are cut (default: %(default)s)",
    )
    parser.add_argument(
        "--limits",
        choices=MLPERF,
        default="llama3.1-8b",
        help="of TTFT and TPOT, as MLPerf has them (default: %(default)s)",
    )
    parser.add_argument("--limit-scale", type=float, default=1.0, help="factor of both limits (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of a trial, in which requests arrive (default: %(default)s)"
    )
    parser.add_argument(
        "--first-rate", type=float, default=2.0, help="requests/s of the first trial (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, default=8, help="of a search, at most (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--up",
        default="",
        metavar="FLAGS",
        help='further flags of `penstock up`, as in --up="--no-prefix-caching --jobs 0"',
    )
    parser.add_argument("--peer", default="", metavar="COMMAND", help="starts another server")
    parser.add_argument("--peer-url", default="http://127.0.0.1:8123", help="where it answers (default: %(default)s)")
    parser.add_argument("--peer-name", default="peer", help="in the tables (default: %(default)s)")
    return parser


def run(args: argparse.Namespace) -> None:
    """Raises StartupError for files that can't be read."""
    prose = Prose(args.model)
    trace = scaled(load_trace(str(args.trace), None), args.lengths, args.longest) if args.trace else []
    texts = conversations(args.texts, prose, args.lengths, args.longest) if args.texts else []
    limits = MLPERF[args.limits].scaled(args.limit_scale)
    with whole_machine(), servers(args) as sides, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        warm = [TraceRequest(64, 8)] * 8

        def measure(number: int, side: Side) -> dict[str, float]:
            answers = runner.run(ask_all(side.url, side.model, [prose.take(64) for _ in warm], warm, at_once=4))
            if error := next((each.error for each in answers if each.error), ""):
                raise SystemExit(f"{side.name} does not answer: {error[:300]}")
            if trace:
                return search(runner, side, prose, window(trace, number, len(trace) // args.rounds), limits, args)
            start = number * args.num_requests % len(texts)
            prompts, requests = map(list, zip(*(texts[start:] + texts[:start])[: args.num_requests], strict=True))
            answers = runner.run(ask_all(side.url, side.model, prompts, requests, at_once=len(prompts)))
            if error := next((each.error for each in answers if each.error), ""):
                raise SystemExit(f"{side.name} did not answer all: {error[:300]}")
            print(f"{side.name}, round {number + 1}:")
            show(figures := summarize(answers, requests))
            return figures

        take_turns(sides, args.rounds, measure)
    if trace:
        show_goodput(sides, trace, limits, args)
    else:
        heads = {
            "output_tokens_per_s": "throughput, tokens/s",
            "ttft_mean_ms": "TTFT, ms",
            "tpot_mean_ms": "TPOT, ms",
            "requests_per_s": "requests/s",
        }
        print(
            f"\n{args.num_requests} requests of {args.texts.name} at once, lengths times {args.lengths:g}; TTFT and "
            "TPOT are means:"
        )
        show_table(sides, heads)


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    if (
        min(args.lengths, args.limit_scale, args.seconds, args.first_rate) <= 0
        or min(args.num_requests, args.rounds, args.trials) < 1
        or args.longest < 2
    ):
        parser.error("numbers must be above 0, and --longest above 1")
    if not args.model.is_dir():
        parser.error(f"--model {args.model}: no such folder")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        run(args)
    except StartupError as error:
        sys.exit(f"bench.goodput: {error}")


if __name__ == "__main__":
    main()
