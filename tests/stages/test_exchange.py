"""Compute's exchange with its samplers: decisions in any order, from anybody; samplers that come,
go, forget, and say nothing.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from services.compute.cache.block_manager import BlockManager
from services.compute.candidates.rows import CandidateRows, new_rows
from services.compute.exchange import inbox as inbox_module
from services.compute.exchange.active import ActiveRequest, Decision
from services.compute.exchange.exchange import Exchange
from services.compute.exchange.undecided import FIRST_PATIENCE_S, LONGEST_PATIENCE_S, MAX_SILENCES, Undecided
from services.compute.sequence import Request, Sequence, Tokens
from services.operator.redis_server import socket_path
from shared.model.sampling_params import SamplingParams
from shared.process.stage_settings import StageSettings
from shared.wire.messages import StepCandidates, StepDecisions, TokenizedRequest, decode, encode
from shared.wire.registry import Registry, choose_replica
from shared.wire.streams import MESSAGE, candidates, decisions, prompts
from shared.wire.transport import Transport
from tests.conftest import running_redis
from tests.faulty_redis import FaultyRedis
from tests.stages.line_of_stages import MODEL, LocalStage, ids, replica
from tests.waiting import wait_until

PARAMS = SamplingParams(max_tokens=100, temperature=0.0)


def rows_of(*keys: tuple[int, int]) -> CandidateRows:
    """One candidate for each (handle, position): the token 5."""
    rows = new_rows(
        ids(*(handle for handle, _ in keys)), ids(*(position for _, position in keys)), np.full(len(keys), -1, np.int32)
    )
    rows.token_ids[:] = 5
    rows.chosen[:] = 5
    return rows


def ask(undecided: Undecided, rows: CandidateRows, step: int) -> None:
    """A step's rows, sent at once."""
    undecided.add(rows, step)
    assert undecided.unsent(step) is not None


def decision(handle: int, position: int, token_id: int = 5) -> Decision:
    return Decision(handle, position, token_id, False)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def active_request(handle: int, sampler_id: str | None = None) -> ActiveRequest:
    request = TokenizedRequest(f"r{handle}.0", "gateway-1", MODEL, PARAMS, ids(5, 6), ())
    sequence = Sequence(Request(handle, request.request_id, PARAMS), Tokens([5, 6], 2))
    return ActiveRequest(sequence, request, b"0-1", "gateway-1", sampler_id)


@pytest.fixture
def undecided(clock: Clock) -> Undecided:
    """Two sequences, which one sampler has."""
    return Undecided({handle: active_request(handle, "sampler-1") for handle in (1, 2)}, clock)


# --- what is undecided


@pytest.mark.parametrize("order", list(itertools.permutations(range(1, 5))))
def test_decisions_pass_once_and_in_the_order_of_their_positions(order: tuple[int, ...], undecided: Undecided) -> None:
    """Run ahead by three tokens, and two samplers that answer all of it, in whatever order that arrives."""
    for step in range(1, 5):
        undecided.add(rows_of((1, step)), step)
    passed = [
        each.position
        for position in order
        for each in undecided.settle(9, [decision(1, position), decision(1, position)])
    ]
    assert passed == [1, 2, 3, 4] and undecided.handles == [] and undecided.active[1].early == {}
    assert undecided.settle(9, [decision(1, position) for position in order]) == []


def test_a_decision_of_an_earlier_life_is_nobodys(undecided: Undecided) -> None:
    """The replica's handles began again from 1: what was decided for the sequence that had this one
    is about another request.
    """
    undecided.add(rows_of((1, 1)), 50)
    assert undecided.settle(49, [decision(1, 1, 7)]) == []
    assert undecided.settle(50, [decision(1, 1, 5)]) == [decision(1, 1, 5)]


def test_what_was_cut_off_is_not_waited_for_and_what_came_early_for_it_is_dropped(undecided: Undecided) -> None:
    for step in (1, 2, 3):
        undecided.add(rows_of((1, step)), step)
    assert undecided.settle(3, [decision(1, 3)]) == []
    undecided.truncate(1, 1)
    undecided.add(rows_of((1, 2)), 4)
    undecided.add(rows_of((1, 3)), 5)
    assert [each.position for each in undecided.settle(5, [decision(1, 1), decision(1, 2)])] == [1, 2]
    assert undecided.handles == [1] and [*undecided.active[1].rows] == [3]


