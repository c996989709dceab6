"""Redis' errors, each made on a real server; and a group's entries: nobody's is lost, whatever is in it."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from services.operator.redis_server import socket_path
from shared.process.errors import Recoverable
from shared.wire import entries as entries_module
from shared.wire import line as line_module
from shared.wire.entries import DirectReader, GroupReader, append_to_group
from shared.wire.line import without_command
from shared.wire.messages import Control, GenerateRequest, encode
from shared.wire.streams import CONTROL, DEAD_LETTER, GATEWAY_ID, MESSAGE, REQUEST_ID, GroupStream, requests
from shared.wire.transport import Backoff, Transport, is_temporary
from tests.conftest import running_redis
from tests.examples import examples
from tests.faulty_redis import ERRORS, FaultyRedis
from tests.stages.line_of_stages import MODEL, ask
from tests.waiting import wait_until

STREAM: GroupStream = requests(MODEL)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("transport"), redis_binary) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(url) as client:
        client.flushall()
        yield client


@pytest.fixture
def transport(url: str, client: "redis.Redis") -> Iterator[Transport]:
    transport = Transport(url, threading.Event())
    yield transport
    transport.close()


@contextmanager
def read_only(client: "redis.Redis") -> Iterator[None]:
    client.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        client.replicaof("NO", "ONE")


@contextmanager
def configured(client: "redis.Redis", name: str, value: str) -> Iterator[None]:
    (before,) = client.config_get(name).values()
    client.config_set(name, value)
    try:
        yield
    finally:
        client.config_set(name, before)


@contextmanager
def cut_off(client: "redis.Redis") -> Iterator[None]:
    """A replica that may not serve what it has while it can't reach its master."""
    with configured(client, "replica-serve-stale-data", "no"), read_only(client):
        yield


