"""Bodies: received within a time, and parsed without stalling the event loop: short ones here, long ones in a helper process."""

import asyncio
import pickle
import sys
from contextlib import suppress

from fastapi import Request

from services.gateway.body_worker import KINDS, REPLY, REQUEST
from services.gateway.openai.parse import parse
from services.gateway.openai.schemas import Body
from shared.errors import Invalid, Rejected
from shared.telemetry import get_logger

log = get_logger("penstock.gateway")

INLINE_BYTES = 64 << 10  # of any shape: 15 ms at most, bench/bodies.py
PARSE_TIMEOUT_S = 20.0  # the worst 8 MB take 2 s


class BodyReader:
    """Owns the helper process; one body at a time is in it."""

    def __init__(self, timeout_s: float, max_bytes: int) -> None:
        """max_bytes: of all bodies that are here at once."""
        self.timeout_s = timeout_s
        self.max_bytes = max_bytes
        self._held = 0
        self._helper: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Start the helper, so that the first long body need not wait for it."""
        async with self._lock:
            await self._running()

    async def stop(self) -> None:
        helper = self._helper
        self._kill()
        if helper is not None:
            await helper.wait()

    async def read(self, request: Request, kind: str) -> Body:
        """The request's body, checked. Raises Invalid (400, or 408 for one that takes too long to come), Rejected (503) while others take all memory."""
        data = bytearray()
        try:
            async with asyncio.timeout(self.timeout_s):
                async for chunk in request.stream():
                    data += chunk
                    self._held += len(chunk)
                    if self._held > self.max_bytes:
                        raise Rejected("the gateway is busy with long bodies", status=503, retry_after_s=1)
            return parse(kind, bytes(data)) if len(data) <= INLINE_BYTES else await self._parse_long(kind, bytes(data))
        except TimeoutError:
            raise Invalid(f"the body did not come within {self.timeout_s:g} s", code="body_timeout", status=408) from None
        finally:
            self._held -= len(data)

    async def _parse_long(self, kind: str, data: bytes) -> Body:
        async with self._lock:
            for _ in range(2):  # a helper that was killed costs nobody a request
                try:
                    async with asyncio.timeout(PARSE_TIMEOUT_S):
                        outcome = await self._ask(kind, data)
                except (asyncio.IncompleteReadError, ConnectionError):
                    log.warning("the helper that parses long bodies died, starting another")
                    self._kill()
                    continue
                except TimeoutError:
                    self._kill()
                    raise Rejected("the body could not be parsed in time", status=503, retry_after_s=1) from None
                except BaseException:  # cancelled in the middle: what it answers would be taken for the next body's
                    self._kill()
                    raise
                if isinstance(outcome, Invalid):
                    raise outcome
                assert isinstance(outcome, Body)
                return outcome
        raise Rejected("the body could not be parsed", status=503, retry_after_s=1)

    async def _ask(self, kind: str, data: bytes) -> object:
        helper = await self._running()
        assert helper.stdin is not None and helper.stdout is not None
        helper.stdin.write(REQUEST.pack(KINDS.index(kind), len(data)))
        helper.stdin.write(data)
        await helper.stdin.drain()
        (length,) = REPLY.unpack(await helper.stdout.readexactly(REPLY.size))
        outcome: object = pickle.loads(await helper.stdout.readexactly(length))
        return outcome

    async def _running(self) -> asyncio.subprocess.Process:
        if self._helper is None or self._helper.returncode is not None:
            self._helper = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.gateway.body_worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=1 << 20,
            )  # fmt: skip
        return self._helper

    def _kill(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            with suppress(ProcessLookupError):
                helper.kill()
