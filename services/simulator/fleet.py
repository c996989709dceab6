"""Fleet: replicas of one model at a shared stream, and the policy that starts and ends them.

An event queue: a step's end, a replica that has loaded, a decision of the autoscaler. A replica
takes prompts between two steps as compute does (`Admitter.num_wanted`): for its free places, and a
backlog if no other has any; what waits is handed on, and what a replica that ends had is taken over
by others within a second. Not simulated: other stages, and offers of prompts by their prefixes.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tqdm import tqdm

from services.simulator.policy import SYNC_S, Autoscaler, Policy
from services.simulator.replica import Outcomes, SimulatedReplica
from services.simulator.trace import TraceRequest
from shared.process.errors import StartupError

BACKLOG = 1024  # as in services/compute/intake/admit.py
UPKEEP_S = 1.0  # as in services/compute/loop/service.py

Event = Callable[[float], None]


@dataclass(slots=True, eq=False)
class FleetReplica:
    """A replica, from its start to its end: s on the simulated clock."""

    started_at: float
    replica: SimulatedReplica | None = None  # None: it loads its model
    ended_at: float | None = None
    on_step: Event | None = None  # its step has run

    @property
    def num_active(self) -> int:
        """Requests that it has taken."""
        return self.replica.scheduler.num_unfinished if self.replica is not None else 0


@dataclass(frozen=True, slots=True)
class Moment:
    """The fleet at one time."""

    at: float  # s
    num_ready: int
    num_loading: int
    lag: int
    pending: int


@dataclass(slots=True)
class Run:
    """Results of a run."""

    outcomes: Outcomes
    seconds: float = 0.0  # until the last token
    replica_s: float = 0.0  # of all replicas, loading or not
    moments: list[Moment] = field(default_factory=list)  # every SYNC_S
    num_ended: Counter[str] = field(default_factory=Counter)  # replicas, by what they did: loading, busy, idle
    num_handed_over: int = 0  # requests, of replicas that were ended


class Fleet:
    def __init__(
        self,
        requests: list[TraceRequest],
        make_replica: Callable[[Outcomes], SimulatedReplica],
        *,
        start_s: float,
        policy: Policy | None = None,
    ) -> None:
        """start_s: from a replica's start until it takes prompts. The requests are in the order of their
        arrival."""
        self.run = Run(Outcomes(requests))
        self.stream: deque[int] = deque()  # numbers of requests that no replica has taken
        # numbers of requests, and their tokens: taken once, and free again
        self.released: deque[tuple[int, int]] = deque()
        self.members: list[FleetReplica] = []  # those that have not ended, the oldest first
        self.start_s = start_s
        self.policy = policy
        self._make_replica = make_replica
        self._idle: dict[FleetReplica, None] = {}  # the longest first
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        self._num_arrived = 0
        self._autoscaler = Autoscaler(policy) if policy is not None else None

    @property
    def figures(self) -> dict[str, float]:
        """The triggers' metrics."""
        return {
            "lag": len(self.stream),
            "pending": len(self.released) + sum([member.num_active for member in self.members]),
        }

    def replay(self, num_replicas: int, *, progress: bool = False) -> Run:
        """Run all requests to their ends, on so many replicas that are ready at the beginning. Raises
        StartupError if some never end, because no replica starts for them."""
        requests, outcomes = self.run.outcomes.requests, self.run.outcomes
        for _ in range(num_replicas):
            self._on_ready(self._start(0.0), 0.0)
        self._at(UPKEEP_S, self._on_upkeep)
        self._at(SYNC_S, self._on_sync)
        if self.policy is not None:
            self._at(self.policy.polling_s, self._on_poll)
        now = 0.0
        with tqdm(total=len(requests), desc="replaying", unit="request", disable=None if progress else True) as bar:
            while outcomes.num_ended < len(requests):
                if (
                    self._num_arrived < len(requests)
                    and (arrived_at := requests[self._num_arrived].arrived_at) <= self._events[0][0]
                ):
                    while self._num_arrived < len(requests) and requests[self._num_arrived].arrived_at <= arrived_at:
                        self.stream.append(self._num_arrived)
                        self._num_arrived += 1
                    self._wake(arrived_at)
                    continue
                now, _, event = heapq.heappop(self._events)
                event(now)
                if outcomes.num_ended - bar.n >= 1000:
                    bar.update(outcomes.num_ended - bar.n)
        self.run.seconds = now
        self.run.replica_s += sum(now - member.started_at for member in self.members)
        return self.run

    def _at(self, when: float, event: Event) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _start(self, now: float) -> FleetReplica:
        member = FleetReplica(now)
        self.members.append(member)
        return member

    def _on_ready(self, member: FleetReplica, now: float) -> None:
        if member.ended_at is None:
            member.replica = self._make_replica(self.run.outcomes)
            member.on_step = partial(self._on_step, member)
            self._go_on(member, now)

    def _on_step(self, member: FleetReplica, now: float) -> None:
        if member.ended_at is None and member.replica is not None:
            member.replica.end_step(now)
            self._go_on(member, now)

    def _go_on(self, member: FleetReplica, now: float) -> None:
        """The replica takes what it wants, and begins its next step."""
        assert member.replica is not None and member.on_step is not None
        if self.stream:
            for _ in range(min(len(self.stream), self._num_wanted(member, len(self.stream)))):
                member.replica.add(self.stream.popleft())
        ends_at = member.replica.begin_step(now)
        if ends_at is None:
            self._idle[member] = None
        else:
            self._at(ends_at, member.on_step)

    def _wake(self, now: float) -> None:
        """Idle replicas take what has come, the one first that waits longest."""
        while self._idle and self.stream:
            member = next(iter(self._idle))
            del self._idle[member]
            self._go_on(member, now)

    def _num_wanted(self, member: FleetReplica, num_there: int) -> int:
        """How many of so many prompts the replica takes."""
        assert member.replica is not None
        num_places = member.replica.scheduler.max_num_seqs - member.num_active
        if num_there <= num_places or num_places + BACKLOG <= 0:
            return max(0, num_places)
        return max(0, num_places + (0 if self._num_places_elsewhere(member, 1) else BACKLOG))

    def _num_places_elsewhere(self, member: FleetReplica, depth: int) -> int:
        """How many sequences other replicas lack that are to have `depth` for each place."""
        others = [each.replica.scheduler for each in self.members if each.replica is not None and each is not member]
        return sum([max(0, depth * each.max_num_seqs - each.num_unfinished) for each in others])

    def _on_upkeep(self, now: float) -> None:
        """Each replica takes over what was released, and hands on what waits for too long."""
        ready = [member for member in self.members if member.replica is not None]
        for member in ready if self.released else ():
            assert member.replica is not None
            for _ in range(min(len(self.released), self._num_wanted(member, len(self.released)))):
                member.replica.add(*self.released.popleft())
            if member in self._idle and member.num_active:
                del self._idle[member]
                self._go_on(member, now)
        for member in ready:
            assert member.replica is not None
            num_surplus = member.num_active - 2 * member.replica.scheduler.max_num_seqs
            if num_surplus > 0 and (num_free := self._num_places_elsewhere(member, 2)) > 0:
                self.released.extend((number, 0) for number in member.replica.hand_on(min(num_surplus, num_free)))
        self._at(now + UPKEEP_S, self._on_upkeep)

    def _on_poll(self, now: float) -> None:
        assert self._autoscaler is not None and self.policy is not None
        self._scale(self._autoscaler.poll(now, self.figures, len(self.members)), now)
        if not self.members and self._num_arrived == len(self.run.outcomes.requests):
            found = " and ".join(f"{value:g} {name}" for name, value in self.figures.items())
            raise StartupError(f"--triggers: by these no replica starts for the last requests ({found})")
        self._at(now + self.policy.polling_s, self._on_poll)

    def _on_sync(self, now: float) -> None:
        figures = self.figures
        num_loading = sum(member.replica is None for member in self.members)
        self.run.moments.append(
            Moment(now, len(self.members) - num_loading, num_loading, int(figures["lag"]), int(figures["pending"]))
        )
        if self._autoscaler is not None:
            self._scale(self._autoscaler.sync(now, figures, len(self.members)), now)
        self._at(now + SYNC_S, self._on_sync)

    def _scale(self, num_replicas: int, now: float) -> None:
        """Start replicas, or end some as Kubernetes does: those that load first, then the youngest."""
        while len(self.members) < num_replicas:
            self._at(now + self.start_s, partial(self._on_ready, self._start(now)))
        while len(self.members) > num_replicas:
            self._end(max(self.members, key=lambda each: (each.replica is None, each.started_at)), now)

    def _end(self, member: FleetReplica, now: float) -> None:
        """SIGTERM: what the replica has is released at once, with the tokens of its last step."""
        self.run.num_ended["loading" if member.replica is None else "busy" if member.num_active else "idle"] += 1
        released = member.replica.release() if member.replica is not None else []
        self.released.extend(released)
        self.run.num_handed_over += len(released)
        self.run.replica_s += now - member.started_at
        member.ended_at = now
        self.members.remove(member)
        self._idle.pop(member, None)
