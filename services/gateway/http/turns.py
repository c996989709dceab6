"""Turns: of a tenant's requests that come at once, a few begin in each round of the event loop. So
another's request waits for a few of them, and not for all."""

import asyncio
from collections import Counter, deque

A_ROUND = 2  # requests of one tenant


class Turns:
    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()  # in this round, by tenant
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant

    async def take(self, tenant_id: str) -> None:
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next_round)
        if self._begun[tenant_id] < A_ROUND:
            self._begun[tenant_id] += 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(tenant_id, deque()).append(turn)
        await turn

    def _next_round(self) -> None:
        self._begun.clear()
        for tenant_id, waiting in [*self._waiting.items()]:
            while waiting and self._begun[tenant_id] < A_ROUND:
                if not (turn := waiting.popleft()).done():
                    turn.set_result(None)
                    self._begun[tenant_id] += 1
            if not waiting:
                del self._waiting[tenant_id]
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_round)
