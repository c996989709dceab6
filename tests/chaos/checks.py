"""Checks of Redis once every request has ended: nothing queued, nothing pending, whole token logs,
no key without a TTL.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from shared.process.errors import Invalid
from shared.wire.messages import TokenEvent, decode
from shared.wire.replica import Replica
from shared.wire.streams import CELERY_PREFIX
from tests.chaos.cluster import Cluster

GROUP_STREAMS = ("requests*", "prompts:*")
PERMANENT = (
    "requests",
    "requests:",
    "prompts:",
    "replicas",
    "dead-letter",
    CELERY_PREFIX,
)  # keys, or how they begin, that need no TTL
DRAIN_POLL_S = 0.25
NO_END = "no end after"
MAX_SHOWN = 5


@dataclass(slots=True)
class Checks:
    """The checks of a run; logs that were found whole and ended are not read again."""

    cluster: Cluster
    whole: set[bytes] = field(default_factory=set)
    drafts: dict[tuple[str, int], tuple[int, int]] = field(
        default_factory=dict
    )  # by replica id and process: drafted tokens, and those that stood

    async def drain(self, timeout_s: float) -> list[str]:
        """Wait until nothing is queued or pending; what still is after timeout_s, in words."""
        deadline = time.monotonic() + timeout_s
        async with self.cluster.store.client() as client:
            while (left := await leftovers(client)) and time.monotonic() < deadline:
                await asyncio.sleep(DRAIN_POLL_S)
        return left

    async def num_decided(self) -> int:
        """Tokens that the live samplers have decided, as of their last announcements. While it
        grows, what has not ended is slow, and does not hang.
        """
        async with self.cluster.store.client() as client:
            announced = [await client.get(key) for key in await client.keys("replica:sampler:*")]
        return sum(int(decode(Replica, each).load.tokens or 0) for each in announced if each is not None)

    async def note_drafts(self) -> None:
        """Notes the drafts of compute replicas that live now, as last announced."""
        async with self.cluster.store.client() as client:
            announced = [await client.get(key) for key in await client.keys("replica:compute:*")]
        for each in (decode(Replica, value) for value in announced if value is not None):
            self.drafts[each.replica_id, each.pid] = (
                int(each.load.spec_decode_draft_tokens or 0),
                int(each.load.spec_decode_accepted_tokens or 0),
            )

    def told_drafts(self) -> str:
        """Counts of drafters and of tokens, but for processes that died before their round was over."""
        lives = ", ".join(f"{name} {count}" for name, count in self.cluster.speculators.most_common())
        drafted, stood = (sum(each[which] for each in self.drafts.values()) for which in (0, 1))
        return f"lives of compute by --speculate: {lives}; tokens drafted {drafted}, stood {stood}"

    async def after_round(self, *, may_lose: bool) -> list[str]:
        """Everything that is wrong in a Redis that has drained, and processes that nobody wants any
        more. may_lose: Redis may have lost data.
        """
        async with self.cluster.store.client() as client:
            return [
                *await self.broken_logs(client, may_lose=may_lose),
                *await keys_without_ttl(client),
                *self.cluster.orphans(),
            ]

    async def broken_logs(self, client: Any, *, may_lose: bool) -> list[str]:
        """Logs that are not p-0 for p = 1 … n and then one end. Where Redis has lost a request that
        compute began to log just then, and compute has died, too, nobody knows that there is an end
        to be written."""
        broken = []
        for key in await client.keys("log:*"):
            if key in self.whole:
                continue
            problem = log_problem(await client.xrange(key))
            if problem is None or (may_lose and problem.startswith(NO_END)):
                self.whole.add(key)
            elif await client.exists(key):
                broken.append(f"log {key.decode(errors='replace')}: {problem}")
        return broken[:MAX_SHOWN] + ([f"… and {len(broken) - MAX_SHOWN} more logs"] if len(broken) > MAX_SHOWN else [])

    async def idle_consumers(self) -> list[str]:
        """Consumers without a live replica and with nothing pending: nobody will ever ask for them again."""
        live = {slot.replica_id for slot in self.cluster.slots}
        found = []
        async with self.cluster.store.client() as client:
            for key, group in await groups(client):
                consumers = await client.xinfo_consumers(key, group)
                found += [
                    f"{key.decode()} {each['name'].decode()}"
                    for each in consumers
                    if each["name"].decode() not in live and not each["pending"]
                ]
        return found


async def groups(client: Any) -> list[tuple[bytes, bytes]]:
    """The group streams there are, each with each of its groups."""
    found = []
    for pattern in GROUP_STREAMS:
        for key in await client.keys(pattern):
            if await client.type(key) == b"stream":
                found += [(key, each["name"]) for each in await client.xinfo_groups(key)]
    return found


async def leftovers(client: Any) -> list[str]:
    """Entries in group streams, entries pending, places held."""
    left = []
    for pattern in GROUP_STREAMS:
        for key in await client.keys(pattern):
            if (length := await client.xlen(key)) > 0:
                left.append(f"{key.decode()} holds {length} entries")
    for key, group in await groups(client):
        if (num_pending := (await client.xpending(key, group))["pending"]) > 0:
            left.append(f"{key.decode()} has {num_pending} entries pending in group {group.decode()}")
    for key in await client.keys("inflight:*"):
        fields = await client.hgetall(key)
        if [name for name in fields if name] or int(fields.get(b"", 0)) != 0:
            left.append(f"{key.decode()} still holds {dict(list(fields.items())[:4])}")
    return left


async def keys_without_ttl(client: Any) -> list[str]:
    found = []
    for key in await client.keys("*"):
        name = key.decode(errors="replace")
        is_permanent = any(name == each or (each.endswith(":") and name.startswith(each)) for each in PERMANENT)
        if not is_permanent and await client.ttl(key) == -1:
            found.append(f"key {name} has no TTL")
    return found[:MAX_SHOWN] + (
        [f"… and {len(found) - MAX_SHOWN} more keys without a TTL"] if len(found) > MAX_SHOWN else []
    )


def log_problem(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> str | None:
    """The first problem of a log whose request should have ended; None for one that is whole."""
    position, end = 0, None
    for raw_id, values in entries:
        entry_id = raw_id.decode()
        if end is not None:
            return f"{entry_id} after its end at {end}"
        expected = (f"{position + 1}-0", f"{position}-1")
        if entry_id not in expected:
            return f"{entry_id} where {' or '.join(expected)} should be, of {len(entries)} entries"
        position = int(entry_id.split("-")[0])
        if is_end(values) or entry_id.endswith("-1"):
            end = entry_id
    if end is None and entries:
        return f"{NO_END} {entries[-1][0].decode()}"
    return None


def is_end(values: dict[bytes, bytes]) -> bool:
    try:
        return b"e" in values or decode(TokenEvent, values[b"m"]).finish_reason is not None
    except (Invalid, KeyError):
        return False
