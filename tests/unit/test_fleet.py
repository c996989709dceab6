"""Fleets in the simulator: counted steps are the scheduler's own, every request ends once, and
replicas come and go as the manifest says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.scheduling.step_cost import StepCost
from services.operator.cli import main
from services.simulator.fleet import Fleet, Run
from services.simulator.machine import MeasuredCost
from services.simulator.policy import DOWN, SYNC_S, UP, Autoscaler, Limit, Policy, Trigger, proposal, read_policy
from services.simulator.replica import CountedBlocks, Outcomes, SimulatedReplica, SteadyScheduler
from services.simulator.report import Limits, figures
from services.simulator.roofline import Work
from services.simulator.simulator import replay
from services.simulator.trace import TraceRequest, load_trace, with_rate
from shared.process.errors import StartupError

MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/keda/scaled.yaml"
COST = MeasuredCost(StepCost(0.005, 1e-5, 1e-7))
LONGEST = 512  # tokens that each request asks for
BOTH = Policy((Trigger("lag", 4), Trigger("pending", 8)), 1, 6)
LAG = replace(BOTH, triggers=BOTH.triggers[:1])


@dataclass(frozen=True)
class Size:
    """A replica's limits."""

    num_blocks: int = 400
    max_num_seqs: int = 8
    max_batched_tokens: int = 64
    target_itl_s: float | None = None
    admission: str = "predicted"

    def scheduler(self, kind: type[Scheduler]) -> Scheduler:
        is_plain = kind is Scheduler
        blocks = (
            BlockManager(self.num_blocks, 16, prefix_caching=False) if is_plain else CountedBlocks(self.num_blocks, 16)
        )
        limits = {"max_num_seqs": self.max_num_seqs, "max_batched_tokens": self.max_batched_tokens}
        return kind(blocks, make_admission(self.admission, blocks), target_itl_s=self.target_itl_s, **limits)  # type: ignore[arg-type]

    def replica(self, outcomes: Outcomes) -> SimulatedReplica:
        scheduler = self.scheduler(SteadyScheduler)
        assert isinstance(scheduler, SteadyScheduler)
        return SimulatedReplica(scheduler, COST, outcomes, LONGEST)


SMALL = Size()


def run(
    requests: list[TraceRequest],
    num_replicas: int,
    *,
    size: Size = SMALL,
    policy: Policy | None = None,
    start_s: float = 5.0,
) -> Run:
    return Fleet(requests, size.replica, start_s=start_s, policy=policy).replay(num_replicas)


def timed(numbers: list[tuple[int, int, float]]) -> list[TraceRequest]:
    """Requests of prompts, answers, and seconds since the one before."""
    at, found = 0.0, []
    for prompt, answer, gap in numbers:
        at += gap
        found.append(TraceRequest(prompt, answer, at))
    return found


