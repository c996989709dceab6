"""Traces: lengths and arrival times of requests, from a file or made up."""

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from services.simulator.reading import reason
from shared.process.errors import StartupError

CHARS_PER_TOKEN = 4.0  # of English text, for files that hold texts
# The lengths of some thousand shared chat turns: prompts 104 tokens in the mean, 30 at the median;
# answers 315 and 286.
PROMPT_MU, PROMPT_SIGMA, LONGEST_PROMPT = 3.71, 1.31, 2048  # log-normal
ANSWER_SHAPE, ANSWER_SCALE, LONGEST_ANSWER = 1.3, 341.0, 1536  # Weibull


@dataclass(frozen=True, slots=True)
class TraceRequest:
    num_prompt_tokens: int
    num_output_tokens: int
    arrived_at: float = 0.0  # s from the beginning
    num_shared_tokens: int = 0  # first tokens of the prompt that all requests have in common


def load_trace(source: str, count: int | None, *, seed: int = 0) -> list[TraceRequest]:
    """`synthetic`, or a file: ShareGPT's .json (texts), the .csv of Azure's traces, or .jsonl with
    prompt_tokens, output_tokens and, if it has them, arrived_at.

    A file with fewer requests than `count` is gone through again. Raises StartupError for a file
    that is not like this.
    """
    if source == "synthetic":
        return synthetic(count or 1000, seed)
    path = Path(source)
    try:
        found = list(READERS.get(path.suffix, read_lines)(path))
    except OSError as error:
        raise StartupError(f"--trace {source}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise StartupError(
            f"--trace {source}: not ShareGPT's JSON, Azure's CSV, or lines of prompt_tokens and output_tokens: "
            f"{reason(error)}"
        ) from None
    if not found:
        raise StartupError(f"--trace {source}: it holds no request")
    for request in found:
        if request.num_prompt_tokens < 1 or request.num_output_tokens < 1 or not 0 <= request.arrived_at < math.inf:
            raise StartupError(
                f"--trace {source}: a request needs at least one prompt and one output token, and a time from 0 up: "
                f"{request}"
            )
    period = max(request.arrived_at for request in found)
    count = count or len(found)
    rounds = -(-count // len(found))
    return [
        replace(request, arrived_at=request.arrived_at + period * number)
        for number in range(rounds)
        for request in found
    ][:count]


def synthetic(count: int, seed: int) -> list[TraceRequest]:
    """Requests with the lengths of chat turns, all there at once."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(PROMPT_MU, PROMPT_SIGMA, count), 1, LONGEST_PROMPT)
    answers = np.clip(ANSWER_SCALE * rng.weibull(ANSWER_SHAPE, count), 1, LONGEST_ANSWER)
    return [TraceRequest(int(prompt), int(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


def read_share_gpt(path: Path) -> Iterator[TraceRequest]:
    """The first question and answer of each conversation, in tokens of CHARS_PER_TOKEN
    characters."""
    for conversation in json.loads(path.read_text(encoding="utf-8")):
        prompt, answer = (
            max(1, round(len(turn["value"]) / CHARS_PER_TOKEN)) for turn in conversation["conversations"][:2]
        )
        yield TraceRequest(prompt, answer)


def read_lines(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            fields: dict[str, Any] = json.loads(line)
            yield TraceRequest(
                int(fields["prompt_tokens"]), int(fields["output_tokens"]), float(fields.get("arrived_at", 0.0))
            )


def read_azure(path: Path) -> Iterator[TraceRequest]:
    """TIMESTAMP, ContextTokens and GeneratedTokens (Azure's public LLM inference traces; Patel et al.,
    Splitwise, 2024), in the order of their arrival."""
    with path.open(encoding="utf-8", newline="") as lines:
        first: datetime | None = None
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"])
            first = first or at
            yield TraceRequest(int(row["ContextTokens"]), int(row["GeneratedTokens"]), (at - first).total_seconds())


READERS: dict[str, Callable[[Path], Iterator[TraceRequest]]] = {
    ".json": read_share_gpt,
    ".csv": read_azure,
}  # by suffix


def with_speed(requests: list[TraceRequest], speed: float) -> list[TraceRequest]:
    """Requests of a trace whose times pass so many times as fast."""
    return [replace(request, arrived_at=request.arrived_at / speed) for request in requests]


def with_rate(requests: list[TraceRequest], rate: float, *, seed: int = 0) -> list[TraceRequest]:
    """Requests of a trace, arriving at random (a Poisson process) with `rate` requests/s."""
    times = np.random.default_rng(seed + 1).exponential(1.0 / rate, len(requests)).cumsum()
    return [replace(request, arrived_at=float(at)) for request, at in zip(requests, times, strict=True)]
