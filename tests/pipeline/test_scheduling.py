"""Priorities, deadlines, shared prompts and a cramped KV cache, through the API."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from shared.wire.streams import inflight_key, log_key, prompts, requests, response_of
from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment
from tests.pipeline.streams import compute_load, stream_all
from tests.waiting import wait_until

LONG = {"model": MODEL, "prompt": "The", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
LONG["stream_options"] = {"include_position": True}
# answers, one after the other and before all others: so long that none of what waits behind them
# begins by itself
NUM_HOLDING = 8
PROMPT = "In the beginning there was a prompt of some length, which many requests have in common. " * 3


async def occupy(deployment: Deployment, client: httpx.AsyncClient, started: asyncio.Event) -> None:
    """A stream that holds the one place in compute's steps until it is cancelled."""
    async with client.stream(
        "POST", deployment.url() + "/v1/completions", json=LONG | {"n": NUM_HOLDING, "priority": -10}
    ) as response:
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                started.set()


def are_taken(deployment: Deployment, num_responses: int) -> bool:
    """Whether so many responses are in the pipeline, and compute has read all of them."""
    stream = prompts(MODEL)
    with deployment.redis() as client:
        in_flight = {response_of(name.decode()) for name in client.hkeys(inflight_key(MODEL)) if name}
        is_tokenized = client.xlen(requests(MODEL).key) == 0
        return (
            len(in_flight) == num_responses
            and is_tokenized
            and client.xlen(stream.key) == client.xpending(stream.key, stream.group)["pending"]
        )


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Deployment]:
    """A pipeline that computes one sequence at a time, the most urgent first."""
    folder = tmp_path_factory.mktemp("one")
    with running_redis(folder / "redis", redis_binary) as url:
        deployment = Deployment(url, folder)
        try:
            yield deployment.start_all(dtype="float32", max_num_seqs=1, aging_s=1000, min_priority=-100)
        finally:
            deployment.stop()


def test_a_deadline_ends_what_waits_and_nothing_else(one_at_a_time: Deployment) -> None:
    deployment = one_at_a_time

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client, deployment.async_client() as api:
            started = asyncio.Event()
            holder = asyncio.create_task(occupy(deployment, client, started))
            await started.wait()
            with pytest.raises(openai.APIStatusError) as caught:
                await api.with_options(max_retries=2).completions.create(
                    model=MODEL, prompt="late", max_tokens=5, extra_body={"deadline_s": 0.3}
                )
            assert caught.value.status_code == 504
            assert caught.value.body == {
                "message": "the request's deadline passed while it waited for its turn",
                "type": "timeout_error",
                "param": "deadline_s",
                "code": "deadline_exceeded",
            }
            assert not holder.done()
            holder.cancel()
            await asyncio.gather(holder, return_exceptions=True)
            answer = await api.completions.create(
                model=MODEL, prompt="in time", max_tokens=5, extra_body={"deadline_s": 30}
            )
            assert answer.usage is not None and answer.usage.completion_tokens >= 1

    asyncio.run(run())


def test_the_urgent_pass_those_that_wait(one_at_a_time: Deployment) -> None:
    deployment = one_at_a_time

    async def one(api: openai.AsyncOpenAI, name: str, priority: int) -> tuple[str, str]:
        answer = await api.completions.create(
            model=MODEL, prompt=name, max_tokens=3, extra_body={"priority": priority, "ignore_eos": True}
        )
        return name, answer.id

    async def run() -> list[tuple[str, str]]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client, deployment.async_client() as api:
            started = asyncio.Event()
            holder = asyncio.create_task(occupy(deployment, client, started))
            await started.wait()
            waiting = [
                asyncio.create_task(one(api, name, priority))
                for name, priority in (("batch", 5), ("normal", 0), ("urgent", -5))
            ]
            await asyncio.to_thread(
                wait_until, lambda: are_taken(deployment, 4), description="compute has taken up all of them"
            )
            assert not any(each.done() for each in [*waiting, holder])
            holder.cancel()
            return await asyncio.gather(*waiting)

    answers = asyncio.run(run())
    with deployment.redis() as client, client.pipeline(transaction=True) as pipe:  # at one moment
        for _, answer_id in answers:
            pipe.pttl(log_key(f"{answer_id}.0"))
        left_ms = dict(zip([name for name, _ in answers], pipe.execute(), strict=True))
    # A log's time runs from its end. Here, the answers may have arrived in another order
    assert sorted(left_ms, key=lambda name: left_ms[name]) == ["urgent", "normal", "batch"]


def test_a_shared_prompt_is_computed_once(demo: Deployment) -> None:
    def ask(text: str, **extra: object) -> tuple[str, int]:
        answer = demo.client().completions.create(
            model=MODEL, prompt=PROMPT + text, max_tokens=12, temperature=0, extra_body={"ignore_eos": True, **extra}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    first, cached = ask("One")
    assert cached == 0
    assert ask("Two")[1] >= 32
    again, cached = ask("One")
    assert again == first and cached >= 32
    assert ask("One", cache_salt="mine") == (first, 0)


def test_choices_are_the_same_as_each_alone(demo: Deployment) -> None:
    """The first choice has the request's own seed; the others share its prompt's blocks."""
    client = demo.client()
    many = client.completions.create(
        model=MODEL, prompt=PROMPT, n=4, seed=5, max_tokens=20, temperature=1.0, extra_body={"ignore_eos": True}
    )
    again = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        n=4,
        seed=5,
        max_tokens=20,
        temperature=1.0,
        extra_body={"cache_salt": "x", "ignore_eos": True},
    )
    alone = client.completions.create(
        model=MODEL, prompt=PROMPT, seed=5, max_tokens=20, temperature=1.0, extra_body={"ignore_eos": True}
    )
    texts = [choice.text for choice in many.choices]
    assert texts == [choice.text for choice in again.choices]
    assert texts[0] == alone.choices[0].text and len(set(texts)) == 4


@pytest.mark.more
def test_a_full_cache_changes_no_answer(demo: Deployment, deployment: Deployment) -> None:
    """Preempted and computed again, sequences go on with the same tokens."""
    expected = asyncio.run(stream_all(demo, 8, max_tokens=200))
    deployment.start_all(dtype="float32", admission="paged", kv_cache_memory="4MiB", max_model_len=512)
    assert asyncio.run(stream_all(deployment, 8, max_tokens=200)) == expected
    wait_until(
        lambda: (compute_load(deployment).preemptions or 0) > 0, description="compute announces that it preempted some"
    )
