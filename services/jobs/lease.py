"""The lease of a batch: one worker at a time runs it, and another may when that one has been silent
for a while."""

import redis.asyncio

from shared.wire.streams import batch_lease_key

LEASE_S = 15.0

# KEYS[1]: lease key. ARGV: token, ms. Renews or gives up (ms 0) a lease that is still this token's; returns
# whether it was.
RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then redis.call('DEL', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
"""


class LeaseLost(Exception):
    """Another worker has the batch, or it is gone; the message says which."""


class Lease:
    """The lease of one run. token: names the run; no other has the same."""

    def __init__(self, client: "redis.asyncio.Redis", batch_id: str, token: str) -> None:
        self.client = client
        self.key = batch_lease_key(batch_id)
        self.token = token

    async def take(self) -> bool:
        """Returns whether the lease was free."""
        return bool(await self.client.set(self.key, self.token, nx=True, px=int(LEASE_S * 1000)))

    async def renew(self) -> bool:
        """Returns whether it was still this run's."""
        return bool(await self.client.eval(RENEW, 1, self.key, self.token, int(LEASE_S * 1000)))

    async def is_free(self) -> bool:
        """Returns whether the lease is free: Redis was away, or this worker stood still, for longer than the lease, and no
        other worker took it."""
        return not await self.client.exists(self.key)

    async def give_up(self) -> None:
        await self.client.eval(RENEW, 1, self.key, self.token, 0)
