"""The token log's scripts under any interleaving: writers that race and repeat themselves, ends
from anybody, a Redis that forgets.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from shared.process.errors import Invalid, Lost
from shared.wire.messages import RequestError, StepDecisions, StepEvents, TokenEvent, decode, encode
from shared.wire.streams import (
    LOG_TTL_S,
    MESSAGE,
    RUNNING_LOG_TTL_S,
    decisions,
    events,
    inflight_key,
    log_key,
    reader_key,
)
from shared.wire.token_log import decode_entry, end_of, end_request, parse_log, queue_read, write_step
from tests.conftest import running_redis
from tests.examples import examples
from tests.stages.line_of_stages import MODEL, ids

REQUESTS = ("a.0", "a.1", "b.0")
GATEWAYS = ("gateway-1", "gateway-2")
TOLD = StepDecisions("sampler-1", 1, ids(1), ids(1), ids(5), ids(0).astype("u1"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator["redis.Redis"]:
    with running_redis(tmp_path_factory.mktemp("log"), redis_binary) as url, redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture(autouse=True)
def empty(client: "redis.Redis") -> None:
    client.flushall()


def token(request_id: str, position: int, token_id: int, *, is_end: bool = False) -> TokenEvent:
    return TokenEvent(request_id, position, token_id, f"<{token_id}>", finish_reason="length" if is_end else None)


def run(client: "redis.Redis", fill: Callable[[Any], None]) -> Any:
    pipe = client.pipeline(transaction=False)
    fill(pipe)
    return pipe.execute()[-1]


def write(client: "redis.Redis", *wanted: TokenEvent) -> list[Any]:
    """Entries that the log refused."""
    found: list[Any] = run(
        client,
        lambda pipe: write_step(
            pipe, MODEL, [(each, encode(each)) for each in wanted], [(decisions("compute-1"), TOLD)]
        ),
    )
    return found


def end(
    client: "redis.Redis", request_id: str, gateway: str | None = "gateway-1", error: RequestError | None = None
) -> None:
    run(client, lambda pipe: end_request(pipe, MODEL, request_id, gateway, error=error))


def last_event(client: "redis.Redis", gateway: str) -> TokenEvent:
    values: Any = client.xrevrange(events(gateway).key, count=1)[0][1]
    assert decode(StepEvents, values[MESSAGE]) == StepEvents(())
    event = end_of(values)
    assert event is not None
    return event


def num_events(client: "redis.Redis") -> int:
    return sum(int(client.xlen(events(gateway).key)) for gateway in GATEWAYS)


@dataclass
class Model:
    """Redis as it should be."""

    logs: dict[str, list[TokenEvent]] = field(default_factory=dict)
    inflight: dict[str, int] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)

    def has_ended(self, request_id: str) -> bool:
        log = self.logs.get(request_id)
        return bool(log) and log[-1].finish_reason is not None

    def position(self, request_id: str) -> int:
        return sum(event.token_id is not None for event in self.logs.get(request_id, []))

    def put(self, event: TokenEvent) -> None:
        self.logs.setdefault(event.request_id, []).append(event)
        if event.finish_reason is not None:
            self.inflight.pop(event.request_id, None)


class Interleaving(RuleBasedStateMachine):
    """Every step is something that some process of a deployment may do at that moment."""

    client: "redis.Redis"
    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.model = Model()

    @rule(request_id=st.sampled_from(REQUESTS), tokens=st.integers(1, 1 << 24))
    def submit(self, request_id: str, tokens: int) -> None:
        if request_id not in self.model.inflight and request_id not in self.model.logs:
            self.model.inflight[request_id] = tokens
            self.client.hset(inflight_key(MODEL), request_id, str(tokens))
            self.client.hincrby(inflight_key(MODEL), "", tokens)

    @rule(
        target=sent,
        request_id=st.sampled_from(REQUESTS),
        ahead=st.sampled_from([1, 1, 1, 1, 0, -1, 2, 5]),
        token_id=st.integers(5, 9),
        is_end=st.booleans(),
    )
    def decide(self, request_id: str, ahead: int, token_id: int, is_end: bool) -> TokenEvent:
        """Decides as one of two samplers that may know less or believe more than the log holds."""
        event = token(
            request_id, max(1, self.model.position(request_id) + ahead), token_id, is_end=is_end and token_id == 9
        )
        self.expect(event)
        return event

    @rule(event=sent)
    def decide_again(self, event: TokenEvent) -> None:
        """The write seemed to fail, or another sampler decided the same."""
        self.expect(event)

    @rule(one=sent, other=sent)
    def decide_two(self, one: TokenEvent, other: TokenEvent) -> None:
        self.expect(one, other)

    def expect(self, *wanted: TokenEvent) -> None:
        told = self.client.xlen(decisions("compute-1").key)
        expected: list[Any] = []
        cut = set[str]()
        for index, event in enumerate(wanted, 1):
            log, position = self.model.logs.get(event.request_id, []), self.model.position(event.request_id)
            if event.request_id in cut:
                expected.append([index, [b"", b""]])
            elif self.model.has_ended(event.request_id) or position >= event.position:
                held = [each for each in log if each.position == event.position and each.token_id is not None] or log[
                    -1:
                ]
                is_token = held[0].token_id is not None
                as_written = held[0] if is_token else replace(held[0], position=0)
                expected.append([index, [b"%d-%d" % (held[0].position, not is_token), encode(as_written)]])
                cut.add(event.request_id)
            elif position < event.position - 1:
                expected.append([index, None])
                cut.add(event.request_id)
            else:
                self.model.put(event)
        assert write(self.client, *wanted) == expected
        assert self.client.xlen(decisions("compute-1").key) == told + (not expected)

    @rule(request_id=st.sampled_from(REQUESTS), gateway=st.sampled_from([*GATEWAYS, None]), is_error=st.booleans())
    def end(self, request_id: str, gateway: str | None, is_error: bool) -> None:
        """A gateway cancels, a compute gives up, or a sampler's log is lost."""
        before = num_events(self.client)
        position, error = self.model.position(request_id), RequestError("no") if is_error else None
        end(self.client, request_id, gateway, error)
        if not self.model.has_ended(request_id):
            self.model.put(
                TokenEvent(
                    request_id, position, None, "", finish_reason="error" if is_error else "cancelled", error=error
                )
            )
        reader = self.model.readers.get(request_id.partition(".")[0], gateway)
        if reader is None:
            assert num_events(self.client) == before
        else:
            assert last_event(self.client, reader) == self.model.logs[request_id][-1]

    @rule(response=st.sampled_from(["a", "b"]), gateway=st.sampled_from(GATEWAYS))
    def resume(self, response: str, gateway: str) -> None:
        self.model.readers[response] = gateway
        self.client.hset(reader_key(response), "gateway", gateway)

    @rule(request_id=st.sampled_from(REQUESTS), count=st.integers(1, 3))
    def lose_the_end(self, request_id: str, count: int) -> None:
        """The machine of Redis lost its power, and the end of the append-only file was not on the disk."""
        log = self.model.logs.get(request_id, [])
        if len(log) > count:
            kept = self.client.xrange(log_key(request_id))[:-count]
            self.client.delete(log_key(request_id))
            for entry_id, values in kept:
                self.client.xadd(log_key(request_id), values, id=entry_id)
            self.client.expire(log_key(request_id), LOG_TTL_S)
            del log[-count:]

    @rule()
    def lose_everything(self) -> None:
        self.client.flushall()
        self.model = Model()

    @invariant()
    def redis_holds_what_was_decided(self) -> None:
        for request_id in REQUESTS:
            entries = run(self.client, lambda pipe, request_id=request_id: queue_read(pipe, request_id))
            assert parse_log(entries) == self.model.logs.get(request_id, [])
            tokens = [entry_id for entry_id, _ in entries if entry_id.endswith(b"-0")]
            assert tokens == [b"%d-0" % (number + 1) for number in range(len(tokens))]
            assert [b"e" in values for _, values in entries] == [
                event.finish_reason is not None for event in self.model.logs.get(request_id, [])
            ]
            if entries:
                assert (
                    0
                    < self.client.ttl(log_key(request_id))
                    <= (LOG_TTL_S if b"e" in entries[-1][1] else RUNNING_LOG_TTL_S)
                )

    @invariant()
    def the_count_is_of_what_has_not_ended(self) -> None:
        held = {key.decode(): int(value) for key, value in self.client.hgetall(inflight_key(MODEL)).items()}
        assert held == ({**self.model.inflight, "": sum(self.model.inflight.values())} if self.model.inflight else {})


