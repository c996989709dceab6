"""Helper: a process that does for the gateway what would stall its event loop, and that can be
killed in the middle of it."""

import asyncio
import pickle
import sys
from contextlib import suppress

from shared.process.telemetry import get_logger
from shared.process.worker import FRAME

log = get_logger("penstock.gateway")

NUM_TRIES = 2  # a helper that was killed costs nobody a request
START_TIMEOUT_S = 60.0  # until it has imported what it needs, on a machine that is busy


class HelperFailed(Exception):
    """The helper process ended each time that it was asked this."""


class Helper:
    """One process, and one question at a time in it."""

    def __init__(self, module: str) -> None:
        """module: one which calls run_worker."""
        self.module = module
        self._process: asyncio.subprocess.Process | None = None
        self._killed: list[asyncio.subprocess.Process] = []  # which may not have ended yet
        self._is_ready = False  # the process has imported what it needs
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Start it, so that the first question need not wait for it."""
        async with self._lock:
            await self._running()

    async def stop(self) -> None:
        self._kill()
        for process in self._killed:
            await process.wait()

    async def ask(self, *question: bytes, timeout_s: float) -> object:
        """Return the helper's answer. Raises TimeoutError, having killed it, and HelperFailed.
        timeout_s is for the question: a helper that has to start gets longer."""
        async with self._lock:
            for _ in range(NUM_TRIES):
                try:
                    await self._get_ready()
                    async with asyncio.timeout(timeout_s):
                        return await self._exchange(question)
                except (asyncio.IncompleteReadError, ConnectionError):
                    log.warning("a helper died, starting another", module=self.module)
                    self._kill()
                except BaseException:  # too late, or cancelled in the middle: what it answers would be taken for the next question's
                    self._kill()
                    raise
        raise HelperFailed(self.module)

    async def _get_ready(self) -> None:
        await self._running()
        if not self._is_ready:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._exchange(())
            self._is_ready = True

    async def _exchange(self, question: tuple[bytes, ...]) -> object:
        process = await self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(FRAME.pack(sum(map(len, question))))
        for part in question:
            process.stdin.write(part)
        await process.stdin.drain()
        (length,) = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
        answer: object = pickle.loads(await process.stdout.readexactly(length))
        return answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._is_ready = False
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self.module,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=1 << 20,
            )  # fmt: skip
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            self._killed = [each for each in (*self._killed, process) if each.returncode is None]
