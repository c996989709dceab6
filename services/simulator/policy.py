"""Policy: when replicas are started and ended, as KEDA and Kubernetes' autoscaler decide it.

KEDA starts the first replica, and ends the last ones, by what its triggers say each pollingInterval
(keda.sh/docs, "ScaledObject specification"). Between these the HorizontalPodAutoscaler decides every
15 s, by the algorithm and with the defaults of its documentation (kubernetes.io, "Horizontal Pod
Autoscaling"; pkg/controller/podautoscaler/horizontal.go).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from services.simulator.reading import reason
from shared.process.errors import StartupError

SYNC_S = 15.0  # between two decisions of the HorizontalPodAutoscaler
TOLERANCE = 0.1  # by which a metric may miss its target, and nothing happens
# of a redis-streams trigger: the field with its target, and its name here
METRICS = {"lagCount": "lag", "pendingEntriesCount": "pending"}


@dataclass(frozen=True, slots=True)
class Trigger:
    metric: str  # lag: entries that no replica has taken; pending: those that one has, and that have not ended
    target: float  # for each replica
    activation: float = 0.0  # above it, the first replica is started


@dataclass(frozen=True, slots=True)
class Limit:
    """So many replicas, or percent of them, may come or go in period_s."""

    value: float
    is_percent: bool
    period_s: float


@dataclass(frozen=True, slots=True)
class Rules:
    """The behavior of the autoscaler in one direction."""

    window_s: float  # the most cautious of the window's decisions counts
    limits: tuple[Limit, ...]
    select: str = "Max"  # which limit counts: Max, Min, or Disabled


UP = Rules(0.0, (Limit(4, False, 15.0), Limit(100, True, 15.0)))
DOWN = Rules(300.0, (Limit(100, True, 15.0),))


@dataclass(frozen=True, slots=True)
class Policy:
    triggers: tuple[Trigger, ...]
    min_replicas: int
    max_replicas: int
    polling_s: float = 30.0
    cooldown_s: float = 300.0  # without activity, until the last replicas end; only where min_replicas is 0
    up: Rules = UP
    down: Rules = DOWN


@dataclass(slots=True)
class Autoscaler:
    """Decides by figures: entries by the triggers' metrics, over all replicas. Call `poll` every
    polling_s, and `sync` every SYNC_S; both return the number of replicas that there are to be."""

    policy: Policy
    _active_at: float = 0.0
    _wanted: list[tuple[float, int]] = field(default_factory=list)  # when, and how many the metrics asked for
    _changes: list[tuple[float, int]] = field(default_factory=list)  # when, and how many came or went

    def poll(self, now: float, figures: Mapping[str, float], current: int) -> int:
        """KEDA's part: from none to the first, and back to none."""
        if any(figures[each.metric] > each.activation for each in self.policy.triggers):
            self._active_at = now
            return max(current, self.policy.min_replicas, 1)
        if self.policy.min_replicas == 0 and now - self._active_at >= self.policy.cooldown_s:
            return 0
        return max(current, self.policy.min_replicas)

    def sync(self, now: float, figures: Mapping[str, float], current: int) -> int:
        """The autoscaler's part, where there is at least one."""
        minimum, maximum = max(self.policy.min_replicas, 1), self.policy.max_replicas
        if current == 0:
            return 0
        if not minimum <= current <= maximum:
            return min(max(current, minimum), maximum)
        wanted = max(proposal(figures[each.metric], each.target, current) for each in self.policy.triggers)
        wanted = self._stabilize(now, wanted, current)
        if wanted > current:
            wanted = max(current, min(wanted, maximum, self._bound(self.policy.up, 1, now, current)))
        elif wanted < current:
            wanted = min(current, max(wanted, minimum, self._bound(self.policy.down, -1, now, current)))
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted

    def _stabilize(self, now: float, wanted: int, current: int) -> int:
        """Go up no further than all decisions of the window for that, and down no further either."""
        self._wanted = self._wanted or [(now, current)]
        lowest = min([wanted, *(count for at, count in self._wanted if at > now - self.policy.up.window_s)])
        highest = max([wanted, *(count for at, count in self._wanted if at > now - self.policy.down.window_s)])
        longest = max(self.policy.up.window_s, self.policy.down.window_s)
        self._wanted = [(at, count) for at, count in self._wanted if at > now - longest] + [(now, wanted)]
        return min(max(current, lowest), highest)

    def _bound(self, rules: Rules, sign: int, now: float, current: int) -> int:
        """The most replicas that there may be by the rules, or, where sign is -1, the fewest."""
        if rules.select == "Disabled":
            return current
        bounds = []
        for limit in rules.limits:
            before = current - sum(change for at, change in self._changes if at > now - limit.period_s)
            change = math.ceil(before * limit.value / 100) if limit.is_percent else int(limit.value)
            bounds.append(sign * before + change)
        return sign * (max(bounds) if rules.select == "Max" else min(bounds))


