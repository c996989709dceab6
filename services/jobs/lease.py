"""The lease of a batch: one worker at a time runs it. Another may take it when the lease has expired."""

import redis.asyncio

from shared.wire.script import load_script
from shared.wire.streams import batch_lease_key

LEASE_S = 15.0

RENEW_LEASE = load_script("renew_lease")


class LeaseLost(Exception):
    """Another worker has the batch, or the batch is gone; the message says which."""


class Lease:
    """The lease of one run. token: names the run, and is unique."""

    def __init__(self, client: "redis.asyncio.Redis", batch_id: str, token: str) -> None:
        self.client = client
        self.key = batch_lease_key(batch_id)
        self.token = token

    async def take(self) -> bool:
        """Returns whether it was free."""
        return bool(await self.client.set(self.key, self.token, nx=True, px=int(LEASE_S * 1000)))

    async def renew(self) -> bool:
        """Returns whether it was still this run's."""
        return bool(await RENEW_LEASE.run(self.client, [self.key], self.token, int(LEASE_S * 1000)))

    async def is_free(self) -> bool:
        """Whether no run has it: Redis was away, or this worker stood still, for longer than the lease, and
        no other worker took it."""
        return not await self.client.exists(self.key)

    async def give_up(self) -> None:
        await RENEW_LEASE.run(self.client, [self.key], self.token, 0)