@pytest.mark.hypothesis
def test_no_interleaving_leaves_a_gap_a_second_token_or_a_place_taken(client: "redis.Redis") -> None:
    Interleaving.client = client
    chosen = examples(60, stateful_step_count=30, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Interleaving, settings=chosen)


def test_of_two_samplers_the_second_is_told_what_the_first_decided(client: "redis.Redis") -> None:
    assert write(client, token("a.0", 1, 5)) == []
    assert write(client, token("a.0", 1, 6)) == [[1, [b"1-0", encode(token("a.0", 1, 5))]]]
    assert [event.token_id for event in parse_log(client.xrange(log_key("a.0")))] == [5]


def test_one_refused_row_does_not_hold_up_the_logs_of_the_others(client: "redis.Redis") -> None:
    write(client, token("a.0", 1, 5))
    assert write(client, token("a.0", 1, 6), token("b.0", 1, 7)) == [[1, [b"1-0", encode(token("a.0", 1, 5))]]]
    assert [event.token_id for event in parse_log(client.xrange(log_key("b.0")))] == [7]


def test_what_follows_a_refused_entry_is_refused_with_it(client: "redis.Redis") -> None:
    """It was computed on a token that the log does not hold."""
    write(client, token("a.0", 1, 5))
    refused = write(client, token("a.0", 1, 6), token("b.0", 1, 7), token("a.0", 2, 8), token("b.0", 2, 9))
    assert refused == [[1, [b"1-0", encode(token("a.0", 1, 5))]], [3, [b"", b""]]]
    assert [[event.token_id for event in parse_log(client.xrange(log_key(each)))] for each in ("a.0", "b.0")] == [
        [5],
        [7, 9],
    ]


