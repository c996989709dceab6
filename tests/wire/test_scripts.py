"""Each script of shared/wire/scripts at a real server: what it writes, refuses and returns, and how
long its keys live.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import redis
import redis.asyncio

from shared.wire import streams
from shared.wire.line import reason_of
from shared.wire.script import FOLDER, INCLUDE, library, load_script, packed, table
from shared.wire.streams import (
    LOG_TTL_S,
    REPLICA_STREAM_TTL_S,
    RUNNING_LOG_TTL_S,
    held_bytes_key,
    held_key,
    images_key,
    inflight_key,
    log_key,
    open_key,
    quota_key,
    reader_key,
    response_key,
    running_key,
    shares_key,
    stored_key,
)
from shared.wire.transport import Transport
from tests.conftest import running_redis

ROOT = FOLDER.parent.parent.parent
FILES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.lua"))}
LIBRARIES = {name for name, text in FILES.items() if text.startswith("-- Library: ")}
SCRIPTS = FILES.keys() - LIBRARIES
DAY_S = 24 * 3600
LIMITS = {"requests_per_minute": 60, "tokens_per_minute": 600, "max_concurrency": 2, "requests": 1, "tokens": 10}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("scripts"), redis_binary) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with redis.Redis.from_url(url) as client:
        client.flushall()
        yield client


def run(client: Any, name: str, keys: list[str], *arguments: Any) -> Any:
    return load_script(name).call(client, keys, *arguments)


# the files


def test_every_script_says_what_it_does_and_is_used(client: Any) -> None:
    sources = [path.read_text() for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py")]
    loaded = {name for source in sources for name in re.findall(r'load_script\("(\w+)"\)', source)}
    included = {match[1] for text in FILES.values() for line in text.split("\n") if (match := INCLUDE.fullmatch(line))}
    assert loaded == SCRIPTS and included == LIBRARIES
    for name, text in FILES.items():
        header = text.partition("\n\n")[0]
        assert all(line.startswith("-- ") or line == "--" for line in header.split("\n")), name
        assert name in LIBRARIES or ("-- KEYS: " in header and "-- ARGV" in header) or name == "newest_ids", name
        assert max(map(len, text.split("\n"))) <= 145, name
    for name in SCRIPTS:
        assert client.script_load(load_script(name).text) == load_script(name).digest


def test_scripts_know_the_wiring_of_streams_py(client: Any) -> None:
    names = ["MESSAGE", "REQUEST_ID", "GATEWAY_ID", "LOG_TTL_S", "RUNNING_LOG_TTL_S", "REPLICA_STREAM_TTL_S"]
    wiring = library("-- include: wiring")
    values = [*(getattr(streams, name) for name in names), b"{c}:"]
    assert client.eval(f"{wiring}\nreturn {{{', '.join(names)}, prefix}}", 1, "{c}:key") == values


def test_an_error_names_its_script_and_the_line_of_its_file(client: Any, url: str) -> None:
    client.set("text", "no hash")
    (line,) = (number for number, text in enumerate(FILES["note_batch"].split("\n"), 1) if "'HGET'" in text)
    expected = re.compile(rf"^WRONGTYPE .*user_script:{line}\..*\(in note_batch\.lua\)$", re.DOTALL)
    with pytest.raises(redis.ResponseError, match=expected):
        run(client, "note_batch", ["text", "figures"], 9, 9, "completed", 1)
    pipe = client.pipeline(transaction=False)
    run(pipe, "note_batch", ["text", "figures"], 9, 9, "completed", 1)
    with pytest.raises(redis.ResponseError) as caught:
        pipe.execute()
    assert expected.search(reason_of(caught.value))
    transport = Transport(url, Event())
    for _ in range(2):  # whole, then by its digest
        with pytest.raises(redis.ResponseError, match=expected):
            transport.run(lambda pipe: run(pipe, "note_batch", ["text", "figures"], 9, 9, "completed", 1))
    transport.close()


def test_an_asynchronous_client_sends_a_script_whole_if_redis_does_not_know_it(url: str) -> None:
    async def body() -> None:
        async with redis.asyncio.Redis.from_url(url) as client:
            await client.script_flush()
            for _ in range(2):
                assert await load_script("newest_ids").run(client, ["nothing"]) == [b""]
            await client.set("text", "no stream")
            with pytest.raises(redis.ResponseError, match=r"\(in newest_ids\.lua\)$"):
                await load_script("newest_ids").run(client, ["text"])

    asyncio.run(body())


# a response: what submit.lua takes, give_back.lua gives back


def submit(
    client: Any,
    response: str = "resp_1",
    *,
    cell: str = "",
    num: int = 2,
    stored: bytes = b"asked",
    tenant: str = "t",
    **other: Any,
) -> Any:
    asked = {
        "stream": "requests:m",
        "gateway": "gateway-1",
        "ttl": RUNNING_LOG_TTL_S,
        "max_requests": 10,
        "max_tokens": 1000,
        "tokens": 30 * num,
        "charge": None,
        "max_size": 1000,
        "size": 100,
        "keeps": 0,
        "requests": [[f"{response}.{index}", 30] for index in range(num)],
    } | other
    keys = [
        inflight_key("m"),
        response_key(response),
        stored_key(response),
        open_key(response),
        shares_key("m"),
        images_key(response),
        quota_key(tenant),
        running_key(tenant),
        held_key(tenant),
        log_key(f"{response}.0"),
    ]
    return run(
        client,
        "submit",
        [cell + key for key in keys],
        table(**asked),
        b"record",
        stored,
        *(b"message %d" % index for index in range(num)),
    )


def end(client: Any, request: str, *, cell: str = "", is_refused: bool = False, gateway: str = "gateway-1") -> None:
    keys = [log_key(request), inflight_key("m"), reader_key(request.rpartition(".")[0])]
    asked = table(request=request, gateway=gateway, is_refused=is_refused)
    run(client, "write_end", [cell + key for key in keys], asked, b"event", b"moments")


def lifetimes(client: Any) -> dict[str, int]:
    return {key.decode(): client.ttl(key) for key in client.keys("*")}


@pytest.mark.parametrize("cell", ["", "{c}:"])
def test_what_submit_takes_the_last_end_gives_back(cell: str, client: Any) -> None:
    client.hset(cell + images_key("resp_1"), "digest", "file")
    assert submit(client, cell=cell, charge=LIMITS) == [[59, 590, pytest.approx(time.time() * 1000, abs=60_000)]]
    account = cell + held_key("t")
    assert client.hgetall(cell + inflight_key("m")) == {b"": b"60", b"resp_1.0": b"30", b"resp_1.1": b"30"}
    assert client.hgetall(cell + shares_key("m")) == {account.encode(): b"2", f"{account} tokens".encode(): b"60"}
    assert client.hgetall(cell + open_key("resp_1")) == {
        b"left": b"2",
        b"account": account.encode(),
        b"size": b"100",
        b"keeps": b"0",
    }
    assert client.zrange(account, 0, -1) == [b"100/resp_1"] and client.get(held_bytes_key(account)) == b"100"
    assert client.hgetall(cell + running_key("t")) == dict.fromkeys(
        [b"resp_1.0", b"resp_1.1"], (cell + inflight_key("m")).encode()
    )
    assert (client.get(cell + response_key("resp_1")), client.get(cell + stored_key("resp_1"))) == (b"record", b"asked")
    assert [values for _, values in client.xrange(cell + "requests:m")] == [
        {b"m": b"message %d" % index, b"r": b"resp_1.%d" % index, b"g": b"gateway-1"} for index in range(2)
    ]
    running = lifetimes(client)
    assert running.pop(cell + "requests:m") == -1 and 0 < running.pop(cell + quota_key("t")) <= 120
    assert len(running) == 9 and all(RUNNING_LOG_TTL_S - 60 < ttl <= RUNNING_LOG_TTL_S for ttl in running.values())

    client.hset(cell + reader_key("resp_1"), "gateway", "gateway-2")
    end(client, "resp_1.0", cell=cell)
    end(client, "resp_1.0", cell=cell)
    assert client.hgetall(cell + inflight_key("m")) == {b"": b"30", b"resp_1.1": b"30"}, "once"
    assert (
        client.hget(cell + open_key("resp_1"), "left") == b"1" and client.ttl(cell + response_key("resp_1")) > LOG_TTL_S
    )
    end(client, "resp_1.1", cell=cell)
    assert client.zrange(account, 0, -1) == [b"5/resp_1"] and client.get(held_bytes_key(account)) == b"5", (
        "what stays stored"
    )
    ended = lifetimes(client)
    assert all(key.startswith(cell) for key in ended)
    kept = {
        log_key("resp_1.0"),
        log_key("resp_1.1"),
        response_key("resp_1"),
        stored_key("resp_1"),
        reader_key("resp_1"),
    }
    rest = {
        "requests:m",
        "events:gateway-2",
        quota_key("t"),
        running_key("t"),
        held_key("t"),
        held_bytes_key(held_key("t")),
    }
    assert ended.keys() == {cell + key for key in kept | rest}, "no more of it, nor of its images"
    assert (
        all(0 < ended[cell + key] <= LOG_TTL_S for key in kept)
        and 0 < ended[cell + "events:gateway-2"] <= REPLICA_STREAM_TTL_S
    )


def test_of_a_refused_response_little_stays_stored(client: Any) -> None:
    for keeps, kept in ((4, None), (5, b"asked")):
        submit(client, num=1, keeps=keeps)
        end(client, "resp_1.0", is_refused=True)
        assert client.get(stored_key("resp_1")) == kept
        assert int(client.get(held_bytes_key(held_key("t")))) == len(kept or b"")
        client.delete(log_key("resp_1.0"))


def test_a_response_is_submitted_once(client: Any) -> None:
    assert submit(client) == [[]] and submit(client) == [[]]
    assert client.xlen("requests:m") == 2 and client.hget(inflight_key("m"), "") == b"60"
    end(client, "resp_1.0")
    assert submit(client) == [[]] and client.xlen("requests:m") == 2, "it has a log"


@pytest.mark.parametrize(
    ("other", "refusal"),
    [
        ({"max_requests": 3}, [b"full", 2, 60]),
        ({"max_tokens": 100}, [b"full", 2, 60]),
        ({"size": 901}, [b"held", 100, RUNNING_LOG_TTL_S]),
        ({"charge": LIMITS | {"requests": 61}}, [b"requests", 1000]),
        ({"charge": LIMITS | {"tokens": 610}}, [b"tokens", 1000]),
        ({"charge": LIMITS}, [b"concurrency", 1000]),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(other: dict[str, Any], refusal: list[Any], client: Any) -> None:
    submit(client, charge=LIMITS | {"requests": 0, "tokens": 0})
    before = {key: client.dump(key) for key in client.keys("*") if key != b"quota:t"}
    _, found = submit(client, "resp_2", **other)
    assert [found[0], *found[1:-1]] == refusal[:-1] and found[-1] == pytest.approx(refusal[-1], abs=60)
    assert {key: client.dump(key) for key in client.keys("*") if key != b"quota:t"} == before


def test_a_tenant_with_less_than_an_even_share_is_admitted_to_a_full_pipeline(client: Any) -> None:
    submit(client, num=10)
    assert submit(client, "resp_2")[1][0] == b"full"
    assert (
        submit(client, "resp_3", num=5, tenant="other") == [[]]
        and submit(client, "resp_4", num=1, tenant="other")[1][0] == b"full"
    )


def test_an_account_forgets_what_has_expired_or_was_lost(client: Any) -> None:
    client.zadd(held_key("t"), {"300/expired": 1, "400/lost": time.time() + 99})
    client.set(held_bytes_key(held_key("t")), 700)
    assert submit(client, size=900) == [[]] and client.zrange(held_key("t"), 0, -1) == [b"900/resp_1"]
    assert client.get(held_bytes_key(held_key("t"))) == b"900"


def test_stored_data_is_rewritten_and_deleted_with_its_account(client: Any) -> None:
    keys = [held_key("t"), stored_key("resp_1")]
    client.zadd(keys[0], {"5/resp_1": 2**40})
    client.set(held_bytes_key(keys[0]), 5)
    client.set(keys[1], "asked", ex=DAY_S)
    run(client, "rewrite_stored", keys, "resp_1", 4, "changed since")
    run(client, "rewrite_stored", [*keys, "missing"], "resp_1", 5, "without what it needs")
    assert client.get(keys[1]) == b"asked"
    run(client, "rewrite_stored", keys, "resp_1", 5, "asked more")
    assert (
        client.get(keys[1]) == b"asked more"
        and client.zrange(keys[0], 0, -1) == [b"10/resp_1"]
        and client.get(held_bytes_key(keys[0])) == b"10"
    )
    assert DAY_S - 60 < client.ttl(keys[1]) <= DAY_S
    run(client, "delete_stored", keys, "resp_1")
    assert client.keys("*") == [held_bytes_key(keys[0]).encode()] and client.get(held_bytes_key(keys[0])) == b"0"


def test_images_expire_unless_their_response_is_submitted(client: Any) -> None:
    run(client, "keep_images", ["images"], 600, "one", "file", "two", "other")
    assert client.hgetall("images") == {b"one": b"file", b"two": b"other"} and 0 < client.ttl("images") <= 600
    client.expire("images", DAY_S)
    run(client, "keep_images", ["images"], 600, "one", "file")
    assert client.ttl("images") > 600


# limits


def test_a_bucket_is_charged_refunded_and_fills(client: Any) -> None:
    keys = [quota_key("t"), running_key("t")]
    asked = table(charge=LIMITS, requests=["a.0", "a.1"], place="@c 0 m", ttl=DAY_S)
    assert run(client, "charge", keys, asked)[0][:2] == [59, 590]
    assert (
        client.hgetall(keys[1]) == {b"a.0": b"@c 0 m", b"a.1": b"@c 0 m"} and DAY_S - 60 < client.ttl(keys[1]) <= DAY_S
    )
    assert run(client, "charge", keys, asked)[1] == [b"concurrency", 1000], "places of another cell are not looked at"
    run(client, "refund", keys, 1, 10, "a.0", "a.1")
    assert not client.exists(keys[1]) and float(client.hget(keys[0], "requests")) == pytest.approx(60, abs=0.5)
    client.hset(keys[0], mapping={"requests": 0, "at": int(time.time() * 1000) - 30_000})
    assert run(client, "charge", keys, table(charge=LIMITS, requests=[]))[0][0] == pytest.approx(29, abs=1)
    later = int(time.time() * 1000) + 10**6
    client.hset(keys[0], "at", later)
    run(client, "charge", keys, table(charge=LIMITS, requests=[]))
    assert int(client.hget(keys[0], "at")) < later, "Redis' clock went back"


def test_a_place_of_what_has_ended_is_free(client: Any) -> None:
    client.hset(running_key("t"), mapping={"a.0": inflight_key("m"), "b.0": inflight_key("m")})
    client.hset(inflight_key("m"), "b.0", 1)
    assert submit(client, num=1, charge=LIMITS)[1:] == [] and client.hkeys(running_key("t")) == [b"b.0", b"resp_1.0"]


# logs


def step(client: Any, *entries: tuple[str, int, bytes, bool], messages: tuple[tuple[str, bytes], ...] = ()) -> Any:
    return run(client, "write_step", [inflight_key("m")], packed([list(map(list, entries)), list(map(list, messages))]))


def test_a_step_goes_to_its_logs_and_then_to_its_readers(client: Any) -> None:
    """Refusals under any interleaving are in tests/stages/test_token_log.py."""
    submit(client, num=1)
    message = ("events:gateway-1", b"step")
    assert step(client, ("resp_1.0", 1, b"\xff1", False), messages=(message,)) == []
    assert (
        client.xrange(log_key("resp_1.0")) == [(b"1-0", {b"m": b"\xff1"})] and client.ttl(log_key("resp_1.0")) > DAY_S
    )
    assert step(client, ("resp_1.0", 3, b"3", False), messages=(message,)) == [[1, None]]
    refused = step(client, ("resp_1.0", 1, b"other", False), ("resp_1.0", 2, b"2", False), messages=(message,))
    assert refused == [[1, [b"1-0", b"\xff1"]], [2, [b"", b""]]]
    assert client.xlen("events:gateway-1") == 1, "nothing was sent of what was refused"
    assert 0 < client.ttl("events:gateway-1") <= REPLICA_STREAM_TTL_S
    assert step(client, ("resp_1.0", 2, b"2", True)) == []
    assert client.xrange(log_key("resp_1.0"))[-1] == (b"2-0", {b"m": b"2", b"e": b"1"})
    assert 0 < client.ttl(log_key("resp_1.0")) <= LOG_TTL_S
    assert not client.exists(inflight_key("m"), open_key("resp_1"))


def test_an_end_stands_behind_the_tokens_and_goes_to_the_reader(client: Any) -> None:
    step(client, ("resp_1.0", 1, b"1", False))
    end(client, "resp_1.0", gateway="")
    assert client.xrange(log_key("resp_1.0"))[-1] == (b"1-1", {b"m": b"event", b"e": b"1"}) and not client.keys(
        "events:*"
    )
    client.hset(reader_key("resp_1"), "gateway", "gateway-2")
    end(client, "resp_1.0")
    assert client.xlen(log_key("resp_1.0")) == 2
    ((_, sent),) = client.xrange("events:gateway-2")
    assert sent == {b"m": b"moments", b"e": b"event", b"p": b"1"}


def test_what_no_replica_takes_is_found_and_ended(client: Any) -> None:
    submit(client)
    entries = client.xrange("requests:m")
    waiting = [[entry_id, b"resp_1.%d" % index, b"gateway-1"] for index, (entry_id, _) in enumerate(entries)]
    assert run(client, "find_waiting", ["requests:m"], "tokenizer", 0, 9) == waiting
    assert (
        run(client, "find_waiting", ["requests:m"], "tokenizer", 60_000, 9)
        == run(client, "find_waiting", ["nothing"], "tokenizer", 0, 9)
        == []
    )
    client.xreadgroup("tokenizer", "tokenizer-1", {"requests:m": ">"}, count=1)
    for index, (entry_id, _) in enumerate(entries):
        request = f"resp_1.{index}"
        asked = table(
            request=request, gateway="", is_refused=False, group="tokenizer", consumer="gateway-1", entry=entry_id
        )
        run(
            client,
            "end_waiting",
            [log_key(request), inflight_key("m"), reader_key("resp_1"), "requests:m"],
            asked,
            b"event",
            b"moments",
        )
    assert not client.exists(log_key("resp_1.0")), "a replica has it"
    assert client.xlen(log_key("resp_1.1")) == 1 and [each for each, _ in client.xrange("requests:m")] == [
        entries[0][0]
    ]
    (group,) = client.xinfo_groups("requests:m")
    assert group["lag"] == 0
    run(client, "finish_ended", ["requests:m", log_key("resp_1.0")], "tokenizer", entries[0][0])
    assert client.xlen("requests:m") == 1, "its log has no end"
    end(client, "resp_1.0")
    run(client, "finish_ended", ["requests:m", log_key("resp_1.0")], "tokenizer", entries[0][0])
    assert client.xlen("requests:m") == 0 and client.xpending("requests:m", "tokenizer")["pending"] == 0


# groups and offers


@pytest.fixture
def prompts(client: Any) -> list[bytes]:
    """Two entries of the stream of prompts; the first is pending with a."""
    client.xgroup_create("prompts", "compute", id="0", mkstream=True)
    ids = [client.xadd("prompts", {"m": b"1"}), client.xadd("prompts", {"m": b"2"})]
    client.xreadgroup("compute", "a", {"prompts": ">"}, count=1)
    return ids


def consumers(client: Any) -> set[bytes]:
    return {each["name"] for each in client.xinfo_consumers("prompts", "compute")}


def test_consumers_with_something_pending_stay(client: Any, prompts: list[bytes]) -> None:
    for name in ("b", "c", "d"):
        client.xgroup_createconsumer("prompts", "compute", name)
    time.sleep(0.02)
    run(client, "forget_consumers", ["prompts"], "compute", 60_000, "c")
    assert consumers(client) == {b"a", b"b", b"c", b"d"}, "not idle for so long"
    run(client, "forget_consumers", ["prompts"], "compute", 1, "c", "d")
    assert consumers(client) == {b"a", b"c", b"d"}
    for name in ("a", "c"):
        run(client, "leave_group", ["prompts"], "compute", name)
    assert consumers(client) == {b"a", b"d"}


def test_an_entry_is_renewed_by_its_own_consumer_only(client: Any, prompts: list[bytes]) -> None:
    client.xclaim("prompts", "compute", "a", 0, prompts[:1], idle=5000, justid=True)
    run(client, "renew_entries", ["prompts"], "compute", "b", *prompts)
    assert client.xpending_range("prompts", "compute", "-", "+", 9)[0]["time_since_delivered"] >= 5000
    run(client, "renew_entries", ["prompts"], "compute", "a", *prompts)
    (pending,) = client.xpending_range("prompts", "compute", "-", "+", 9)
    assert pending["time_since_delivered"] < 5000 and pending["times_delivered"] == 1
    assert run(client, "taken_over", ["prompts"], "compute", "b", *prompts) == prompts[:1]
    assert run(client, "taken_over", ["prompts"], "compute", "a", *prompts) == []


def test_an_offer_is_delivered_taken_up_or_stolen(client: Any, prompts: list[bytes]) -> None:
    keys = ["prompts", "offers", "offered:b"]
    asked = table(group="compute", replica="b", announcement="replica:compute:b", wait_ms=0, tag="offer", version=1)
    run(client, "deliver", keys, asked)
    assert not client.exists("offers", "offered:b"), "no such replica lives"
    client.set("replica:compute:b", "here")
    run(client, "deliver", keys, asked)
    assert client.zrange("offers", 0, -1) == [prompts[1] + b"/b"] and 0 < client.ttl("offers") <= 3600
    ((_, offered),) = client.xrange("offered:b")
    assert offered == {b"m": packed(["offer", 1, prompts[1]])} and 0 < client.ttl("offered:b") <= REPLICA_STREAM_TTL_S
    run(client, "deliver", keys, asked)
    assert client.xlen("offered:b") == 1, "nothing waits"
    assert run(client, "steal", keys[:2], "compute", "c", 9) == [[[prompts[1], [b"m", b"2"]]], 1]
    assert run(client, "take_up", keys[:2], "compute", "b", prompts[1]) == [], "another has it"
    third = client.xadd("prompts", {"m": b"3"})
    run(client, "deliver", keys, asked)
    assert run(client, "take_up", keys[:2], "compute", "b", third) == [[third, [b"m", b"3"]]]
    assert (
        run(client, "take_up", keys[:2], "compute", "b", third)
        == run(client, "steal", keys[:2], "compute", "c", 9)[0]
        == []
    )


# readers


def test_control_messages_are_dropped_by_age(client: Any) -> None:
    client.xadd("control", {"m": b"old"}, id=f"{int(time.time() - 700) * 1000}-0")
    client.xadd("control", {"m": b"new"}, id=f"{int(time.time() - 500) * 1000}-0")
    run(client, "broadcast", ["control"], b"message")
    assert [values for _, values in client.xrange("control")] == [
        {b"m": b"new"},
        {b"m": b"message"},
    ] and 600 < client.ttl("control") <= 1200
    assert run(client, "newest_ids", ["control", "nothing"]) == [client.xrevrange("control", count=1)[0][0], b""]


def test_only_the_present_reader_cancels_and_only_one_takes_over(client: Any) -> None:
    client.set("response", "record", ex=500)
    keys = ["reader", "response", "control"]
    assert run(client, "take_over", keys, 0, "gateway-2", b"attach") == 1
    assert run(client, "take_over", keys, 0, "gateway-3", b"attach") == 0
    assert (
        client.hgetall("reader") == {b"generation": b"1", b"gateway": b"gateway-2"} and 0 < client.ttl("reader") <= 500
    )
    assert run(
        client, "cancel", ["reader", "control", "cancelled:a", "cancelled:b"], 0, b"cancel", 60
    ) == 0 and not client.exists("cancelled:a")
    assert run(client, "cancel", ["reader", "control", "cancelled:a", "cancelled:b"], 1, b"cancel", 60) == 1
    assert client.mget("cancelled:a", "cancelled:b") == [b"1", b"1"] and 0 < client.ttl("cancelled:b") <= 60
    assert [values[b"m"] for _, values in client.xrange("control")] == [b"attach", b"cancel"]


# batches, files and sets of modules


def create(client: Any, name: str, now: float, **other: int) -> Any:
    asked: dict[str, Any] = {"id": name, "now": now, "ttl": DAY_S, "max_running": 2, "max_kept": 3} | other
    return run(client, "create_batch", [f"batch:{name}", "owned", "running"], table(**asked), "status", "validating")


def move(client: Any, name: str, allowed: list[str], status: str, *values: str, is_end: bool = False) -> Any:
    asked = table(id=name, allowed=allowed, status=status, is_end=is_end, now=5, figures_ttl=DAY_S)
    return run(client, "move_batch", [f"batch:{name}", "running", "figures"], asked, *values)


def test_a_batch_is_made_while_few_run_and_the_oldest_that_ended_is_forgotten(client: Any) -> None:
    now = time.time()
    assert [create(client, name, now + number) for number, name in enumerate(("a", "b", "c"))] == [1, 1, 0]
    assert move(client, "a", ["validating"], "failed", is_end=True) == b"failed"
    assert create(client, "c", now + 2) == 1 and move(client, "b", ["validating"], "failed", is_end=True) == b"failed"
    assert create(client, "d", now + 3) == 1 and not client.exists("batch:a")
    assert client.zrange("owned", 0, -1) == [b"b", b"c", b"d"] and client.smembers("running") == {b"c", b"d"}
    assert all(DAY_S - 60 < client.ttl(key) <= DAY_S for key in ("batch:d", "owned", "running"))


def test_a_batch_goes_where_it_may_and_its_end_counts_once(client: Any) -> None:
    create(client, "a", time.time())
    client.hset("figures", mapping={"lines_waiting": 3, "oldest_at": 1, "completed": 2})
    assert move(client, "none", ["validating"], "failed") is None
    assert move(client, "a", ["finalizing"], "completed", is_end=True) == b"validating"
    run(client, "begin_batch", ["batch:a"], 4, "total", 3)
    assert client.hmget("batch:a", "status", "in_progress_at", "total") == [b"in_progress", b"4", b"3"]
    for _ in range(2):
        assert move(client, "a", ["in_progress"], "completed", "output_file_id", "file-1", is_end=True) == b"completed"
    assert client.hmget("batch:a", "status", "completed_at", "output_file_id") == [b"completed", b"5", b"file-1"]
    assert client.hgetall("figures") == {b"completed": b"2", b"ended:completed": b"1"} and not client.exists("running")
    run(client, "begin_batch", ["batch:a"], 6, "total", 3)
    assert client.hget("batch:a", "status") == b"completed"
    run(client, "begin_batch", ["batch:none"], 6, "total", 3)
    run(client, "note_begun", ["batch:none"], 2)
    run(client, "note_begun", ["batch:a"], 2)
    assert client.hget("batch:a", "num_begun") == b"2" and not client.exists("batch:none")


def test_counts_of_a_batch_only_grow(client: Any) -> None:
    create(client, "a", time.time())
    for completed in (3, 1, 4):
        run(client, "note_batch", ["batch:a", "figures"], DAY_S, 7, "completed", completed, "failed", 0)
    run(client, "note_batch", ["batch:none", "figures"], DAY_S, 7, "completed", 9)
    assert client.hmget("batch:a", "completed", "progressed_at") == [b"4", b"7"] and client.hgetall("figures") == {
        b"completed": b"4"
    }
    assert DAY_S - 60 < client.ttl("figures") <= DAY_S


def test_a_lease_is_renewed_and_given_up_by_its_run_only(client: Any) -> None:
    client.set("lease", "mine", px=1000)
    assert run(client, "renew_lease", ["lease"], "other", 9000) == 0 and client.pttl("lease") <= 1000
    assert run(client, "renew_lease", ["lease"], "mine", 9000) == 1 and client.pttl("lease") > 1000
    assert run(client, "renew_lease", ["lease"], "other", 0) == 0 and client.exists("lease")
    assert run(client, "renew_lease", ["lease"], "mine", 0) == 1 and not client.exists("lease")


def test_only_what_has_ended_is_shortened_and_only_what_is_unused_removed(client: Any) -> None:
    client.set("ended", 1, ex=3600)
    client.set("running", 1, ex=DAY_S)
    for key in ("ended", "running"):
        run(client, "shorten", [key], 60, 3600)
    assert client.ttl("ended") <= 60 and client.ttl("running") > 3600
    entry_id = client.xadd("stream", {"m": 1})
    assert run(client, "remove_unused", ["stream"], 0) == 0
    client.xdel("stream", entry_id)
    assert run(client, "remove_unused", ["stream"], 60_000) == 0 and run(client, "remove_unused", ["ended"], 0) == 0
    time.sleep(1.1)  # Redis' time is taken in whole seconds
    assert run(client, "remove_unused", ["stream"], 0) == 1 and not client.exists("stream")


def test_an_owner_has_so_many_sets_of_modules_and_bytes(client: Any) -> None:
    def create_set(name: str, size: int, age_s: float = 0, value: str = "v") -> Any:
        asked = table(id=name, now=time.time() - age_s, ttl=DAY_S, max_sets=2, max_bytes=100, size=size)
        return run(client, "create_modules", [f"set:{name}", "sets"], asked, "about", value)

    assert create_set("old", 90, age_s=DAY_S + 9) == 1 and create_set("a", 60) == 1, "it has expired"
    assert create_set("b", 50) == 0 and create_set("b", 40) == 1 and create_set("c", 0) == 0
    assert create_set("a", 60, value="other") == 1 and client.hgetall("set:a") == {b"about": b"v"}, "the same set again"
    assert (
        client.zrange("sets", 0, -1) == [b"40/b", b"60/a"]
        and DAY_S - 60 < client.ttl("set:a") <= DAY_S
        and client.ttl("sets") > 0
    )


def test_of_two_uploads_the_second_sees_the_first(client: Any) -> None:
    assert run(client, "reserve_upload", ["uploads"], "file-1/7", 60_000) == []
    assert run(client, "reserve_upload", ["uploads"], "file-2/8", 10) == [b"file-1/7"]
    client.pexpire("uploads", 60_000)
    time.sleep(0.05)
    assert run(client, "reserve_upload", ["uploads"], "file-3/9", 60_000) == [b"file-1/7"], (
        "the second one's has expired"
    )
    assert 0 < client.ttl("uploads") <= 60