def proposal(value: float, target: float, current: int) -> int:
    """The replicas that one metric asks for: desired = ceil(value / target), or as many as there are
    if each has about its target."""
    return current if abs(value / (target * current) - 1) <= TOLERANCE else math.ceil(value / target)


def read_policy(path: str) -> Policy:
    """The policy of the manifest's ScaledObject whose triggers read the stream for compute. Raises
    StartupError for a file without one."""
    try:
        documents = list(yaml.safe_load_all(Path(path).read_text(encoding="utf-8")))
        specs = [each["spec"] for each in documents if isinstance(each, dict) and each.get("kind") == "ScaledObject"]
        found = [
            spec
            for spec in specs
            if any(each.get("metadata", {}).get("consumerGroup") == "compute" for each in spec["triggers"])
        ]
        if not found:
            raise ValueError("no ScaledObject has a redis-streams trigger with consumerGroup compute")
        return policy_of(found[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise StartupError(f"--autoscale {path}: {' '.join(reason(error).split())}") from None


def policy_of(spec: dict[str, Any]) -> Policy:
    """The policy of a ScaledObject's spec. Raises ValueError, KeyError and TypeError for one that says
    something else."""
    triggers = []
    for trigger in spec["triggers"]:
        metadata = trigger["metadata"]
        name = next((each for each in METRICS if each in metadata), None)
        if name is None:
            raise ValueError(f"a trigger has none of {', '.join(METRICS)}")
        target = float(metadata[name])
        if target <= 0:
            raise ValueError(f"{name} must be above 0, got {metadata[name]}")
        triggers.append(
            Trigger(METRICS[name], target, float(metadata.get("activationLagCount", 0)) if name == "lagCount" else 0.0)
        )
    minimum, maximum = int(spec.get("minReplicaCount", 0)), int(spec.get("maxReplicaCount", 100))
    if not 0 <= minimum <= maximum or maximum == 0:
        raise ValueError(
            f"minReplicaCount {minimum} must be from 0 to maxReplicaCount, and that above 0, got {maximum}"
        )
    behavior = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {})
    polling_s, cooldown_s = float(spec.get("pollingInterval", 30)), float(spec.get("cooldownPeriod", 300))
    if polling_s <= 0 or cooldown_s < 0:
        raise ValueError(
            f"pollingInterval must be above 0, got {polling_s:g}, and cooldownPeriod at least 0, got {cooldown_s:g}"
        )
    up, down = (rules_of(behavior.get(name, {}), default) for name, default in (("scaleUp", UP), ("scaleDown", DOWN)))
    return Policy(tuple(triggers), minimum, maximum, polling_s, cooldown_s, up, down)


def rules_of(fields: dict[str, Any], default: Rules) -> Rules:
    """Rules of a behavior's scaleUp or scaleDown; what it leaves out is as by default."""
    limits = tuple(
        Limit(float(each["value"]), each["type"] == "Percent", float(each["periodSeconds"]))
        for each in fields.get("policies", [])
    )
    select = str(fields.get("selectPolicy", "Max"))
    if select not in ("Max", "Min", "Disabled"):
        raise ValueError(f"selectPolicy must be Max, Min or Disabled, got {select}")
    return Rules(float(fields.get("stabilizationWindowSeconds", default.window_s)), limits or default.limits, select)
