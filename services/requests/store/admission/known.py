"""KnownReplicas: the live replicas, and the last one of each model and stage that has none now.

A model whose replicas were all ended for lack of work is still known by what they said of
themselves: its names, its limits, how it writes calls. So a request for it can be made and wait
until a replica is started. Gateways and workers of batches write that down in Redis while they see
the replicas.
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
REWRITE_EVERY_S = 60.0  # also what another wrote, or an operator deleted, is seen after this


class KnownReplicas:
    """The replicas of a process that makes requests, as far as it knows of them."""

    def __init__(self, stage: Stage, client: "redis.asyncio.Redis") -> None:
        self.stage = stage
        self.client = client
        self.backoff = Backoff()
        self._last: dict[tuple[str, str], Replica] = {}  # by stage and model
        self._looked_at = -math.inf
        self._joined = (Registry(), Registry())

    @property
    def registry(self) -> Registry:
        """The live replicas, and what is remembered of those that have no like among them."""
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
        """Write down who is there, if it is news or a minute old, and read what is known. Raises
        RedisError, OSError."""
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
    """The last replicas that have no like among the live ones. A name that a live model has
    now is that one's."""
    models = {name: each.model for each in live.replicas if each.model is not None for name in (each.model, *each.aliases)}
    for (stage, model), each in last.items():
        if not live.of(stage, model) and models.get(model, model) == model:
            yield structs.replace(each, aliases=tuple(alias for alias in each.aliases if models.get(alias, model) == model))


def described(registry: Registry) -> dict[tuple[str, str], Replica]:
    """The newest replica of each stage and model, without what is true of the moment only."""
    newest: dict[tuple[str, str], Replica] = {}
    for each in sorted(registry.replicas, key=lambda replica: (replica.started_at, replica.replica_id)):
        if each.model is not None and each.stage in PIPELINE:
            newest[each.stage, each.model] = structs.replace(each, idle_s=0.0, load=Load(), problem="")
    return newest
