"""KnownReplicas: the live replicas, and the last one of each model and stage that has none now.

If all replicas of a model were ended for lack of work, their last announcements are still known: the
model's names, its limits, how it writes calls. So a request for it can be made and wait until a
replica is started. Gateways and workers of batches write the announcements down in Redis while they
see the replicas.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import redis.asyncio
from msgspec import structs

from services.requests.store.client import persist
from shared.process.stages import PIPELINE
from shared.wire.load import Load
from shared.wire.messages import encode
from shared.wire.registry import Registry, decode_replicas
from shared.wire.replica import Replica
from shared.wire.stage import Stage
from shared.wire.streams import SERVED, SERVED_TTL_S, served_key
from shared.wire.transport import Backoff

LOOK_EVERY_S = 1.0
REWRITE_EVERY_S = 60.0  # also how late it sees what another process wrote or an operator deleted


class KnownReplicas:
    """The replicas that a process which makes requests knows of."""

    def __init__(self, stage: Stage, client: "redis.asyncio.Redis") -> None:
        self.stage = stage
        self.client = client
        self.backoff = Backoff()
        self._last: dict[tuple[str, str], Replica] = {}  # by stage and model
        self._looked_at = -math.inf
        self._joined = (Registry(), Registry())

    @property
    def registry(self) -> Registry:
        """The live replicas, and the last of each stage and model that has none."""
        live = self.stage.registry
        if self._joined[0] is not live:
            self._joined = (live, replace(live, replicas=live.replicas + tuple(gone(live, self._last))))
        return self._joined[1]

    def missing(self, model: str) -> list[str]:
        """The stages of the pipeline that have no live replica of the model."""
        return [stage for stage in PIPELINE if not self.stage.registry.of(stage, model)]

    async def run(self) -> None:
        """Look at it now and then, until cancelled."""
        while True:
            await persist(self.look, self.backoff)
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Write down the live replicas, if they changed or a minute has passed, and read the known ones.
        Raises RedisError, OSError."""
        seen = described(self.stage.registry)
        is_due = time.monotonic() - self._looked_at >= REWRITE_EVERY_S
        if not is_due and all(self._last.get(name) == each for name, each in seen.items()):
            return
        async with self.client.pipeline(transaction=False) as pipe:
            for name, each in seen.items():
                pipe.set(served_key(*name), encode(each), ex=SERVED_TTL_S)
                pipe.sadd(SERVED, ":".join(name))
            if seen:
                pipe.expire(SERVED, SERVED_TTL_S)
            pipe.smembers(SERVED)
            *_, members = await pipe.execute()
        names = sorted(name for name in (each.decode(errors="replace") for each in members) if ":" in name)
        values: list[Any] = await self.client.mget([served_key(*name.split(":", 1)) for name in names]) if names else []
        if forgotten := [name for name, value in zip(names, values, strict=True) if value is None]:
            await self.client.srem(SERVED, *forgotten)
        found = decode_replicas(zip(names, values, strict=True))
        self._last = {(each.stage, each.model): each for each in found if each.model is not None}
        self._joined, self._looked_at = (Registry(), Registry()), time.monotonic()


def gone(live: Registry, last: Mapping[tuple[str, str], Replica]) -> Iterator[Replica]:
    """The last replicas of stages and models that have no live one. A name that a live model has now is
    that model's."""
    models = {
        name: each.model for each in live.replicas if each.model is not None for name in (each.model, *each.aliases)
    }
    for (stage, model), each in last.items():
        if not live.of(stage, model) and models.get(model, model) == model:
            yield structs.replace(
                each, aliases=tuple(alias for alias in each.aliases if models.get(alias, model) == model)
            )


def described(registry: Registry) -> dict[tuple[str, str], Replica]:
    """The newest replica of each stage and model, without its momentary load and problem."""
    newest: dict[tuple[str, str], Replica] = {}
    for each in sorted(registry.replicas, key=lambda replica: (replica.started_at, replica.replica_id)):
        if each.model is not None and each.stage in PIPELINE:
            newest[each.stage, each.model] = structs.replace(each, idle_s=0.0, load=Load(), problem="")
    return newest
