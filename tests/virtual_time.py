"""Virtual time: an event loop whose clock stands still while there is work, and goes to the next
timer when there is none. Redis answers, and threads end, before a call to them returns: so nothing
takes time but sleep, and a run is the same each time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import redis
from redis.client import Pipeline

from shared.process.clock import Clock

T = TypeVar("T")
LONGEST_S = 3600.0  # that a test may take of its loop's time
BEGAN_AT = 1_700_000_000.0  # wall clock, s, when a loop's own is 0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Ends with AssertionError when all tasks wait and no timer is set."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(NextTimer(self))
        self.set_default_executor(AtOnce())

    def time(self) -> float:
        return self.now

    def clock(self) -> Clock:
        return Clock(lambda: BEGAN_AT + self.now, self.time)


class NextTimer(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not (ready := super().select(0)):
            assert timeout is not None, "everything waits, and no timer is set"
            self.loop.now += timeout
        return ready


class AtOnce(ThreadPoolExecutor):
    """Has work done where it is given."""

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(work(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class RedisAtOnce:
    """A real Redis behind asyncio's interface. A blocking read looks again every 10 ms of the loop."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url)
        self.connection_pool = self
        self.response_callbacks = self.client.response_callbacks
        self.is_connected = True

    def __getattr__(self, name: str) -> Any:
        command = getattr(self.client, name)

        async def ask(*args: Any, **options: Any) -> Any:
            return command(*args, **options)

        return ask

    def pipeline(self, *, transaction: bool) -> "PipelineAtOnce":
        return PipelineAtOnce(self.client.connection_pool, self.response_callbacks, transaction, None)

    def make_connection(self) -> "RedisAtOnce":
        return self

    async def send_command(self, command: str, block: str, block_ms: int, *others: Any, check_health: bool) -> None:
        assert (command, block, check_health) == ("XREAD", "BLOCK", False)
        self.read, self.block_ms = (command, *others), block_ms

    async def read_response(self) -> Any:
        connection: Any = self.client.connection_pool.get_connection()
        try:
            for _ in range(self.block_ms // 10):
                connection.send_command(*self.read)
                if (reply := connection.read_response()) is not None:
                    return reply
                await asyncio.sleep(0.01)
        finally:
            self.client.connection_pool.release(connection)

    async def disconnect(self, **_: Any) -> None:
        pass


class PipelineAtOnce(Pipeline):
    async def __aenter__(self) -> "PipelineAtOnce":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reset()

    async def execute(self, raise_on_error: bool = True) -> list[Any]:  # type: ignore[override]
        return super().execute(raise_on_error)


def run_virtual(loop: VirtualLoop, work: Coroutine[Any, Any, T], *background: Coroutine[Any, Any, Any]) -> T:
    """Returns what `work` does, while the others run, which end with it."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:

        async def both() -> T:
            tasks = [asyncio.create_task(each) for each in background]
            try:
                async with asyncio.timeout(LONGEST_S):
                    return await work
            finally:
                for task in tasks:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

        return runner.run(both())