def test_patience_doubles_with_each_silence_and_begins_anew_when_the_sampler_speaks(
    undecided: Undecided, clock: Clock
) -> None:
    asked = []
    ask(undecided, rows_of((1, 1)), 1)
    began = clock.now
    while clock.now < began + 100:
        clock.now += 0.5
        if late := undecided.silent():
            undecided.of(late, 2)
            asked.append(clock.now - began)
    gaps = [after - before for before, after in itertools.pairwise([0.0, *asked])]
    assert (
        gaps
        == [gap + 0.5 for gap in (FIRST_PATIENCE_S, 4.0, 8.0, 16.0, LONGEST_PATIENCE_S, LONGEST_PATIENCE_S)][
            : len(gaps)
        ]
        and len(gaps) >= 5
    )
    undecided.record_reply("sampler-1", 1)
    clock.now += FIRST_PATIENCE_S + 0.1
    assert undecided.silent() == [1]


def test_silence_gives_a_request_up_and_nothing_else_does(undecided: Undecided, clock: Clock) -> None:
    """A Redis that is away for long, or samplers that come and go, have rows sent again and again:
    that is nobody's silence.
    """
    ask(undecided, rows_of((1, 1)), 1)
    for _ in range(10 * MAX_SILENCES):
        undecided.of([1], 2)
    assert undecided.given_up() == []
    for number in range(MAX_SILENCES + 1):
        assert undecided.given_up() == [], number
        clock.now += LONGEST_PATIENCE_S + 1
        assert undecided.silent() == [1]
        undecided.of([1], 2)
    assert undecided.given_up() == [1]


def test_what_could_not_be_heard_is_no_silence(undecided: Undecided, clock: Clock) -> None:
    """Compute was stopped, or its Redis away: the sampler's patience begins when compute sees again."""
    ask(undecided, rows_of((1, 1)), 1)
    clock.now += 300.0
    assert undecided.silent(seen_since=clock.now) == []
    clock.now += FIRST_PATIENCE_S + 0.1
    assert undecided.silent(seen_since=clock.now - FIRST_PATIENCE_S - 0.1) == [1]


@pytest.mark.parametrize("answers_later", [True, False])
def test_a_row_that_a_busy_sampler_has_lost_is_asked_for_again(
    answers_later: bool, undecided: Undecided, clock: Clock
) -> None:
    """Others of its sequences go on, so it is never silent; yet this row will not come by itself.

    A later message's answer shows it at once: a sampler takes its messages in order.
    """
    asked_at, began = [], clock.now
    ask(undecided, rows_of((1, 1)), 1)
    for step in range(2, 200):
        ask(undecided, rows_of((2, step)), step)
        clock.now += 0.5
        undecided.record_reply("sampler-1", step if answers_later else 1)
        undecided.settle(step, [decision(2, step)])
        if undecided.silent() == [1]:
            asked_at.append(clock.now - began)
            undecided.of([1], step)
    gaps = [after - before for before, after in itertools.pairwise([0.0, *asked_at])]
    wanted = (FIRST_PATIENCE_S, 4.0, 8.0, 16.0, LONGEST_PATIENCE_S) if answers_later else (LONGEST_PATIENCE_S,) * 3
    assert all(seconds <= gap <= seconds + 1 for gap, seconds in zip(gaps, wanted, strict=False)) and len(gaps) >= 3


# --- and on a real Redis