STATES: dict[str, Callable[["redis.Redis"], Any]] = {
    "READONLY": read_only,
    "OOM": lambda client: configured(client, "maxmemory", "1"),
    "NOREPLICAS": lambda client: configured(client, "min-replicas-to-write", "1"),
    "MASTERDOWN": cut_off,
}
WAYS: dict[str, Callable[["redis.Redis"], Any]] = {
    "a command": lambda client: client.set("key", "value"),
    "a script": lambda client: client.eval("return redis.call('SET', KEYS[1], 'value')", 1, "key"),
    "a transaction": lambda client: (
        client.pipeline(transaction=True).set("key", "value").set("other", "value").execute()
    ),
    "a pipeline": lambda client: client.pipeline(transaction=False).set("key", "value").set("other", "value").execute(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", STATES)
def test_what_a_server_refuses_for_now_is_temporary_and_waited_out(
    state: str, way: str, client: "redis.Redis", transport: Transport
) -> None:
    with STATES[state](client):
        with pytest.raises(redis.RedisError) as found:
            WAYS[way](transport.client)
        assert is_temporary(found.value), found.value
        waiting = threading.Thread(target=lambda: transport.persist(lambda: WAYS[way](transport.client)), daemon=True)
        waiting.start()
        wait_until(lambda: transport.problem, description="it says what it waits for")
    waiting.join(60)
    assert not waiting.is_alive() and transport.problem == "" and client.get("key") == b"value"


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_server_answers_for_now_is_waited_out(
    way: str, error: str, url: str, client: "redis.Redis", tmp_path: Path
) -> None:
    with FaultyRedis(socket_path(Path(url.removeprefix("unix://")).parent), tmp_path / "proxy.sock") as proxy:
        transport = Transport(proxy.url, threading.Event())
        transport.client.ping()
        proxy.arm(1, error)
        transport.persist(lambda: WAYS[way](transport.client))
        assert proxy.disturbed and client.get("key") == b"value"
        transport.close()


def test_a_busy_server_and_an_unknown_script_are_temporary(
    client: "redis.Redis", transport: Transport, url: str
) -> None:
    with pytest.raises(redis.RedisError) as unknown:
        transport.client.evalsha("0" * 40, 0)
    assert is_temporary(unknown.value)
    with configured(client, "busy-reply-threshold", "1"), redis.Redis.from_url(url) as other:
        endless = threading.Thread(target=lambda: pytest.raises(redis.RedisError, other.eval, "while true do end", 0))
        endless.start()
        busy = wait_until(lambda: error_of(lambda: transport.client.set("key", "value")), description="it is busy")
        assert str(busy).startswith("BUSY") or "BUSY" in str(busy) or "busy" in str(busy).lower()
        assert is_temporary(busy)
        client.script_kill()
        endless.join()


def error_of(attempt: Callable[[], Any]) -> Exception | None:
    try:
        attempt()
    except redis.RedisError as error:
        return error
    return None


@pytest.mark.parametrize(
    "mistake",
    [
        lambda client: client.lpush("text", "x"),  # WRONGTYPE
        lambda client: client.eval("return redis.call('LPUSH', 'text', 'x')", 0),
        lambda client: client.pipeline(transaction=True).lpush("text", "BUSY, somebody asks, or LOADING").execute(),
        lambda client: client.execute_command("NOSUCHCOMMAND"),
        lambda client: client.eval("this is no Lua", 0),
        lambda client: client.execute_command("SET", "key"),
        lambda client: client.execute_command("AUTH", "nobody", "wrong"),
    ],
)
def test_a_mistake_is_raised_at_once(
    mistake: Callable[["redis.Redis"], Any], client: "redis.Redis", transport: Transport
) -> None:
    client.set("text", "x")
    with pytest.raises(redis.RedisError) as found:
        transport.persist(lambda: mistake(transport.client))
    assert not is_temporary(found.value)


def test_a_refusal_is_told_without_what_was_sent(client: "redis.Redis", transport: Transport) -> None:
    with configured(client, "maxmemory", "1"):
        with pytest.raises(redis.OutOfMemoryError) as found:
            transport.client.pipeline().set("key", "what somebody asked").execute()
        assert "asked" in str(found.value), "redis-py tells it"
        backoff = Backoff()
        backoff.failed(found.value)
    assert "asked" not in backoff.problem and "maxmemory" in backoff.problem
    last_line = "".join(traceback.format_exception_only(without_command(found.value)))
    assert "asked" not in last_line and "maxmemory" in last_line


def test_a_password_that_is_missing_or_wrong_is_not_waited_for(client: "redis.Redis", url: str) -> None:
    with configured(client, "requirepass", "secret"):
        for wrong in (url, url.replace("unix://", "unix://:wrong@")):
            with pytest.raises(redis.RedisError) as found:
                Transport(wrong, threading.Event()).persist(
                    lambda wrong=wrong: Transport(wrong, threading.Event()).client.get("key")
                )
            assert not is_temporary(found.value)


def test_a_read_may_block_for_longer_than_a_reply_may_take(
    url: str, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "REPLY_TIMEOUT_S", 0.5)
    transport = Transport(url, threading.Event(), 0.5)
    reader = group(transport)
    before = client.info("stats")["total_connections_received"]
    assert reader.read(count=1, block_ms=1500) == ([], []) and not transport.problem
    assert client.info("stats")["total_connections_received"] <= before + 1, "its own, which stays open"
    put(client, 1)
    assert names(reader.read(count=1, block_ms=1500)[0]) == ["r.1"]
    transport.close()


def test_waiting_ends_when_told_to_stop(transport: Transport, client: "redis.Redis") -> None:
    transport.stopping.set()
    with read_only(client), pytest.raises(Recoverable):
        transport.persist(lambda: transport.client.set("key", "value"))


# --- groups


def group(transport: Transport, consumer: str = "one") -> GroupReader:
    reader = GroupReader(transport, STREAM, consumer)
    reader.ensure_group()
    return reader


def put(client: "redis.Redis", *numbers: int) -> None:
    pipe = client.pipeline(transaction=False)
    for number in numbers:
        append_to_group(pipe, STREAM, ask(f"r.{number}", "x"))
    pipe.execute()


def names(deliveries: list[Any]) -> list[str]:
    return [each.message.request_id for each in deliveries]


def num_pending(client: "redis.Redis") -> int:
    return int(client.xpending(STREAM.key, STREAM.group)["pending"])


def test_a_redis_that_comes_back_empty_gets_its_groups_again(client: "redis.Redis", transport: Transport) -> None:
    reader = group(transport)
    client.flushall()
    put(client, 1)
    assert names(reader.read(count=5, block_ms=1)[0]) == ["r.1"]


def test_a_standing_read_survives_that_its_stream_goes_away(client: "redis.Redis", transport: Transport) -> None:
    reader, found = group(transport), []
    waiting = threading.Thread(
        target=lambda: found.extend(wait_until(lambda: reader.read(count=5, block_ms=5000)[0], description="an entry"))
    )
    waiting.start()
    wait_until(lambda: client.info("clients")["blocked_clients"], description="the read stands")
    client.delete(STREAM.key)
    put(client, 1)
    waiting.join(60)
    assert names(found) == ["r.1"]


def test_claims_take_what_was_delivered_least_often_first(client: "redis.Redis", transport: Transport) -> None:
    """The poison of a batch has more deliveries than its bystanders, and comes last."""
    put(client, 1, 2, 3)
    dead, heir = group(transport, "dead"), group(transport, "heir")
    entries = [each.entry_id for each in dead.read(count=3, block_ms=1)[0]]
    for _ in range(3):
        client.xclaim(STREAM.key, STREAM.group, "dead", 0, [entries[0]])
    client.xclaim(STREAM.key, STREAM.group, "dead", 0, [entries[1]])
    assert [names(heir.claim(idle_ms=0, count=1)[0])[0] for _ in range(2)] == ["r.3", "r.2"]


def test_what_was_delivered_too_often_is_a_dead_letter_with_its_request(
    client: "redis.Redis", transport: Transport
) -> None:
    put(client, 1, 2)
    heir = group(transport)
    (first, _) = heir.read(count=2, block_ms=1)[0]
    client.xclaim(STREAM.key, STREAM.group, "dead", 0, [first.entry_id])
    claimed, dead = heir.claim(idle_ms=0, count=8, max_deliveries=2)
    assert names(claimed) == ["r.2"] and [(each.request_id, each.gateway_id) for each in dead] == [("r.1", "gateway-1")]
    assert client.xlen(DEAD_LETTER) == 1


def test_a_release_is_told_from_a_death(client: "redis.Redis", transport: Transport) -> None:
    put(client, 1, 2)
    leaving, heir = group(transport, "leaving"), group(transport, "heir")
    (first, _) = leaving.read(count=2, block_ms=1)[0]
    transport.run(lambda pipe: leaving.release(pipe, [first.entry_id]))
    assert [(each.was_claimed, each.was_released) for each in heir.claim(idle_ms=60_000, count=8)[0]] == [(True, True)]
    assert [(each.was_claimed, each.was_released) for each in heir.claim(idle_ms=0, count=1)[0]] == [(True, False)]


def test_all_is_released_however_much_it_is(client: "redis.Redis", transport: Transport) -> None:
    """More than one look at the pending list sees at a time."""
    put(client, *range(200))
    leaving, heir = group(transport, "leaving"), group(transport, "heir")
    assert len(leaving.read(count=200, block_ms=1)[0]) == 200
    leaving.release_all()
    taken = [each for _ in range(4) for each in heir.claim(idle_ms=60_000, count=64)[0]]
    assert len(taken) == 200 and all(each.was_released for each in taken)


def test_only_dead_consumers_with_nothing_pending_are_forgotten(
    client: "redis.Redis", transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries_module, "FORGET_CONSUMER_MS", 0)
    put(client, 1, 2, 3)
    for name in ("mine", "live", "dead", "dead-but-holds-one"):
        group(transport, name).read(count=1, block_ms=1)
    for name in ("dead", "live"):
        client.xack(
            STREAM.key,
            STREAM.group,
            *[each["message_id"] for each in client.xpending_range(STREAM.key, STREAM.group, "-", "+", 9, name)],
        )
    wait_until(
        lambda: min(each["idle"] for each in client.xinfo_consumers(STREAM.key, STREAM.group)) > 0,
        description="a millisecond has passed",
    )
    put(client, 4)
    group(transport, "dead-but-holds-one").read(count=1, block_ms=1)
    wait_until(
        lambda: min(each["idle"] for each in client.xinfo_consumers(STREAM.key, STREAM.group)) > 0,
        description="a millisecond has passed",
    )
    group(transport, "mine").forget_consumers({"live"})
    assert {each["name"] for each in client.xinfo_consumers(STREAM.key, STREAM.group)} == {
        b"mine",
        b"live",
        b"dead-but-holds-one",
    }


def test_a_consumer_that_was_here_lately_is_not_forgotten(client: "redis.Redis", transport: Transport) -> None:
    """It may have been started after the look at the registry."""
    group(transport, "new").read(count=1, block_ms=1)
    group(transport, "mine").forget_consumers(set())
    assert {each["name"] for each in client.xinfo_consumers(STREAM.key, STREAM.group)} == {b"new"}


GARBAGE = [
    {MESSAGE: b"\xc1", REQUEST_ID: b"\xff\xfe", GATEWAY_ID: b"\xff"},
    {MESSAGE: encode(ask("r.1", "x"))[:-4], REQUEST_ID: b"r.1", GATEWAY_ID: b"gateway-1"},
    {MESSAGE: encode(Control("refresh")), REQUEST_ID: b"r.1"},
    {b"\xff": b"\xff"},
]


@pytest.mark.parametrize("values", GARBAGE)
def test_what_does_not_decode_is_a_dead_letter_and_its_neighbours_are_read(
    values: dict[bytes, bytes], client: "redis.Redis", transport: Transport
) -> None:
    reader = group(transport)
    put(client, 1)
    client.xadd(STREAM.key, values)
    put(client, 2)
    deliveries, dead = reader.read(count=9, block_ms=1)
    assert names(deliveries) == ["r.1", "r.2"] and len(dead) == 1
    assert client.xlen(DEAD_LETTER) == 1
    transport.run(lambda pipe: reader.finish(pipe, [each.entry_id for each in [*deliveries, *dead]]))
    assert num_pending(client) == 0 and client.xlen(STREAM.key) == 0


@examples(150, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, 400), noise=st.binary(min_size=1, max_size=4))
def test_a_damaged_message_is_read_or_a_dead_letter_never_an_exception(
    at: int, noise: bytes, client: "redis.Redis", transport: Transport
) -> None:
    whole = encode(ask("r.1", "prompt", stop=("x",), logit_bias={5: 1.0}))
    damaged = whole[: at % len(whole)] + noise + whole[at % len(whole) + len(noise) :]
    reader = GroupReader(transport, STREAM, "one")
    transport.groups.clear()
    reader.ensure_group()
    client.xadd(STREAM.key, {MESSAGE: damaged, REQUEST_ID: b"r.1", GATEWAY_ID: b""})
    deliveries, dead = reader.read(count=9, block_ms=1)
    assert len(deliveries) + len(dead) == 1
    assert all(isinstance(each.message, GenerateRequest) for each in deliveries)
    transport.run(lambda pipe: reader.finish(pipe, [each.entry_id for each in [*deliveries, *dead]]))


def test_a_direct_reader_passes_over_what_it_can_not_read(client: "redis.Redis", transport: Transport) -> None:
    reader = DirectReader(transport, CONTROL)
    for values in ({MESSAGE: b"\xff"}, {b"x": b"\xff"}, {MESSAGE: encode(Control("refresh"))}):
        client.xadd(CONTROL.key, values)
    found = reader.take(transport.client.xread({CONTROL.key: reader.last_id}))
    assert found == [Control("refresh")] and client.xlen(DEAD_LETTER) == 2
    transport.run(reader.trim_now_and_then)
    assert client.xlen(CONTROL.key) == 0
