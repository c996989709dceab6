"""Requests that wait for a replica, and those that have waited for too long, under any interleaving."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from shared.wire.messages import RequestError, TokenEvent
from shared.wire.streams import (
    GATEWAY_ID,
    MESSAGE,
    REQUEST_ID,
    RUNNING_LOG_TTL_S,
    events,
    log_key,
    prompts,
    response_key,
)
from shared.wire.token_log import end_waiting, queue_find_waiting
from tests.conftest import running_redis
from tests.examples import examples
from tests.stages.line_of_stages import MODEL


@pytest.fixture
def client(tmp_path: Path, redis_binary: Path | None) -> Iterator["redis.Redis"]:
    with running_redis(tmp_path / "redis", redis_binary) as url, redis.Redis.from_url(url) as client:
        yield client


def run(client: "redis.Redis", fill: Callable[[Any], Any]) -> Any:
    pipe = client.pipeline(transaction=False)
    fill(pipe)
    return pipe.execute()[-1]


class Waiting(RuleBasedStateMachine):
    """A group that reads at its own pace, and gateways that end what has waited for too long: each
    request is the one's or the other's, and Redis knows how many wait while nobody has any: that
    wakes the first replica."""

    def __init__(self) -> None:
        super().__init__()
        self.client = Waiting.client
        self.client.flushall()
        self.stream = prompts(MODEL)
        self.client.xgroup_create(self.stream.key, self.stream.group, id="0", mkstream=True)
        self.waiting: list[tuple[str, bool]] = []  # in order; whether it has waited for too long
        self.taken: list[tuple[bytes, str]] = []
        self.num_requests = 0
        self.ended: set[str] = set()

    client: "redis.Redis"

    @rule(is_old=st.booleans())
    def ask(self, is_old: bool) -> None:
        response = f"r{self.num_requests}"
        self.num_requests += 1
        self.client.set(response_key(response), "record", ex=RUNNING_LOG_TTL_S - (100 if is_old else 0))
        self.client.xadd(self.stream.key, {MESSAGE: b"-", REQUEST_ID: f"{response}.0", GATEWAY_ID: "gateway-1"})
        self.waiting.append((f"{response}.0", is_old))

    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        reply: Any = self.client.xreadgroup(self.stream.group, "compute-1", {self.stream.key: ">"}, count=count)
        found = [(entry_id, values[REQUEST_ID].decode()) for _, entries in reply for entry_id, values in entries]
        assert [request_id for _, request_id in found] == [request_id for request_id, _ in self.waiting[:count]]
        self.taken += found
        del self.waiting[:count]

    @rule()
    def finish(self) -> None:
        for entry_id, _ in self.taken:
            self.client.xack(self.stream.key, self.stream.group, entry_id)
            self.client.xdel(self.stream.key, entry_id)
        self.taken.clear()

    @rule(takes_between=st.booleans())
    def end_old(self, takes_between: bool) -> None:
        found = run(self.client, lambda pipe: queue_find_waiting(pipe, self.stream, 50_000, 2))
        is_first_old = [is_old for _, is_old in self.waiting[:2]]
        assert len(found) == (is_first_old + [False]).index(False)
        if takes_between:
            self.take(1)
        if found:

            def end(pipe: Any) -> None:
                for entry_id, request_id, gateway_id in found:
                    end_waiting(
                        pipe,
                        self.stream,
                        "gateway-2",
                        entry_id,
                        MODEL,
                        failed(request_id.decode()),
                        gateway_id.decode(),
                    )

            run(self.client, end)
        mine = [request_id for _, request_id, _ in found if request_id.decode() in {name for name, _ in self.waiting}]
        self.ended |= {each.decode() for each in mine}
        del self.waiting[: len(mine)]

    @invariant()
    def each_is_in_one_place(self) -> None:
        group = self.client.xinfo_groups(self.stream.key)[0]
        assert (group["pending"], self.client.xlen(self.stream.key)) == (
            len(self.taken),
            len(self.waiting) + len(self.taken),
        )
        if (
            group["lag"] is not None or not self.taken
        ):  # Redis does not know it while an entry is pending before the one that was deleted last
            assert group["lag"] == len(self.waiting)
        assert {
            each
            for each in (f"r{number}.0" for number in range(self.num_requests))
            if self.client.exists(log_key(each))
        } == self.ended
        assert self.client.xlen(events("gateway-1").key) == len(self.ended), "its reader hears of it"


def failed(request_id: str) -> TokenEvent:
    return TokenEvent(request_id, 0, None, "", finish_reason="error", error=RequestError("nobody came", 503))


@pytest.mark.hypothesis
def test_a_request_that_waits_is_taken_once_or_ended_once(client: "redis.Redis") -> None:
    Waiting.client = client
    run_state_machine_as_test(
        Waiting, settings=examples(60, stateful_step_count=20, suppress_health_check=list(HealthCheck))
    )
