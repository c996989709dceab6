"""A tenant's limits over several cells. They are kept in the home cell's Redis, and no script there
can hand a request to another cell: the request is charged first, then submitted, and refunded if its
cell does not take it.

The places of ended requests are given back when a limit seems to be reached. A gateway that dies in
between has charged a request that never runs: the buckets are full again a minute later.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import redis
import redis.asyncio

from services.requests.store.tenants.limits import CHARGE, Caller, Charge
from shared.wire.script import load_script, table
from shared.wire.streams import RUNNING_LOG_TTL_S, inflight_key

CELL_TIMEOUT_S = 2.0  # for a cell to say what runs there
SUBMITTING_S = 10.0  # after this a charged request is in its cell, or never will be

REFUND = load_script("refund")


class SharedLimits:
    def __init__(self, home: "redis.asyncio.Redis", clients: "Mapping[str, redis.asyncio.Redis]") -> None:
        """home: of the home cell's Redis; clients: of the other cells', by mark."""
        self.home = home
        self.clients = clients

    async def charge(
        self,
        caller: Caller,
        mark: str,
        model: str,
        charge: Charge,
        request_ids: Sequence[str],
    ) -> list[int]:
        """Charge what is about to be submitted to another cell. Returns what is left; raises
        Rejected (429)."""
        place = f"@{mark} {time.time():.0f} {model}"
        asked = table(charge=asdict(charge), requests=request_ids, place=place, ttl=RUNNING_LOG_TTL_S)
        for _ in range(2):
            left, *exceeded = await CHARGE.run(self.home, caller.keys, asked)
            if not exceeded:
                return list(left)
            kind, wait_ms = exceeded[0]
            if kind != b"concurrency" or not await self.drop_ended(caller):
                break
        raise caller.refused(kind.decode(), wait_ms, left)

    async def confirm(self, caller: Caller, mark: str, model: str, request_ids: Sequence[str]) -> None:
        """Note that the requests are in their cell: their places end with them. Without this note, if home
        is away, they count for SUBMITTING_S at least."""
        if caller.tenant.max_concurrency is not None:
            with suppress(redis.RedisError, OSError):
                await self.home.hset(caller.keys[1], mapping=dict.fromkeys(request_ids, f"@{mark} 0 {model}"))

    async def give_back(self, caller: Caller, charge: Charge, request_ids: Sequence[str]) -> None:
        """Give back what was charged for a request that its cell refused, or could not take, if home
        can be reached."""
        with suppress(redis.RedisError, OSError):
            await REFUND.run(self.home, caller.keys, charge.requests, charge.tokens, *request_ids)

    async def drop_ended(self, caller: Caller) -> bool:
        """Give back the places of requests that have ended in other cells, or never came there. Returns
        whether there were any. A cell that is away keeps its places; a removed cell has none."""
        running: Any = await self.home.hgetall(caller.keys[1])
        by_cell: dict[bytes, list[tuple[bytes, str]]] = defaultdict(list)
        for request_id, value in running.items():
            if value.startswith(b"@"):
                mark, at, model = value[1:].split(b" ", 2)
                if time.time() - float(at) > SUBMITTING_S:
                    by_cell[mark].append((request_id, model.decode()))
        ended = [
            request_id for mark, places in by_cell.items() for request_id in await self._ended(mark.decode(), places)
        ]
        return bool(ended) and bool(await self.home.hdel(caller.keys[1], *ended))

    async def _ended(self, mark: str, places: list[tuple[bytes, str]]) -> list[bytes]:
        """The requests among these that are not in flight in the cell of that mark."""
        if mark not in self.clients:
            return [request_id for request_id, _ in places]
        try:
            async with asyncio.timeout(CELL_TIMEOUT_S), self.clients[mark].pipeline(transaction=False) as pipe:
                for request_id, model in places:
                    pipe.hexists(inflight_key(model), request_id)
                return [
                    request_id
                    for (request_id, _), is_there in zip(places, await pipe.execute(), strict=True)
                    if not is_there
                ]
        except (redis.RedisError, OSError, TimeoutError):
            return []