def test_an_end_after_tokens_stands_at_their_position(client: "redis.Redis") -> None:
    write(client, token("a.0", 1, 5))
    write(client, token("a.0", 2, 6))
    end(client, "a.0", error=RequestError("gone"))
    assert [entry_id for entry_id, _ in client.xrange(log_key("a.0"))] == [b"1-0", b"2-0", b"2-1"]
    assert last_event(client, "gateway-1") == TokenEvent(
        "a.0", 2, None, "", finish_reason="error", error=RequestError("gone")
    )


@pytest.mark.parametrize("position", [0, 1, 200_000])
def test_an_end_has_the_position_of_its_log(position: int, client: "redis.Redis") -> None:
    """Its bytes were made before that was known."""
    if position:
        client.xadd(log_key("a.0"), {MESSAGE: encode(token("a.0", position, 5))}, id=f"{position}-0")
    end(client, "a.0", error=RequestError("x" * 300))
    entries: Any = client.xrange(log_key("a.0"))
    assert last_event(client, "gateway-1").position == position
    assert decode_entry(entries[-1][0], entries[-1][1][MESSAGE]) == last_event(client, "gateway-1")


def test_an_end_whose_event_has_its_position_is_read_like_others() -> None:
    """As older versions wrote it."""
    end = TokenEvent("a.0", 1, None, "", finish_reason="cancelled")
    assert parse_log([(b"1-1", {MESSAGE: encode(end), b"e": b"1"})], 1) == [end]
    assert end_of({MESSAGE: encode(StepEvents((encode(end),)))}) is None
    with pytest.raises(Invalid, match="position of an end"):
        end_of({MESSAGE: encode(StepEvents(())), b"e": encode(end), b"p": b"x"})


def test_a_log_with_a_gap_is_lost_not_short() -> None:
    entries = [(b"1-0", {MESSAGE: encode(token("a.0", 1, 5))}), (b"3-0", {MESSAGE: encode(token("a.0", 3, 5))})]
    with pytest.raises(Lost, match="position 3 follows 1"):
        parse_log(entries)


@pytest.mark.parametrize("values", [{}, {MESSAGE: b"\xff\xfe"}, {b"x": b"y"}])
def test_what_nobody_can_read_in_a_log_is_lost(values: dict[bytes, bytes]) -> None:
    with pytest.raises(Lost, match="nobody can read at 1-0"):
        parse_log([(b"1-0", values)])