class Peer:
    """An Exchange with some sequences, seen from its samplers."""

    def __init__(self, url: str, through: str = "", **options: Any) -> None:
        self.client = redis.Redis.from_url(url)
        self.client.flushall()
        self.stage = LocalStage("compute", StageSettings(redis_url=url, replica_id="compute-1"), url=through)
        self.active: dict[int, ActiveRequest] = {}
        self.exchange = Exchange(self.stage, self.active, BlockManager(8, 4), **options)
        self.exchange.start()
        self.seen: dict[str, bytes] = {}

    def live(self, *samplers: str) -> None:
        self.stage.live = Registry(tuple(replica("sampler", each) for each in samplers))

    def add(self, *handles: int) -> None:
        for handle in handles:
            self.active[handle] = active_request(handle)

    def sampler_of(self, handle: int, *samplers: str) -> str | None:
        return choose_replica(f"r{handle}.0", samplers)

    def asked(self, sampler: str) -> list[StepCandidates]:
        """Candidates sent to this sampler since the last look."""
        entries: Any = self.client.xrange(candidates(sampler).key, min=b"(" + self.seen.get(sampler, b"0-0"))
        if entries:
            self.seen[sampler] = entries[-1][0]
        return [decode(StepCandidates, values[MESSAGE]) for _, values in entries]

    def decide(self, sampler: str, step: int, *decided: tuple[int, int, int]) -> None:
        handles, positions, tokens = (
            (ids(*column) for column in zip(*decided, strict=True)) if decided else (ids(), ids(), ids())
        )
        self.client.xadd(
            decisions("compute-1").key,
            {
                MESSAGE: encode(
                    StepDecisions(sampler, step, handles, positions, tokens, np.zeros(len(decided), np.uint8))
                )
            },
        )

    def collect(self, count: int) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []

        def has_all() -> bool:
            found.extend(
                (each.handle, each.position, each.token_id) for each in self.exchange.receive(0, wait_s=0.05).decisions
            )
            return len(found) >= count

        wait_until(has_all, description=f"{count} decisions have come")
        return found

    def settle_down(self) -> None:
        """A round trip of every line, and what was written has arrived."""
        for _ in range(3):
            self.exchange.receive(0, wait_s=0.05)
        wait_until(self.has_arrived, description="Redis has answered what was written")

    def has_arrived(self) -> bool:
        self.exchange.receive(0, wait_s=0.05 if self.exchange.outbox.line.num_awaited else 0.0)
        return not self.exchange.outbox.line.num_awaited

    def close(self) -> None:
        for line in (self.exchange.outbox.line, self.exchange.inbox.news, self.exchange.inbox.requests):
            line.close()
        self.stage.transport.close()
        self.client.close()

    def asked_soon(self, sampler: str) -> list[StepCandidates]:
        """Candidates sent to it, without waiting for any more to be."""
        if self.exchange.outbox.line.num_awaited:
            self.exchange.outbox.confirm()
        return self.asked(sampler)

    def asked_after_a_while(self, sampler: str) -> list[StepCandidates]:
        self.settle_down()
        return self.asked(sampler)

    def resend_overdue(self) -> list[int]:
        self.exchange._looked_at = 0.0
        return self.exchange.resend_overdue()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("exchange"), redis_binary) as url:
        yield url


