"""Followers of responses at a gateway: all that they hold is counted, until the last has left, and
a tenant has a share of it.
"""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import redis.asyncio

from services.requests.dialects.responses import replay as replays
from services.requests.dialects.responses import stored
from services.requests.dialects.responses.stored import Store, StoredResponse
from services.requests.store.record import ResponseRecord
from shared.process.errors import Rejected
from shared.wire.logprobs import TokenLogprob, TopLogprob
from shared.wire.messages import TokenEvent, encode
from shared.wire.streams import inflight_key, log_key, stored_key
from shared.wire.token_log import write_step
from tests.waiting import wait_until

ASKED: dict[str, Any] = {"metadata": {}, "tools": []}
NUM_TOKENS = 600
Body = Callable[[Store], Awaitable[None]]


def record_of(response_id: str, tenant_id: str = "") -> ResponseRecord:
    return ResponseRecord(response_id, "response", "m", 0, 1, 1, True, "m", is_background=True, tenant_id=tenant_id)


def event_of(record: ResponseRecord, position: int, num_tokens: int, num_top: int) -> TokenEvent:
    top = tuple(
        TopLogprob(f" word{number}", f" word{number}".encode(), -1.5 - number, number) for number in range(num_top)
    )
    logprobs = (TokenLogprob(" word", b" word", -1.25, top),) if num_top else None
    return TokenEvent(
        record.request_ids[0],
        position,
        7,
        f" {position}",
        9,
        0,
        logprobs=logprobs,
        finish_reason="stop" if position == num_tokens else None,
    )


async def write(store: Store, record: ResponseRecord, *, num_top: int = 0, last: int = NUM_TOKENS) -> None:
    """The response into Redis. last: the last of its tokens that are there."""
    await store.client.set(stored_key(record.response_id), StoredResponse(ASKED, []).encode(), ex=3600)
    await store.client.hset(inflight_key("m"), mapping={record.request_ids[0]: 1, "": 1})
    async with store.client.pipeline(transaction=False) as pipe:
        for position in range(1, last + 1):
            event = event_of(record, position, NUM_TOKENS, num_top)
            write_step(pipe, "m", [(event, encode(event))], [])
        await pipe.execute()


@pytest.fixture
def run(redis_url: str) -> Callable[[Body], None]:
    async def with_store(body: Body) -> None:
        async with (
            redis.asyncio.Redis.from_url(redis_url) as client,
            redis.asyncio.Redis.from_url(redis_url) as followers,
        ):
            await body(Store(client, followers, 0.2))

    return lambda body: asyncio.run(with_store(body))


async def rest(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in stream])


def events_of(sent: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in sent.split(b"\n") if line.startswith(b"data: ")]


def test_followers_share_what_is_counted_until_the_last_leaves(run: Callable[[Body], None]) -> None:
    record = record_of("resp_a")

    async def body(store: Store) -> None:
        await write(store, record)
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(aclosing(store.follow(record, ASKED))) for _ in range(6)]  # type: ignore[type-var]
            begun = [await anext(each) for each in streams]
            [shared] = store.replays.followed
            assert shared.num_followers == 6 and shared.position <= stored.PAGE, "none of them has asked for more"
            whole = {begin + await rest(stream) for begin, stream in zip(begun[1:], streams[1:], strict=True)}
            [shared] = store.replays.followed
            assert shared.is_over and store.replays.held() == shared.size >= len(whole.pop()) and not whole
            assert store.replays.get("resp_a") is shared
        assert not store.replays.followed and store.replays.held() == 0

    run(body)


def test_of_a_long_response_each_holds_only_what_he_has_not_read(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of("resp_a")

    async def body(store: Store) -> None:
        await write(store, record, num_top=20)
        expected = await rest(store.follow(record, ASKED))
        store.replays.forget("resp_a")
        monkeypatch.setattr(stored, "MAX_WHOLE", 256 << 10)
        assert (
            json.loads((await store.read(record, StoredResponse(ASKED, []))).body())
            == events_of(expected)[-1]["response"]
        )
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(aclosing(store.follow(record, ASKED))) for _ in range(6)]  # type: ignore[type-var]
            sent, most = [b""] * 6, 0
            while not all(each.endswith(expected[-1000:]) for each in sent):
                for number, stream in enumerate(streams):
                    sent[number] += await anext(stream, b"")
                most = max(most, store.replays.held())
            assert len(store.replays.followed) == 0 or all(not each.is_whole for each in store.replays.followed)
        assert set(sent) == {expected}
        assert most < 6 * len(expected) / 2, "the answer's logprobs, and one of the four events that repeat them"
        assert store.replays.get("resp_a") is None, "it is not kept"
        last = events_of(expected)[-10:]
        assert events_of(await rest(store.follow(record, ASKED, last[0]["sequence_number"] - 1))) == last

    run(body)