traces = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 120), st.sampled_from([0.0, 0.001, 0.02, 0.3, 5.0, 40.0])),
    min_size=1,
    max_size=60,
).map(timed)
sizes = st.builds(
    Size,
    st.sampled_from([32, 40, 60, 400]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([8, 64, 512]),
    st.sampled_from([None, 0.006]),
    st.sampled_from(["predicted", "paged", "reserve"]),
)
policies = st.builds(
    Policy,
    st.sampled_from([BOTH.triggers, LAG.triggers, BOTH.triggers[1:]]),
    st.integers(0, 2),
    st.integers(2, 6),
    st.sampled_from([5.0, 30.0]),
    st.sampled_from([10.0, 300.0]),
    st.sampled_from([UP, replace(UP, window_s=30.0)]),
    st.sampled_from([DOWN, replace(DOWN, window_s=15.0), replace(DOWN, limits=(Limit(1, False, 60.0),))]),
).map(
    lambda policy: replace(policy, min_replicas=max(policy.min_replicas, int(len(policy.triggers) == 1)))
)  # from none, it takes both triggers


@given(traces, sizes)
@settings(deadline=None)
def test_counted_steps_are_those_that_the_scheduler_would_make(requests: list[TraceRequest], size: Size) -> None:
    """One replica against the plain replay, which asks the scheduler for each step: equal to the last bit."""
    plain = replay(
        size.scheduler(Scheduler), requests, lambda batch: COST.seconds(Work.of(batch)), max_total_tokens=LONGEST
    )
    found = run(requests, 1, size=size).outcomes
    assert list(found.first_at) == [each.first_at for each in plain.timelines]
    assert list(found.last_at) == [each.last_at for each in plain.timelines]
    assert (found.num_steps, found.num_preemptions) == (plain.num_steps, plain.num_preemptions)


def test_most_steps_are_counted() -> None:
    requests = [
        replace(each, num_prompt_tokens=min(each.num_prompt_tokens, 100)) for each in load_trace("synthetic", 100)
    ]
    fitting = [each for each in requests if each.num_output_tokens < 400]
    found = run(with_rate(fitting, 4.0), 1, size=Size(4000, 64, 512)).outcomes
    assert found.num_asked < found.num_steps / 10


@given(traces, sizes, st.integers(1, 4), st.none() | policies)
@settings(deadline=None)
def test_every_request_ends_once_and_no_work_is_lost(
    requests: list[TraceRequest], size: Size, num_replicas: int, policy: Policy | None
) -> None:
    """This holds while replicas are started and ended, too."""
    found = run(requests, num_replicas if policy is None else policy.min_replicas, size=size, policy=policy)
    outcomes = found.outcomes
    assert bytes(outcomes.num_ends) == b"\1" * len(requests)
    for request, first_at, last_at in zip(requests, outcomes.first_at, outcomes.last_at, strict=True):
        assert request.arrived_at < first_at <= last_at <= found.seconds
    needed = sum(each.num_prompt_tokens + each.num_output_tokens - 1 for each in requests)
    assert outcomes.num_tokens >= needed
    assert outcomes.num_tokens == needed or outcomes.num_preemptions or found.num_handed_over
    if policy is None:
        assert found.replica_s == pytest.approx(num_replicas * found.seconds)
    else:
        assert found.replica_s <= policy.max_replicas * found.seconds * (1 + 1e-9)
        assert all(each.num_ready + each.num_loading <= policy.max_replicas for each in found.moments)


@given(
    traces.map(
        lambda requests: [
            replace(each, arrived_at=each.arrived_at + number / 100) for number, each in enumerate(requests)
        ]
    ),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_more_replicas_meet_no_fewer_limits_where_there_is_room_for_all(
    requests: list[TraceRequest], num_replicas: int
) -> None:
    """With a replica for each request, no request is slower than on fewer."""
    ample = len(requests)
    few, many, more = (
        figures(run(requests, count), Limits(0.02, 0.0055)) for count in (min(num_replicas, ample), ample, ample + 2)
    )
    assert few.share <= many.share == more.share
    assert few.ttft[-1] >= many.ttft[-1] - 1e-9 and few.tpot[-1] >= many.tpot[-1] - 1e-9


class WatchedFleet(Fleet):
    """Notes the work that there is whenever replicas end, and how many stay."""

    def __init__(self, requests: list[TraceRequest], policy: Policy) -> None:
        super().__init__(requests, SMALL.replica, start_s=20.0, policy=policy)
        self.ends: list[tuple[int, dict[str, float]]] = []

    def _scale(self, num_replicas: int, now: float) -> None:
        if num_replicas < len(self.members):
            self.ends.append((num_replicas, self.figures))
        super()._scale(num_replicas, now)


@given(traces, policies)
@settings(deadline=None)
def test_by_lag_and_pending_those_that_stay_have_places_for_all_work(
    requests: list[TraceRequest], policy: Policy
) -> None:
    """So what a replica does, or what it loads for, is never left to too few."""
    fleet = WatchedFleet(requests, replace(policy, triggers=BOTH.triggers))
    fleet.replay(policy.min_replicas)
    assert all(found["lag"] <= stay * 4 and found["pending"] <= stay * 8 for stay, found in fleet.ends)


def test_lag_alone_ends_replicas_that_load_or_run() -> None:
    """A wave of long answers: the first replica takes all of it as its backlog, so nothing lags behind."""
    requests = [TraceRequest(20, 200, 12.0 + number * 0.002) for number in range(1150)]
    lag_alone, lag_and_pending = (replace(policy, down=replace(DOWN, window_s=30.0)) for policy in (LAG, BOTH))
    lag, both = (run(requests, 1, policy=policy, start_s=90.0) for policy in (lag_alone, lag_and_pending))
    assert lag.num_ended["loading"] > 0
    fleet = WatchedFleet(requests, lag_alone)
    fleet.replay(1)
    assert any(found["pending"] > stay * SMALL.max_num_seqs for stay, found in fleet.ends)
    assert both.num_ended["loading"] == 0
    assert figures(both, Limits(60.0, 0.1)).goodput > figures(lag, Limits(60.0, 0.1)).goodput


def steer(
    policy: Policy, demand: Callable[[float], tuple[float, float]], seconds: float, current: int = 1
) -> list[int]:
    """The replicas after each decision, by a demand (lag, pending) at each time."""
    autoscaler, found = Autoscaler(policy), []
    for number in range(1, int(seconds / SYNC_S) + 1):
        lag, pending = demand(number * SYNC_S)
        current = autoscaler.sync(number * SYNC_S, {"lag": lag, "pending": pending}, current)
        found.append(current)
    return found


def test_the_autoscaler_decides_as_documented() -> None:
    """kubernetes.io, "Horizontal Pod Autoscaling": the formula and the default behavior."""
    assert [proposal(value, 16, 2) for value in (0, 28, 29, 32, 35, 36, 200)] == [0, 2, 2, 2, 2, 3, 13]
    wide = replace(BOTH, max_replicas=100)
    # each 15 s, 4 more or twice as many
    assert steer(wide, lambda _: (4000, 0), 60) == [5, 10, 20, 40]
    assert steer(BOTH, lambda _: (4000, 0), 60) == [5, 6, 6, 6]
    # the larger trigger wins
    assert steer(BOTH, lambda _: (8, 24), 15) == [3] and steer(BOTH, lambda _: (12, 8), 15) == [3]
    # down after 300 s in which nothing asked for more
    assert steer(BOTH, lambda now: (0, 40 if now <= 30 else 1), 360) == [5] * 21 + [1] * 3
    assert steer(
        replace(BOTH, down=replace(DOWN, window_s=0.0, limits=(Limit(1, False, 30.0),))), lambda _: (0, 1), 75, 5
    ) == [4, 4, 3, 3, 2]
    assert steer(replace(BOTH, down=replace(DOWN, select="Disabled")), lambda _: (0, 1), 600, 5)[-1] == 5
    # up only as far as all of the window's decisions go
    slow = replace(BOTH, up=replace(UP, window_s=40.0))
    assert steer(slow, lambda now: (0, 24 if now > 15 else 8), 75) == [1, 1, 1, 3, 3]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), min_size=1, max_size=40), policies)
