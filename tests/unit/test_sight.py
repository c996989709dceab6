"""Absence counts only while the one who counts could see: not while Redis is away, and not while
the process itself is stopped.
"""

import math
import time

import pytest

from services.compute.intake.readers import Readers
from shared.process.stage_settings import StageSettings
from shared.wire.entries import RELEASED_MS
from shared.wire.registry import BLIND_AFTER_S, LEASE_S, Registry, follow
from shared.wire.replica import Replica
from shared.wire.stage import Stage

GRACE_S = 60.0
BEAT_S = 1.0


def replica(stage: str, replica_id: str) -> Replica:
    return Replica(stage, replica_id, "here", 1, 0.0, "m")


GATEWAY, SAMPLER = replica("gateway", "gateway-1"), replica("sampler", "sampler-1")


class Eyes:
    """A compute replica's looks and its readers, on a clock that the test holds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.registry = Registry()
        self.readers = Readers(GRACE_S)

    def look(self, *alive: Replica, seconds: float = BEAT_S) -> set[str]:
        """Looks for so many seconds, one each beat. Returns the gateways that are gone by then, of
        those that read here.
        """
        gone: set[str] = set()
        for _ in range(int(seconds / BEAT_S)):
            self.now += BEAT_S
            self.registry = follow(self.registry, Registry(alive), self.now)
            gone = self.readers.gone({"gateway-1"}, self.registry)
        return gone


def test_a_gateway_is_not_missed_while_compute_is_blind() -> None:
    """It is away for 5.5 s, most of which are the beginning of a gap of 62 s: nobody knows what it
    did in the rest of that.
    """
    eyes = Eyes()
    assert eyes.look(GATEWAY, seconds=5) == set()
    assert eyes.look(seconds=3) == set()
    eyes.now += 62
    assert eyes.readers.gone({"gateway-1"}, eyes.registry) == set(), "no look, no absence"
    assert eyes.look(seconds=2) == set()
    assert eyes.look(GATEWAY, seconds=5) == set()


@pytest.mark.parametrize("outage_s", [66.0, 300.0])
def test_after_an_outage_a_gateway_has_its_whole_grace_again(outage_s: float) -> None:
    eyes = Eyes()
    eyes.look(GATEWAY, seconds=5)
    eyes.look(seconds=30)
    eyes.now += outage_s
    assert eyes.look(seconds=GRACE_S) == set()
    assert eyes.look(seconds=2) == {"gateway-1"}


def test_a_gateway_that_stays_away_is_missed_after_its_grace() -> None:
    eyes = Eyes()
    assert eyes.look(seconds=GRACE_S) == set(), "absence counts from the first look"
    assert eyes.look(seconds=2) == {"gateway-1"}
    assert eyes.look(GATEWAY) == set()
    assert eyes.look(seconds=GRACE_S) == set()


def test_after_a_gap_whoever_was_alive_has_a_lease_to_come_back() -> None:
    """Else its sequences would move to other samplers, and clients be told that no stage is alive."""
    eyes = Eyes()
    eyes.look(GATEWAY, SAMPLER)
    eyes.now += 10
    eyes.look(GATEWAY, seconds=LEASE_S)
    assert eyes.registry.ids("sampler") == {"sampler-1"}
    eyes.look(GATEWAY, seconds=2)
    assert eyes.registry.ids("sampler") == set()
    eyes.look(SAMPLER)
    eyes.look(seconds=1)
    assert eyes.registry.ids("sampler") == set(), "without a gap an absent lease has run out"


def test_looks_that_are_late_by_less_than_a_lease_needs_are_no_gap() -> None:
    registry = follow(Registry(), Registry((SAMPLER,)), 1000.0)
    assert registry.seen_since == -math.inf
    assert follow(registry, Registry(), 1000.0 + BLIND_AFTER_S).seen_since == -math.inf
    assert follow(registry, Registry(), 1000.1 + BLIND_AFTER_S).seen_since == 1000.1 + BLIND_AFTER_S


class HeldStage(Stage):
    """Whose registry is what the test says."""

    seen = Registry()

    @property
    def registry(self) -> Registry:
        return self.seen


def test_nothing_is_claimed_from_the_living_after_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Redis was away nobody could renew anything. What was released may be claimed all the same."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stage = HeldStage("compute", StageSettings(redis_url="unix:///nowhere"))
    assert stage.claim_idle_ms(5000) == RELEASED_MS, "it has not looked yet"
    stage.seen = follow(stage.seen, Registry(), now)
    assert stage.claim_idle_ms(5000) == 5000, "what was idle before it came is nobody's"
    now = 1062.0
    assert stage.claim_idle_ms(5000) == RELEASED_MS, "it has not looked since"
    for now in (1062.0, 1063.0, 1064.0, 1065.0, 1066.0):
        stage.seen = follow(stage.seen, Registry(), now)
        assert stage.claim_idle_ms(5000) == RELEASED_MS
    now = 1067.0
    stage.seen = follow(stage.seen, Registry(), now)
    assert stage.claim_idle_ms(5000) == 5000


def test_a_loop_is_not_stuck_because_its_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped for 300 s, with steps that may take 60: the process goes on, and does not end itself."""
    now, idle_s = 1000.0, list[float]()

    class StoppedOnce:
        def wait(self, _: float) -> None:
            nonlocal now
            now += 300.0

        def clear(self) -> None:
            pass

    def beat() -> None:
        idle_s.append(stage.describe().idle_s)
        stage.stopping.set()
        stage._heartbeat._has_left = True

    monkeypatch.setattr(time, "monotonic", lambda: now)
    stage = Stage("compute", StageSettings(redis_url="unix:///nowhere"), step_timeout_s=60.0)
    monkeypatch.setattr(stage._heartbeat, "_wake", StoppedOnce())
    monkeypatch.setattr(stage._heartbeat, "beat", beat)
    stage._heartbeat.run()
    assert idle_s == [0.0]