@pytest.mark.parametrize("num_top", [0, 20])
@pytest.mark.parametrize("num_tools", [0, 500])
@pytest.mark.parametrize("first", [None, 0])
@pytest.mark.parametrize("is_over", [False, True])
def test_the_count_is_what_is_held(num_top: int, num_tools: int, first: int | None, is_over: bool) -> None:
    record = record_of("resp_a")
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [{"type": "function", "name": f"f{number}", "parameters": parameters} for number in range(num_tools)]
    asked = json.dumps(ASKED | {"tools": tools, "instructions": "Say it. " * 50_000 if num_tools else None})

    async def held() -> tuple[int, int]:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        found = replays.Replays().make(record, json.loads(asked), first=first)
        for position in range(1, NUM_TOKENS + 1):
            found.add(event_of(record, position, NUM_TOKENS if is_over else 0, num_top))
            if first is not None and position % stored.PAGE == 0:
                while found.piece(0):
                    pass
        if first is None:
            found.body()
        gc.collect()
        return found.size, tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        counted, real = asyncio.run(held())
    finally:
        tracemalloc.stop()
    assert 0.95 * real < counted < 4 * real


def test_a_tenant_beyond_its_share_is_refused_and_others_are_not(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [
        record_of(f"resp_{name}", tenant)
        for name, tenant in (("a", "greedy"), ("b", "greedy"), ("c", "greedy"), ("d", "other"))
    ]

    async def body(store: Store) -> None:
        for record in records:
            await write(store, record)
        monkeypatch.setattr(replays, "MAX_HELD_OF_ONE", 96 << 10)
        async with AsyncExitStack() as stack:
            first, second = [
                await stack.enter_async_context(aclosing(store.follow(each, ASKED)))  # type: ignore[type-var]
                for each in records[:2]
            ]
            begun = [await anext(first), await anext(second), await anext(first), await anext(second)]
            with pytest.raises(Rejected) as refused:
                store.follow(records[2], ASKED)
            assert (refused.value.status, refused.value.code) == (429, "too_many_streams")
            assert events_of(await rest(store.follow(records[3], ASKED)))[-1]["type"] == "response.completed"
            *told, error = events_of(begun[1] + begun[3] + await rest(second))
            assert (error["type"], error["code"], error["sequence_number"]) == (
                "error",
                "too_many_streams",
                told[-1]["sequence_number"],
            )
            assert error["message"].endswith(f"starting_after={error['sequence_number']}")
            assert events_of(await rest(first))[-1]["type"] == "response.completed", "the oldest goes on"
        more = events_of(await rest(store.follow(records[1], ASKED, error["sequence_number"])))
        assert [each["sequence_number"] for each in told + more] == list(range(len(told + more))) and more[-1][
            "type"
        ] == "response.completed"
        monkeypatch.setattr(replays, "MAX_HELD", 1)
        async with aclosing(store.follow(records[2], ASKED)) as third:  # type: ignore[type-var]
            await anext(third)
            with pytest.raises(Rejected) as refused:
                store.follow(record_of("resp_e", "third"), ASKED)
            assert refused.value.status == 503

    run(body)


def test_nothing_is_kept_of_a_deleted_response_and_nothing_longer_than_redis_does(run: Callable[[Body], None]) -> None:
    deleted, expiring = record_of("resp_a"), record_of("resp_b")

    async def body(store: Store) -> None:
        await write(store, deleted, last=300)
        async with aclosing(store.follow(deleted, ASKED)) as stream:  # type: ignore[type-var]
            begun = await anext(stream)
            reading = asyncio.create_task(rest(stream))
            await store.delete(deleted)
            assert events_of(begun + await reading)[-1]["response"]["status"] == "cancelled"
        assert store.replays.get("resp_a") is None

        await write(store, expiring)
        assert await store.client.ttl(stored_key("resp_b")) > 0
        await store.client.pexpire(stored_key("resp_b"), 100)
        await store.read(expiring, StoredResponse(ASKED, []))
        assert await store.client.exists(log_key(expiring.request_ids[0]))
        await asyncio.to_thread(wait_until, lambda: store.replays.get("resp_b") is None, description="it is forgotten")

    run(body)
