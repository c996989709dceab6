"""Grammars that burn time and memory, straight into compute as no gateway lets them: a stream
beside them goes on, and memory comes back.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import redis
from llguidance import LLMatcher, LLParserLimits

from shared.model.constraint import Constraint
from shared.model.files import open_model
from shared.model.sampling_params import SamplingParams
from shared.wire.messages import TokenizedRequest
from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment
from tests.grammars.generate import vocabulary
from tests.stages.test_deaths import events, submit, wait_for_all
from tests.waiting import wait_until

EOS = open_model("demo").eos_token_ids
HOSTILE = [f"({letter}{{1000}}){{1000}}" for letter in "abc"] + [
    "g{1000000}",
    "h{1000000}",
    "((i{100}){100}){20}",
    "(jk{1000}){1000}",
]
NUM_TOKENS = 400
PROMPT = np.array([30, 40, 50], np.int32)


@pytest.fixture
def stages(tmp_path: Path, redis_binary: Path | None) -> Iterator[Deployment]:
    with running_redis(tmp_path / "redis", redis_binary) as url:
        deployment = Deployment(url, tmp_path)
        try:
            yield deployment
        finally:
            deployment.stop()


def request(name: str, constraint: Constraint | None = None, max_tokens: int = NUM_TOKENS) -> TokenizedRequest:
    eos_token_ids = EOS if constraint is not None else ()  # without one it goes on
    return TokenizedRequest(
        f"{name}.0",
        None,
        MODEL,
        SamplingParams(max_tokens=max_tokens, seed=1),
        PROMPT,
        eos_token_ids,
        constraint=constraint,
    )


def longest_pause(client: "redis.Redis", stream: TokenizedRequest) -> float:
    """Between two tokens of the stream, in s, by who looks at its log all the time."""
    longest, num_seen, seen_at = 0.0, 0, 0.0
    while num_seen < NUM_TOKENS:
        num = len(events(client, stream))
        now = time.monotonic()
        if num > num_seen:
            longest = max(longest, now - seen_at if num_seen else 0.0)
            num_seen, seen_at = num, now
    return longest


def unbounded_s() -> float:
    """How long the first of them is compiled on this machine now, by the library's own limits."""
    began = time.monotonic()
    limits = LLParserLimits(initial_lexer_fuel=1_000_000, verbose_errors=False)
    LLMatcher(
        vocabulary().tokenizer, LLMatcher.grammar_from_regex(HOSTILE[0]), log_level=0, limits=limits
    ).compute_bitmask()
    return time.monotonic() - began


@pytest.mark.more
def test_a_stream_goes_on_and_memory_comes_back_when_hostile_grammars_arrive(stages: Deployment) -> None:
    stages.start("sampler", "sampler-1")
    stages.start("compute", "compute-1", PENSTOCK_NUM_THREADS="1")
    stages.wait_live("sampler-1", "compute-1")
    client = stages.redis()
    process = psutil.Process(stages.processes["compute-1"].pid)
    honest = request("honest", Constraint("regex", "[a-z ]{100,200}"), 20)
    submit(client, [honest])
    wait_for_all(stages, [honest])
    submit(client, [quiet := request("quiet")])
    pause_without = longest_pause(client, quiet)
    memory_before = process.memory_info().rss

    submit(client, [stream := request("stream")])
    wait_until(lambda: events(client, stream), description="it has begun")
    hostile = [
        request(f"hostile{number}", Constraint("regex", text, param="guided_regex"))
        for number, text in enumerate(HOSTILE)
    ]
    submit(client, hostile)
    pause_with = longest_pause(client, stream)
    wait_for_all(stages, hostile)
    for each in hostile:
        error = events(client, each)[-1].error
        assert error is not None and (error.status, error.param) == (400, "guided_regex")
    compiling_s = unbounded_s()
    print(
        f"longest pause without {pause_without:.3f} s, with {pause_with:.3f} s; one compiles unbounded in "
        f"{compiling_s:.3f} s"
    )
    print(f"memory before {memory_before >> 20} MB, after {process.memory_info().rss >> 20} MB")
    assert pause_with < pause_without + compiling_s / 2
    wait_until(lambda: process.memory_info().rss < memory_before + (64 << 20), description="its memory has come back")
    submit(client, [again := request("again", Constraint("regex", "[a-z ]{100,200}"), 20)])
    wait_for_all(stages, [again])
    assert [event.token_id for event in events(client, again)] == [event.token_id for event in events(client, honest)]
