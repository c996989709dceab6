"""bench/goodput.py: the search for a rate, the replay of a trace, the limits."""

import asyncio
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.goodput import MLPERF, PRECISION, Limits, at_rate, conversations, highest_rate, scaled, try_rate, window
from bench.served import Answer, summarize
from bench.texts import Prose
from services.simulator.trace import TraceRequest
from shared.model.files import DEMO_MODEL
from shared.process.errors import StartupError

LIMITS = Limits(2.0, 0.1)
ANSWER = Answer("three words here", "", 5, 3, [1.0, 1.1, 1.2], 1.2)
requests = st.lists(
    st.builds(TraceRequest, st.integers(1, 9000), st.integers(1, 1000), st.floats(0, 4000)), min_size=2, max_size=40
)


@given(carried=st.floats(0.05, 500), first=st.floats(0.1, 100), step=st.floats(1.2, 4))
def test_the_search_ends_within_its_precision(carried: float, first: float, step: float) -> None:
    tried: list[float] = []

    def meets(rate: float) -> bool:
        tried.append(rate)
        return rate <= carried

    found = highest_rate(meets, first, step, 100)
    assert carried / PRECISION <= found <= carried
    assert len(tried) == len(set(tried)) < 70


def test_a_search_that_runs_out_of_trials_says_what_was_met() -> None:
    assert highest_rate(lambda rate: rate <= 100, 1.0, 2.0, 5) == 16
    assert highest_rate(lambda _: False, 1.0, 2.0, 5) == 0


@given(requests, st.floats(0.01, 100))
def test_a_replay_has_the_rate_and_the_trace_s_bursts(trace: list[TraceRequest], rate: float) -> None:
    trace = sorted(trace, key=lambda each: each.arrived_at)
    timed = at_rate(trace, rate)
    assert [replace(each, arrived_at=0) for each in timed] == [replace(each, arrived_at=0) for each in trace]
    assert timed[0].arrived_at == 0
    span = trace[-1].arrived_at - trace[0].arrived_at
    if span > 1e-3:
        assert (len(trace) - 1) / timed[-1].arrived_at == pytest.approx(rate)
        for (early, late), (before, after) in zip(pairwise(timed), pairwise(trace), strict=True):
            assert (late.arrived_at - early.arrived_at) * rate * span == pytest.approx(
                (after.arrived_at - before.arrived_at) * (len(trace) - 1), abs=1e-6
            )


@given(requests, st.floats(0.001, 3), st.integers(2, 4096))
def test_scaled_lengths_fit_and_have_a_token_at_least(trace: list[TraceRequest], factor: float, longest: int) -> None:
    for before, after in zip(trace, scaled(trace, factor, longest), strict=True):
        assert after.num_prompt_tokens >= 1 <= after.num_output_tokens
        assert after.num_prompt_tokens + after.num_output_tokens <= longest
        assert after.arrived_at == before.arrived_at
        if (before.num_prompt_tokens + before.num_output_tokens) * factor < longest - 2:
            assert after.num_prompt_tokens == max(1, round(before.num_prompt_tokens * factor))


def test_rounds_have_requests_of_their_own() -> None:
    trace = [TraceRequest(1, 1, float(second)) for second in range(10)]
    rounds = [window(trace, number, 3) for number in range(3)]
    assert [each.arrived_at for found in rounds for each in found] == list(range(9))
    assert window(trace, 7, 10) == trace


def test_both_limits_count() -> None:
    assert LIMITS.are_met(ANSWER)
    assert not LIMITS.are_met(replace(ANSWER, times=[2.1, 2.2, 2.3]))
    assert not LIMITS.are_met(replace(ANSWER, times=[1.0, 1.1, 1.3]))
    assert not LIMITS.are_met(replace(ANSWER, error="the stream has no end"))
    assert not LIMITS.are_met(replace(ANSWER, times=[]))
    assert LIMITS.are_met(replace(ANSWER, times=[1.0], num_output_tokens=1)), "one token has no TPOT"
    assert LIMITS.scaled(0.5) == Limits(1.0, 0.05) and MLPERF["llama3.1-8b"] == LIMITS


def test_the_percentiles_of_a_run() -> None:
    answers = [
        replace(ANSWER, times=[0.01 * number, 0.01 * number + 0.2], num_output_tokens=2) for number in range(1, 102)
    ]
    figures = summarize(answers, [TraceRequest(5, 2)] * len(answers))
    assert figures["ttft_p50_ms"] == pytest.approx(510) and figures["ttft_p99_ms"] == pytest.approx(1000)
    assert figures["tpot_p50_ms"] == pytest.approx(200)


async def replayed(delay_s: float, count: int, last_at: float, limits: Limits) -> list[Answer] | None:
    """A replay, all at once but the last, to a server that takes so long for a first token."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(delay_s)
        chunks = [
            {"choices": [{"text": "word"}]},
            {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        ]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body.encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return await try_rate(
            url, "model", ["word"] * count, [TraceRequest(1, 1)] * (count - 1) + [TraceRequest(1, 1, last_at)], limits
        )


def test_a_replay_is_given_up_when_too_many_are_late() -> None:
    answers = asyncio.run(replayed(0.0, 10, 0.1, Limits(60.0, 60.0)))
    assert answers is not None and all(not each.error and each.num_output_tokens == 1 for each in answers)
    assert asyncio.run(replayed(0.35, 10, 3600.0, Limits(0.3, 0.1))) is None, "before the last one arrives"


def test_conversations_have_the_lengths_of_their_texts(tmp_path: Path) -> None:
    file, prose = tmp_path / "chats.json", Prose(DEMO_MODEL)
    question, answer = prose.take(40), prose.take(20)
    file.write_text(
        json.dumps(
            [{"id": "x", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}]
        )
    )
    [(text, request)] = conversations(file, prose, 1.0, 2048)
    assert text == question and (request.num_prompt_tokens, request.num_output_tokens) == pytest.approx((40, 20), abs=2)
    [(text, request)] = conversations(file, prose, 0.5, 2048)
    assert question.startswith(text) and math.isclose(request.num_prompt_tokens, 20, abs_tol=1)
    file.write_text('[{"id": "x"}]')
    with pytest.raises(StartupError, match="--texts"):
        conversations(file, prose, 1.0, 2048)
