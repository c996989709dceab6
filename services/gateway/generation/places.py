"""Places for reading stored responses. Each tenant has its own at a gateway, so that a tenant that reads
much delays no other; and each reading counts as a tenth of a request against the tenant's requests a
minute."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import redis.asyncio

from services.requests.store.client import redis_errors_as_503
from services.requests.store.tenants.limits import Caller
from shared.process.errors import Rejected

AT_ONCE = 2  # readings of one tenant; each decodes a log in turns with other work
MAX_WAITING = 256  # of one tenant; beyond: 429
MAX_FOLLOWERS = 512  # streams that follow logs; each holds a connection to Redis
MAX_FOLLOWERS_OF_ONE = 128
PRICE = 0.1  # of a reading, in requests


class Reading:
    """The places of a gateway."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self._places: dict[str, asyncio.Semaphore] = {}  # by tenant, of those that read now
        self._num_reading: Counter[str] = Counter()  # or wait to
        self._num_followers: Counter[str] = Counter()

    @asynccontextmanager
    async def place(self, caller: Caller) -> AsyncIterator[None]:
        """Hold a place while the caller reads something that is stored. Raises Rejected (429) beyond his
        limits, Recoverable if Redis can't serve."""
        tenant_id = caller.tenant.tenant_id
        if self._num_reading[tenant_id] >= AT_ONCE + MAX_WAITING:
            raise Rejected(
                f"{MAX_WAITING} reads of stored responses wait already for this API key: try again later",
                status=429,
                retry_after_s=1,
                code="rate_limit_exceeded",
            )
        self._num_reading[tenant_id] += 1
        try:
            if caller.tenant.requests_per_minute is not None:
                with redis_errors_as_503():
                    refusal = await caller.charge_work(self.client, PRICE)
                if refusal is not None:
                    raise refusal
            async with self._places.setdefault(tenant_id, asyncio.Semaphore(AT_ONCE)):
                yield
        finally:
            self._num_reading[tenant_id] -= 1
            if not self._num_reading[tenant_id]:
                del self._num_reading[tenant_id]
                self._places.pop(tenant_id, None)

    def follow(self, tenant_id: str) -> Callable[[], None]:
        """Take a follower's place; call the returned function to give it back. Raises Rejected (429, 503)
        if there is none."""
        if self._num_followers[tenant_id] >= MAX_FOLLOWERS_OF_ONE:
            message = f"{MAX_FOLLOWERS_OF_ONE} streams of this key's background responses are open at this gateway"
            raise Rejected(message, status=429, retry_after_s=1, code="too_many_streams")
        if self._num_followers.total() >= MAX_FOLLOWERS:
            raise Rejected(
                "too many streams of background responses at this gateway",
                status=503,
                retry_after_s=1,
                code="too_many_streams",
            )
        self._num_followers[tenant_id] += 1

        def leave() -> None:
            self._num_followers[tenant_id] -= 1
            if not self._num_followers[tenant_id]:
                del self._num_followers[tenant_id]

        return leave
