"""KEDA in small: Deployments get the replicas that the ScaledObjects' own triggers and numbers say,
in time that passes faster.

As KEDA does, it starts the first replica once any trigger has something, and ends the last one when
none has had anything for `cooldownPeriod`. In between, as the HorizontalPodAutoscaler does, it
takes the most that a trigger wants: its value by its threshold, rounded up. Triggers by CPU want
nothing here.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from tests.kubernetes.kubelet import Kubelet

SPEED = 100.0  # times as fast as the ScaledObjects say
GONE_S = 60.0


@dataclass
class Keda:
    """Scales the Deployments of a kubelet."""

    kubelet: Kubelet
    client: "redis.asyncio.Redis"
    specs: dict[str, dict[str, Any]]  # of the ScaledObjects, by Deployment
    scaled: list[str] = field(default_factory=list)  # what was done, in words
    _active_at: dict[str, float] = field(default_factory=dict)
    _began_at: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Scale until cancelled."""
        try:
            while True:
                for name, spec in self.specs.items():
                    await self._scale(name, spec)
                await asyncio.sleep(min(each.get("pollingInterval", 30) for each in self.specs.values()) / SPEED)
        finally:
            await self.client.aclose()

    async def _scale(self, name: str, spec: dict[str, Any]) -> None:
        now, num_replicas, found = (
            time.monotonic(),
            len(self.kubelet.pods[name]),
            [await self._value(each) for each in spec["triggers"]],
        )
        if any(value > 0 for value, _ in found):
            self._active_at[name] = now
        rested_s = now - self._active_at.get(name, self._began_at)
        least_s = (
            spec["cooldownPeriod"]
            if name in self._active_at
            else spec.get("initialCooldownPeriod", 0) + spec["cooldownPeriod"]
        ) / SPEED
        wanted = max(1, spec["minReplicaCount"], *(-(-value // threshold) for value, threshold in found))
        if spec["minReplicaCount"] == 0 and rested_s > least_s:
            wanted = 0
        elif num_replicas == 0 and self._active_at.get(name) != now:
            return
        if num_replicas != (wanted := min(wanted, spec["maxReplicaCount"])):
            self.scaled.append(f"{name}: {num_replicas} to {wanted}, by {[value for value, _ in found]}")
            await self.kubelet.scale(name, wanted)

    async def _value(self, trigger: dict[str, Any]) -> tuple[int, int]:
        """A trigger's value, and its threshold."""
        said = trigger["metadata"]
        if trigger["type"] != "redis-streams":
            return 0, 1
        if "pendingEntriesCount" in said:
            pending: Any = await self.client.xpending(said["stream"], said["consumerGroup"])
            return int(pending["pending"]), int(said["pendingEntriesCount"])
        groups: Any = await self.client.xinfo_groups(said["stream"])
        lags = [each["lag"] for each in groups if each["name"] == said["consumerGroup"].encode()]
        return int(lags[0] or 0), int(said["lagCount"])  # none: Redis does not know it at the moment

    async def wait_for_none(self) -> None:
        """Until every Deployment that may has no replica."""
        async with asyncio.timeout(GONE_S):
            while any(self.kubelet.pods[name] for name, spec in self.specs.items() if spec["minReplicaCount"] == 0):
                await asyncio.sleep(0.1)