@pytest.fixture
def make_peer(url: str) -> Iterator[Callable[..., Peer]]:
    """Peers with options; their connections are closed at the end."""
    peers: list[Peer] = []

    def make(**options: Any) -> Peer:
        peers.append(Peer(url, **options))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(make_peer: Callable[..., Peer], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """Its patience never ends: no time passes for it."""
    monkeypatch.setattr(inbox_module, "STANDING_MS", 20)
    peer = make_peer()
    peer.exchange.undecided.clock = clock
    return peer


def keys_of(messages: list[StepCandidates]) -> list[list[tuple[int, int]]]:
    return [list(zip(each.handles.tolist(), each.positions.tolist(), strict=True)) for each in messages]


def test_a_sequence_is_introduced_once_and_its_decisions_come_in_order(peer: Peer) -> None:
    peer.live("sampler-1")
    peer.add(1, 2)
    peer.exchange.send(rows_of((1, 1), (2, 1)))
    peer.exchange.send(rows_of((1, 2), (2, 2)))
    peer.settle_down()
    first, second = peer.asked("sampler-1")
    assert [intro.request_id for intro in first.intros] == ["r1.0", "r2.0"] and second.intros == ()
    peer.decide("sampler-1", second.step, (1, 2, 8), (2, 2, 9))
    peer.decide("sampler-1", first.step, (2, 1, 6), (1, 1, 5), (1, 1, 5))
    peer.decide("sampler-2", first.step, (1, 1, 5))
    assert sorted(peer.collect(4)) == [(1, 1, 5), (1, 2, 8), (2, 1, 6), (2, 2, 9)]
    peer.settle_down()
    assert len(peer.exchange.undecided) == 0


def test_a_sampler_that_does_not_know_a_sequence_is_told_at_once(peer: Peer) -> None:
    peer.live("sampler-1")
    peer.add(1, 2)
    peer.exchange.send(rows_of((1, 1), (2, 1)))
    peer.exchange.send(rows_of((1, 2), (2, 2)))
    peer.settle_down()
    first, _ = peer.asked("sampler-1")
    peer.decide("sampler-1", first.step, (1, 1, -2), (2, 1, 5))
    assert peer.collect(1) == [(2, 1, 5)]
    again = wait_until(lambda: peer.asked_after_a_while("sampler-1"), description="it is told")
    assert keys_of(again) == [[(1, 1), (1, 2)]]
    assert [intro.handle for intro in again[0].intros] == [1] and again[0].step > first.step
    peer.decide("sampler-1", first.step - 10, (1, 7, -2))
    peer.settle_down()
    assert peer.asked("sampler-1") == [], "a position that nobody waits for"


def test_sequences_move_with_all_that_is_undecided_when_samplers_come_and_go(peer: Peer) -> None:
    both, handles = ("sampler-1", "sampler-2"), range(1, 13)
    peer.live(*both)
    peer.add(*handles)
    for position in (1, 2, 3):
        peer.exchange.send(rows_of(*((handle, position) for handle in handles)))
    peer.settle_down()
    own = {each: [handle for handle in handles if peer.sampler_of(handle, *both) == each] for each in both}
    assert own["sampler-1"] and own["sampler-2"]
    for each in both:
        assert keys_of(peer.asked(each)) == [[(handle, position) for handle in own[each]] for position in (1, 2, 3)]

    peer.live("sampler-1")
    peer.resend_overdue()
    peer.settle_down()
    (moved,) = peer.asked("sampler-1")
    assert keys_of([moved]) == [[(handle, position) for position in (1, 2, 3) for handle in own["sampler-2"]]]
    assert [intro.handle for intro in moved.intros] == own["sampler-2"]

    peer.live(*both)
    peer.resend_overdue()
    peer.settle_down()
    assert keys_of(peer.asked("sampler-2")) == [
        [(handle, position) for position in (1, 2, 3) for handle in own["sampler-2"]]
    ]
    peer.exchange.send(rows_of(*((handle, 4) for handle in handles)))
    peer.settle_down()
    (to_first,) = peer.asked("sampler-1")
    assert to_first.forget.tolist() == own["sampler-2"], "it need not remember what has moved away again"


def test_with_no_sampler_alive_rows_wait_and_go_to_the_first_that_comes(peer: Peer) -> None:
    peer.live()
    peer.add(1)
    peer.exchange.send(rows_of((1, 1)))
    peer.exchange.send(rows_of((1, 2)))
    peer.settle_down()
    assert peer.client.keys("candidates:*") == []
    peer.live("sampler-1")
    assert peer.resend_overdue() == []
    peer.settle_down()
    assert keys_of(peer.asked("sampler-1")) == [[(1, 1), (1, 2)]]


def test_rows_that_are_not_urgent_are_held_back_and_go_out_together(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "STANDING_MS", 20)
    peer = make_peer(publish_interval_s=60.0, max_held=3)
    peer.live("sampler-1")
    peer.add(1, 2)
    peer.exchange.send(rows_of((1, 1), (2, 1)))
    assert keys_of(peer.asked_soon("sampler-1")) == [[(1, 1), (2, 1)]], "urgent: at once"
    peer.exchange.send(rows_of((1, 2), (2, 2)), is_urgent=False)
    peer.exchange.send(rows_of((1, 3)), is_urgent=False)
    assert peer.asked_soon("sampler-1") == []
    peer.exchange.send(rows_of((1, 4), (2, 3)), is_urgent=False)
    assert keys_of(peer.asked_soon("sampler-1")) == [[(1, 2), (2, 2), (1, 3), (2, 3), (1, 4)]], (
        "as many steps as may be held"
    )
    peer.exchange.send(rows_of((1, 5), (2, 4)), is_urgent=False)
    peer.exchange.send(rows_of((1, 6), (2, 5)))
    (both,) = peer.asked_soon("sampler-1")
    assert keys_of([both]) == [[(2, 4), (1, 5), (2, 5), (1, 6)]], "with what is urgent"
    peer.decide(
        "sampler-1",
        both.step,
        *((handle, position, 5) for handle, last in ((1, 6), (2, 5)) for position in range(1, last + 1)),
    )
    assert len(peer.collect(11)) == 11 and not peer.exchange.undecided.handles
    peer.exchange.send(rows_of((1, 7)), is_urgent=False)
    assert keys_of(peer.asked_after_a_while("sampler-1")) == [[(1, 7)]], "compute waits, and so does nothing else"


def test_held_rows_are_dropped_with_what_they_were_computed_upon(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "STANDING_MS", 20)
    peer = make_peer(publish_interval_s=60.0, max_held=9)
    peer.live("sampler-1")
    peer.add(1, 2, 3)
    peer.exchange.send(rows_of((1, 1), (2, 1), (3, 1)))
    peer.asked_soon("sampler-1")
    for position in (2, 3, 4):
        peer.exchange.send(rows_of((1, position), (2, position), (3, position)), is_urgent=False)
    peer.exchange.undecided.truncate(1, 2)  # decided otherwise: computed again from there
    del peer.active[2]
    again = rows_of((1, 3))
    again.token_ids[:] = 77
    peer.exchange.send(again)
    (message,) = peer.asked_soon("sampler-1")
    assert keys_of([message]) == [[(1, 2), (3, 2), (1, 3), (3, 3), (3, 4)]] and message.token_ids.tolist() == [
        5,
        5,
        77,
        5,
        5,
    ]


def test_held_rows_wait_for_nothing_but_the_interval(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer(publish_interval_s=0.05, max_held=1000)
    peer.live("sampler-1")
    peer.add(1)
    peer.exchange.send(rows_of((1, 1)))
    assert len(peer.asked_soon("sampler-1")) == 1
    peer.exchange.send(rows_of((1, 2)), is_urgent=False)

    def has_come() -> bool:
        peer.exchange.receive(0)  # as every step does, whether it has rows or not
        return keys_of(peer.asked("sampler-1")) == [[(1, 2)]]

    wait_until(has_come, description="the row goes out, though no other follows it")


def test_a_redis_that_is_away_for_long_fails_nobody(
    url: str, make_peer: Callable[..., Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every try to write is one more time that the rows are sent, and none that a sampler said nothing."""
    monkeypatch.setattr(inbox_module, "STANDING_MS", 20)
    with FaultyRedis(socket_path(Path(url.removeprefix("unix://")).parent), tmp_path / "proxy.sock") as proxy:
        peer = make_peer(through=proxy.url)
        monkeypatch.setattr(peer.stage.transport.backoff, "failed", lambda _: 0.001)
        peer.live("sampler-1")
        peer.add(1)
        peer.exchange.send(rows_of((1, 1)))
        for _ in range(30):
            proxy.arm(1, "READONLY")
            peer.settle_down()
            assert peer.resend_overdue() == []
        proxy.arm()
        wait_until(lambda: peer.asked_after_a_while("sampler-1"), description="the row has arrived")


def test_a_transport_of_its_own_is_all_that_an_exchange_needs(make_peer: Callable[..., Peer]) -> None:
    """Its lines are connections beside the pool: leaving closes them, and hands on what is not finished."""
    peer = make_peer()
    assert isinstance(peer.stage.transport, Transport)
    peer.live("sampler-1")
    peer.add(1)
    entry: Any = peer.client.xadd(prompts(MODEL).key, {MESSAGE: encode(peer.active[1].message)})
    (delivery,) = wait_until(lambda: peer.exchange.receive(1, wait_s=0.05).prompts, description="the prompt")
    assert delivery.entry_id == entry
    peer.exchange.leave()
    (left,) = peer.client.xpending_range(prompts(MODEL).key, "compute", "-", "+", 9)
    assert left["times_delivered"] == 0 and left["time_since_delivered"] > 3_600_000
