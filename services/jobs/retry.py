"""Retries: what Redis can't do at the moment is done later."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import redis

from shared.process.errors import Recoverable
from shared.wire.transport import Backoff, is_temporary

T = TypeVar("T")


async def persist(operation: Callable[[], Awaitable[T]]) -> T:
    """operation(), again and again with growing pauses while Redis can't serve. What is not
    temporary is raised."""
    backoff = Backoff()
    while True:
        try:
            result = await operation()
        except (redis.RedisError, OSError, Recoverable) as error:
            if not (isinstance(error, Recoverable) or is_temporary(error)):
                raise
            await asyncio.sleep(backoff.failed(error))
            continue
        backoff.succeeded()
        return result
