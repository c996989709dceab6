"""Bodies: received within a time, and parsed without stalling the event loop: short ones here, long
ones in helper processes."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel

from services.gateway.http.disconnect import unless_gone
from services.gateway.http.encodings import decoder_for
from services.requests.bodies.body import Body
from services.requests.bodies.content import Content, GivenImage
from services.requests.bodies.ignored import pass_over
from services.requests.bodies.parse import parse
from services.requests.workers.pool import HelperFailed, HelperPool
from shared.process.errors import Invalid, Rejected

INLINE_BYTES = 64 << 10  # of any shape: 15 ms at most, bench/bodies.py
PARSE_TIMEOUT_S = 20.0  # the worst 8 MB take 2 s
WITHIN_S = 40.0  # with the wait for its turn
QUICK_S = 1.0
MAX_OF_TENANT = 256  # that wait: a burst of long prompts is usual, and what they hold is bounded by max_bytes

B = TypeVar("B", bound=Body)


class BodyReader:
    def __init__(self, timeout_s: float, max_bytes: int, max_body_bytes: int, worker: str) -> None:
        """max_bytes: of all bodies that are here at once; max_body_bytes: of one that came
        compressed, once it is plain; worker: the module of the helpers that parse long ones."""
        self.timeout_s = timeout_s
        self.max_bytes = max_bytes
        self.max_body_bytes = max_body_bytes
        self.helpers = HelperPool(
            worker, "parsing long bodies", MAX_OF_TENANT, WITHIN_S, (*models(BaseModel), Content, GivenImage), QUICK_S
        )
        self._held = 0

    async def read(self, request: Request, kind: type[B] | Mapping[str, type[B]]) -> B:
        """The request's body, checked. Raises as `receiving`, Invalid (400), and as HelperPool does for a long one."""
        async with self.receiving(request) as data:
            if len(data) <= INLINE_BYTES:
                body = parse(kind, data)
            else:
                body = await unless_gone(request, self._parse_long(request.state.caller.tenant.tenant_id, kind, data))
        pass_over(*body.passed_over)
        return body

    @asynccontextmanager
    async def receiving(self, request: Request) -> AsyncIterator[bytes]:
        """The request's body, plain, and counted as long as it is worked on. Raises Invalid (400, 408
        for one that comes too slowly, 413, 415), Rejected (503) while others take all memory."""
        decoder, data = decoder_for(request.headers.get("content-encoding", ""), self.max_body_bytes), bytearray()
        try:
            async with asyncio.timeout(self.timeout_s):
                async for received in request.stream():
                    chunk = received if decoder is None else await asyncio.to_thread(decoder.feed, received)
                    data += chunk
                    self._held += len(chunk)
                    if self._held > self.max_bytes:
                        raise Rejected("the gateway is busy with long bodies", status=503, retry_after_s=1)
            if decoder is not None:
                decoder.finish()
            yield bytes(data)
        except TimeoutError:
            raise Invalid(
                f"the body did not come within {self.timeout_s:g} s", code="body_timeout", status=408
            ) from None
        finally:
            self._held -= len(data)

    async def _parse_long(self, tenant_id: str, kind: type[B] | Mapping[str, type[B]], data: bytes) -> B:
        try:
            outcome = await self.helpers.ask(tenant_id, names_of(kind), data, limit_s=PARSE_TIMEOUT_S)
        except TimeoutError:
            raise Rejected("the body could not be parsed in time", status=503, retry_after_s=1) from None
        except HelperFailed:
            raise Rejected("the body could not be parsed", status=503, retry_after_s=1) from None
        if isinstance(outcome, Invalid):
            raise outcome
        kinds: tuple[type[B], ...] = (kind,) if isinstance(kind, type) else tuple(kind.values())
        assert isinstance(outcome, kinds)
        return outcome


def names_of(kind: type[Body] | Mapping[str, type[B]]) -> bytes:
    """A kind of bodies, as the helper reads it."""
    return (
        orjson.dumps(
            kind.__name__ if isinstance(kind, type) else {field: each.__name__ for field, each in kind.items()}
        )
        + b"\n"
    )


def models(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Our own classes of parts of bodies."""
    for each in kind.__subclasses__():
        if each.__module__.startswith("services."):
            yield each
        yield from models(each)