def test_replicas_stay_within_bounds_and_a_demand_that_lasts_is_met(
    demands: list[tuple[int, int]], policy: Policy
) -> None:
    found = steer(
        policy, lambda now: demands[min(int(now / SYNC_S) - 1, len(demands) - 1)], (len(demands) + 60) * SYNC_S
    )
    least = max(1, policy.min_replicas)
    assert all(least <= count <= policy.max_replicas for count in found)
    figures_ = dict(zip(("lag", "pending"), demands[-1], strict=True))
    asked = max(math.ceil(figures_[each.metric] / each.target) for each in policy.triggers)
    assert found[-1] >= min(policy.max_replicas, max(least, math.ceil(asked / 1.1) - 1))


def test_the_first_replica_starts_for_a_request_and_the_last_ends_after_the_cooldown() -> None:
    policy = replace(BOTH, min_replicas=0, polling_s=5.0, cooldown_s=30.0)
    found = run([TraceRequest(5, 5, 1.0), TraceRequest(5, 5, 201.0)], 0, policy=policy, start_s=20.0)
    assert [first - at for first, at in zip(found.outcomes.first_at, (1.0, 201.0), strict=True)] == pytest.approx(
        [24.005, 24.005], abs=0.01
    )
    assert found.num_ended == {"idle": 1}


