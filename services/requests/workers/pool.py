"""HelperPool: processes for work that would stall the gateway's event loop. Each can be stopped in the
middle of its work, and tenants take turns at them."""

import asyncio
import os
import signal
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from shared.process.errors import Rejected
from shared.process.plain import Unreadable
from shared.process.telemetry import get_logger
from shared.process.worker import END, QUESTION, REPLY, environment, outcome_of

log = get_logger("penstock.gateway")

SIZE = 2
MAX_WAITING = 1024  # questions of all tenants
QUICK_S = 0.2  # a question that takes longer gives its process back where others wait
NUM_TRIES = 2  # a process that is killed must not cost a request
STUCK_S = 60.0  # for a reply that is not wanted any more: then the process is killed


class HelperFailed(Exception):
    """The helper process ended each time that it was asked this."""


class Helper:
    """One process. Its replies come in the order of its questions."""

    def __init__(self, module: str) -> None:
        """module: one which calls run_worker."""
        self.module = module
        self._process: asyncio.subprocess.Process | None = None
        self._replies: deque[asyncio.Future[tuple[int, bytes] | None]] = deque()  # that are owed
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def ask(self, question: tuple[bytes, ...], limit_s: float) -> tuple[int, bytes] | None:
        """Return the reply, or None if the process died. If the caller is cancelled, the question ends at once."""
        loop, process = asyncio.get_running_loop(), await self._running()
        assert process.stdin is not None
        reply: asyncio.Future[tuple[int, bytes] | None] = loop.create_future()
        self._replies.append(reply)
        process.stdin.writelines((QUESTION.pack(limit_s, sum(map(len, question))), *question))
        try:
            with suppress(ConnectionError):  # it died: `_read` says so
                await process.stdin.drain()
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            if question:
                self.end_question()
            loop.call_later(STUCK_S, lambda: None if reply.done() else kill(process))
            raise

    @property
    def is_begun(self) -> bool:
        return self._process is not None

    def end_question(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(QUESTION.pack(*END))

    async def stop(self) -> None:
        if self._process is not None:
            kill(self._process)
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._reading is None or self._reading.done():
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    self.module,
                    env=environment(),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,
                    limit=1 << 20,
                )
                self._reading = asyncio.create_task(self._read(self._process))
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while True:
                outcome, length = REPLY.unpack(await process.stdout.readexactly(REPLY.size))
                self._replies.popleft().set_result((outcome, await process.stdout.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError, IndexError):
            kill(process)
            await process.wait()
            while self._replies:
                self._replies.popleft().set_result(None)


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process and its child."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(eq=False, slots=True)
class PendingQuestion:
    tenant_id: str
    turn: "asyncio.Future[Helper]"
    began_at: float = 0.0
    is_slow: bool = False  # it was put back once
    is_put_back: bool = False  # it is being ended, to be asked again


@dataclass(eq=False)
class HelperPool:
    """Tenants take turns, and so do their questions: one that takes longer than quick_s is put back
    where others wait, and asked again from its beginning. All but one of the helpers may be busy
    with such; the last is for what is quick, and takes others only while nothing quick waits. The
    helpers start when they are needed."""

    module: str  # one which calls run_worker
    work: str  # what it does, for errors
    max_of_tenant: int  # questions of one tenant that may wait
    within_s: float  # from the asking on; a question that would wait for longer is rejected
    classes: Sequence[type] = ()  # of the objects in the answers
    quick_s: float = QUICK_S

    def __post_init__(self) -> None:
        self._helpers = [Helper(self.module) for _ in range(SIZE)]
        self._free = list(self._helpers)
        self._running: dict[Helper, PendingQuestion] = {}
        self._waiting: OrderedDict[str, deque[PendingQuestion]] = OrderedDict()  # by tenant, the next one first
        self._timer: asyncio.TimerHandle | None = None  # for the next look at what runs for long
        self._starting: set[asyncio.Task[object]] = set()

    async def start(self) -> None:
        """Start a helper, so that the first question need not wait for it."""
        await self._free[-1].ask((), STUCK_S)

    def begin_to_start(self) -> None:
        """Start all helpers in the background: questions will come."""
        for helper in (each for each in self._helpers if not each.is_begun):
            task = asyncio.get_running_loop().create_task(helper.ask((), STUCK_S))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def stop(self) -> None:
        for helper in self._helpers:
            await helper.stop()

    async def ask(self, tenant_id: str, *question: bytes, limit_s: float) -> object:
        """The answer, or the Invalid that it is. limit_s: of the question, once it has its turn.

        Raises TimeoutError, HelperFailed, and Rejected: 429 for a tenant with too many questions,
        503 where others take the time.
        """
        if (count := len(self._waiting.get(tenant_id, ()))) >= self.max_of_tenant:
            message = f"{count} requests of this key wait for {self.work} already"
            raise Rejected(message, status=429, retry_after_s=1, code="too_many_waiting")
        if sum(map(len, self._waiting.values())) >= MAX_WAITING:
            raise self._busy()
        loop = asyncio.get_running_loop()
        asked = PendingQuestion(tenant_id, loop.create_future())
        ends_at = loop.time() + self.within_s
        try:
            async with asyncio.timeout_at(ends_at):
                return await self._ask(asked, question, limit_s, ends_at)
        except TimeoutError:
            if asked.began_at and loop.time() - asked.began_at >= limit_s / 2:
                raise
            raise self._busy() from None

    async def _ask(self, asked: PendingQuestion, question: tuple[bytes, ...], limit_s: float, ends_at: float) -> object:
        """Raises TimeoutError, HelperFailed."""
        num_tries = 0
        while num_tries < NUM_TRIES:
            reply = await self._ask_in_turn(asked, question, limit_s, ends_at)
            try:
                if reply is not None:
                    return outcome_of(reply[1], reply[0], self.classes)
            except TimeoutError:
                if not asked.is_put_back:
                    raise
                asked.is_slow = True
                continue
            except (EOFError, Unreadable) as error:
                log.warning("a helper can't answer", module=self.module, error=error)
            num_tries += 1
        raise HelperFailed(self.module)

    async def _ask_in_turn(
        self, asked: PendingQuestion, question: tuple[bytes, ...], limit_s: float, ends_at: float
    ) -> tuple[int, bytes] | None:
        loop = asyncio.get_running_loop()
        asked.turn, asked.began_at, asked.is_put_back = loop.create_future(), 0.0, False
        self._waiting.setdefault(asked.tenant_id, deque()).append(asked)
        self._hand_out()
        try:
            helper = await asked.turn
            await helper.ask((), STUCK_S)
            asked.began_at = loop.time()
            self._hand_out()
            return await helper.ask(question, max(0.001, min(limit_s, ends_at - asked.began_at)))
        finally:
            self._leave(asked)

    def _leave(self, asked: PendingQuestion) -> None:
        if asked.turn.done() and not asked.turn.cancelled():
            helper = asked.turn.result()
            del self._running[helper]
            self._free.append(helper)
        else:
            self._withdraw(asked)
        self._hand_out()

    def _withdraw(self, asked: PendingQuestion) -> None:
        questions = self._waiting[asked.tenant_id]
        questions.remove(asked)
        if not questions:
            del self._waiting[asked.tenant_id]

    def _busy(self) -> Rejected:
        return Rejected(f"the gateway is busy with {self.work}", status=503, retry_after_s=1, code="gateway_busy")

    def _hand_out(self) -> None:
        """Give free helpers to the questions whose turn it is."""
        while self._free and (asked := self._next()) is not None:
            self._withdraw(asked)
            if asked.tenant_id in self._waiting:
                self._waiting.move_to_end(asked.tenant_id)
            helper = self._free.pop()
            self._running[helper] = asked
            asked.turn.set_result(helper)
        self._make_room()

    @property
    def _has_quick(self) -> bool:
        return any(not each.is_slow for questions in self._waiting.values() for each in questions)

    def _next(self) -> PendingQuestion | None:
        """The next question in turn. Slow questions leave the last helper to those that may be quick."""
        takes_slow = not self._has_quick or sum(self._left_s(each) <= 0 for each in self._running.values()) < SIZE - 1
        every = (each for questions in self._waiting.values() for each in questions)
        return next((each for each in every if not each.turn.done() and (takes_slow or not each.is_slow)), None)

    def _make_room(self) -> None:
        """If all helpers run slow questions and one waits that may be quick, put back the question that began last."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        running = self._running.items()
        if self._free or not self._has_quick or any(each.is_put_back for _, each in running):
            return
        if (left_s := max(self._left_s(each) for _, each in running)) > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._make_room)
            return
        helper, asked = max(running, key=lambda each: each[1].began_at)
        asked.is_put_back = True
        helper.end_question()

    def _left_s(self, asked: PendingQuestion) -> float:
        """Seconds until the question counts as slow."""
        return self.quick_s - (asyncio.get_running_loop().time() - asked.began_at if asked.began_at else 0.0)
