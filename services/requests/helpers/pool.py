"""HelperPool: some helper processes, and who may ask them next. What a tenant brings, it waits for
itself."""

import asyncio
from collections import Counter, OrderedDict, deque

from services.requests.helpers.helper import Helper
from shared.process.errors import Rejected

SIZE = 2
MAX_WAITING = 1024  # questions of all tenants


class HelperPool:
    """Tenants take turns, and none has all the helpers at once. The helpers start when they are
    needed."""

    def __init__(self, module: str, work: str, *, max_of_tenant: int, wait_s: float) -> None:
        """module: one which calls run_worker; work: what it does, for errors; max_of_tenant:
        questions of one tenant that may wait; wait_s: for a turn, who waits for longer may come
        again."""
        self.work = work
        self.max_of_tenant = max_of_tenant
        self.wait_s = wait_s
        self._helpers = [Helper(module) for _ in range(SIZE)]
        self._free = list(self._helpers)
        self._num_running: Counter[str] = Counter()  # by tenant
        self._waiting: OrderedDict[str, deque[asyncio.Future[Helper]]] = OrderedDict()  # by tenant, the next one first

    async def start(self) -> None:
        """Start a helper, so that the first question need not wait for it."""
        await self._helpers[-1].start()

    async def stop(self) -> None:
        for helper in self._helpers:
            await helper.stop()

    async def ask(self, tenant_id: str, *question: bytes, timeout_s: float) -> object:
        """Ask a helper. Raises Rejected (429 for a tenant with too many questions, 503 where the
        wait is too long) and what Helper.ask does."""
        helper = await self._turn(tenant_id)
        try:
            return await helper.ask(*question, timeout_s=timeout_s)
        finally:
            self._done(tenant_id, helper)

    async def _turn(self, tenant_id: str) -> Helper:
        waiting = self._waiting.get(tenant_id, ())
        if len(waiting) >= self.max_of_tenant:
            raise Rejected(f"{len(waiting)} requests of this key wait for {self.work} already", status=429, retry_after_s=1, code="too_many_waiting")
        if sum(map(len, self._waiting.values())) >= MAX_WAITING:
            raise self._busy()
        turn: asyncio.Future[Helper] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(turn)
        self._hand_out()
        try:
            async with asyncio.timeout(self.wait_s):
                return await turn
        except BaseException as error:  # too late, or its client has gone
            if turn.done() and not turn.cancelled():
                self._done(tenant_id, turn.result())
            else:
                self._withdraw(tenant_id, turn)
            if isinstance(error, TimeoutError):
                raise self._busy() from None
            raise

    def _withdraw(self, tenant_id: str, turn: "asyncio.Future[Helper]") -> None:
        questions = self._waiting[tenant_id]
        questions.remove(turn)
        if not questions:
            del self._waiting[tenant_id]

    def _busy(self) -> Rejected:
        return Rejected(f"the gateway is busy with {self.work}", status=503, retry_after_s=1, code="gateway_busy")

    def _hand_out(self) -> None:
        """Free helpers to those whose turn it is."""
        while self._free and (tenant_id := self._next()) is not None:
            questions = self._waiting[tenant_id]
            turn = next(each for each in questions if not each.done())
            self._withdraw(tenant_id, turn)
            if tenant_id in self._waiting:
                self._waiting.move_to_end(tenant_id)
            self._num_running[tenant_id] += 1
            turn.set_result(self._free.pop())

    def _next(self) -> str | None:
        most = max(1, len(self._helpers) - 1)
        able = (each for each in self._waiting if self._num_running[each] < most)
        return next((each for each in able if not all(turn.done() for turn in self._waiting[each])), None)  # who was cancelled withdraws

    def _done(self, tenant_id: str, helper: Helper) -> None:
        self._num_running[tenant_id] -= 1
        if not self._num_running[tenant_id]:
            del self._num_running[tenant_id]
        self._free.append(helper)
        self._hand_out()