@pytest.mark.parametrize("number", [0, 1])
def test_from_none_one_trigger_leaves_requests_behind(number: int) -> None:
    """Lag alone ends the replica that has taken all, and pending alone starts none: both are said,
    and nothing waits for ever.
    """
    policy = replace(BOTH, triggers=(BOTH.triggers[number],), min_replicas=0, polling_s=5.0, cooldown_s=10.0)
    with pytest.raises(StartupError, match="--triggers: by these no replica starts"):
        run([TraceRequest(5, 490, 1.0) for _ in range(100)], 0, policy=policy, start_s=2.0)
    assert (
        run(
            [TraceRequest(5, 490, 1.0) for _ in range(100)],
            0,
            policy=replace(policy, triggers=BOTH.triggers),
            start_s=2.0,
        ).num_handed_over
        == 0
    )


def test_the_manifest_s_policy(tmp_path: Path) -> None:
    policy = read_policy(str(MANIFEST))
    assert policy == Policy((Trigger("lag", 16.0), Trigger("pending", 48.0)), 1, 4, 5.0, 600.0)
    text = MANIFEST.read_text().replace(
        "pollingInterval: 5\n  cooldownPeriod: 600",
        "advanced: {horizontalPodAutoscalerConfig: {behavior: {scaleDown: {stabilizationWindowSeconds: 60,"
        " policies: [{type: Pods, value: 1, periodSeconds: 30}]}}}}\n  cooldownPeriod: 600",
    )
    (tmp_path / "scaled.yaml").write_text(text)
    changed = read_policy(str(tmp_path / "scaled.yaml"))
    assert (changed.down.window_s, changed.down.limits, changed.up, changed.polling_s) == (
        60.0,
        (Limit(1, False, 30.0),),
        UP,
        30.0,
    )


def test_figures_by_hand() -> None:
    requests = [TraceRequest(8, 3, 0.0), TraceRequest(8, 1, 1.0)]
    outcomes = Outcomes(requests)
    outcomes.first_at[0], outcomes.last_at[0], outcomes.first_at[1], outcomes.last_at[1] = 0.5, 0.9, 3.5, 3.5
    found = figures(Run(outcomes, 4.0, 7200.0), Limits(2.0, 0.25))
    assert (found.qps, found.goodput, found.share, found.hours) == (0.5, 0.25, 0.5, 2.0)
    assert found.ttft[0] == pytest.approx(1.5) and found.tpot[0] == pytest.approx(0.1)
    assert figures(Run(outcomes, 4.0), Limits(2.5, 0.19)).share == 0.5


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv = tmp_path / "azure.csv"
    csv.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 "
        "18:16:50.9951690,396,109\r\n"
    )
    assert [each.arrived_at for each in load_trace(str(csv), None)] == [0.0, 64.314579]
    flags = ["simulate", "--trace", str(csv), "--num-requests", "40", "--speed", "2", "--replicas", "1", "2"]
    scaled = ["--autoscale", str(MANIFEST), "--triggers", "lag", "lag+pending", "--max-replicas", "3"]
    assert main([*flags, *scaled]) == 0
    printed = capsys.readouterr().out
    assert all(
        name in printed for name in ("1 fixed", "2 fixed", "1 to 3, by lag", "1 to 3, by lag+pending", "goodput")
    )
    (tmp_path / "none.yaml").write_text("kind: ScaledObject\nspec: {triggers: [{type: cpu}]}\n")
    (tmp_path / "bad.yaml").write_text("a: [\n")
    for bad in (
        ["--autoscale", str(tmp_path / "none.yaml")],
        ["--autoscale", str(tmp_path / "bad.yaml")],
        ["--autoscale", "missing.yaml"],
        ["--triggers", "speed", "--autoscale", str(MANIFEST)],
        ["--min-replicas", "9", "--max-replicas", "3", "--autoscale", str(MANIFEST)],
    ):
        assert main(["simulate", "--num-requests", "3", *bad]) == 2
        error = capsys.readouterr().err.splitlines()
        assert error[-1].startswith(f"penstock: {bad[0]}") and "Traceback" not in "".join(error)
    for flag, value in (("--replicas", "0"), ("--speed", "0"), ("--start-s", "-1"), ("--rate", "nan")):
        with pytest.raises(SystemExit):
            main(["simulate", flag, value])
        assert capsys.readouterr().err.startswith(f"penstock: {flag}: {value!r} is not a ")
