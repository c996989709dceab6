"""Where is a request that does not end? Its log, its entries in the group streams, its keys; and
the end of every process's log.
"""

import asyncio
import os
from typing import Any

from tests.chaos.checks import groups
from tests.chaos.cluster import Cluster
from tests.chaos.redis_faults import REDIS_ERRORS
from tests.chaos.tally import Journal

LOG_LINES = 15
WATCHED_S = 3.0  # long enough to tell what stands still from what is slow
STREAMS = ("requests*", "prompts:*", "candidates:*", "decisions:*", "events:*", "control", "dead-letter")
MAX_REQUESTS = 6


async def explain(cluster: Cluster, journals: list[Journal]) -> str:
    """All there is to know about these requests."""
    lines = []
    try:
        async with cluster.store.client() as client:
            before = await lengths(client, "log:*", *STREAMS)
            await asyncio.sleep(WATCHED_S)
            after = await lengths(client, "log:*", *STREAMS)
            grown = {
                key: f"{after[key] - length:+d}"
                for key, length in before.items()
                if key in after and after[key] != length
            }
            lines.append(f"  in {WATCHED_S:g} s grew: {grown or 'nothing'}; load average {os.getloadavg()[0]:.1f}")
            for journal in journals[:MAX_REQUESTS]:
                lines.append(f"  {journal.name}")
                for response_id in journal.response_ids:
                    lines += [f"    {line}" for line in await locate(client, response_id)]
            lines.append(f"  queues: {await lengths(client, *STREAMS)}")
            lines.append(f"  replicas: {sorted(key.decode() for key in await client.keys('replica:*'))}")
    except REDIS_ERRORS as error:
        lines.append(f"  Redis: {error!r}")
    for slot in cluster.slots:
        lines.append(
            f"  --- {slot.name} ({slot.replica_id}, pid {slot.process.pid if slot.process else 'none'}, life "
            f"{slot.num_lives})"
        )
        lines.append(cluster.log_tail(slot, LOG_LINES))
    return "\n".join(lines)


async def locate(client: Any, response_id: str) -> list[str]:
    """A response's keys, and its sequences' entries."""
    found = [f"{response_id}: record lives {await client.ttl(f'response:{response_id}')} s"]
    for key in sorted(await client.keys(f"*:{response_id}*")):
        name = key.decode()
        kind = (await client.type(key)).decode()
        if name.startswith("log:"):
            last = await client.xrevrange(key, count=1)
            found.append(
                f"{name}: {await client.xlen(key)} entries, last {last[0][0].decode() if last else '-'}, "
                f"{show(last[0][1]) if last else ''}"
            )
        elif kind == "hash":
            found.append(f"{name}: {await client.hgetall(key)}")
        elif kind == "string" and not name.startswith("response:"):
            found.append(f"{name}: {await client.get(key)!r}, {await client.ttl(key)} s to live")
    for key, group in await groups(client):
        owners = {each["message_id"]: each for each in await client.xpending_range(key, group, "-", "+", 1000)}
        for entry_id, values in await client.xrange(key):
            if values.get(b"r", b"").startswith(response_id.encode()):
                pending = owners.get(entry_id)
                state = (
                    f"pending with {pending['consumer']!r}, idle {pending['time_since_delivered']} ms, delivered "
                    f"{pending['times_delivered']} times"
                    if pending
                    else "not taken"
                )
                found.append(f"{key.decode()} {entry_id.decode()} {values[b'r']!r}: {state}")
    return found


async def lengths(client: Any, *patterns: str) -> dict[str, int]:
    """Entries in each of the streams whose keys are like this."""
    found = {}
    for pattern in patterns:
        for key in await client.keys(pattern):
            found[key.decode()] = int(await client.xlen(key))
    return found


def show(values: dict[bytes, bytes]) -> str:
    return str(values.get(b"m", b""))[:160]
