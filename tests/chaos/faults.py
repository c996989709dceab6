"""The faults: one table, each with a name, a weight, and whether it loses data. A fault heals itself before it returns.

Here are those of processes; of Redis: redis_faults.py; of clients and of what they send:
client_faults.py; of messages: poison.py; between the stages and Redis, and outages beyond the
time-outs: partitions.py; of the ranks of a group: rank_faults.py; of clocks, the KV cache and keys:
more_faults.py.
"""

import asyncio
import fnmatch
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from tests.chaos import client_faults, more_faults, partitions, poison, rank_faults, redis_faults
from tests.chaos.arena import Arena
from tests.chaos.cluster import Slot
from tests.chaos.proxy import MODES

Run = Callable[[Arena, random.Random], Awaitable[None]]

STAGES = ("gateway", "tokenizer", "compute", "sampler")
MOST_A_ROUND = {
    "redis": 3,
    "burst": 1,
    "network": 3,
    "long": 1,
}  # those of Redis go one after another; a burst takes as long as five starts
BURST = 5  # more than any number of deliveries after which a request is given up
LIVE_TIMEOUT_S = 20.0
OUTAGES_S = (60, 90, 300)

# the stages that a fault hits and does not name
HIDDEN = {
    "kill-everything": STAGES,
    "clocks-back": STAGES,
    "clocks-forth": STAGES,
    "resume-late": ("gateway",),
    **dict.fromkeys(("kill-rank", "stop-rank", "flip-kv-disk", "cut-kv-disk"), ("compute",)),
}

Draw = Literal[
    "always", "more", "long", "named"
]  # drawn always, with --more too, with --long alone; any of them by its name in --only
Need = Literal["proxies", "clocks", "keys", "kv-disk", "ranks"]  # what the run must have been started with


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    weight: int
    run: Run
    says: str
    may_lose: bool = False  # data that Redis had acknowledged: one clear error is a right answer
    family: str = ""  # of those that take long, a round has MOST_A_ROUND
    draw: Draw = "always"
    needs: Need | None = None

    @property
    def hits(self) -> frozenset[str]:
        """The stages whose processes it hits, and Redis; a fault that hits none of them counts as one of its own."""
        stages = {stage for stage in STAGES if stage in re.split(r"[-+]", self.name)}
        if self.family in ("redis", "long") or self.draw == "named":
            stages.add("redis")
        return frozenset(stages | {*HIDDEN.get(self.name, ())} or {self.name})


def kill(*stages: str) -> Run:
    """SIGKILL to one replica of each of the stages, at once."""

    async def run(arena: Arena, rng: random.Random) -> None:
        for stage in stages:
            arena.cluster.kill(rng.choice(arena.cluster.of(stage)))

    return run


def kill_all(stage: str | None = None) -> Run:
    """SIGKILL to every replica of a stage, or to everybody but Redis."""

    async def run(arena: Arena, rng: random.Random) -> None:
        for slot in arena.cluster.slots if stage is None else arena.cluster.of(stage):
            arena.cluster.kill(slot)

    return run


def burst(stage: str) -> Run:
    """One replica killed again and again, each time soon after it came back."""

    async def run(arena: Arena, rng: random.Random) -> None:
        slot = rng.choice(arena.cluster.of(stage))
        for _ in range(BURST):
            arena.cluster.kill(slot)
            await asyncio.sleep(0.2)
            await wait_live(arena, slot)
            await asyncio.sleep(rng.uniform(0.1, 1.2))

    return run


async def wait_live(arena: Arena, slot: Slot) -> None:
    for _ in range(int(LIVE_TIMEOUT_S / 0.1)):
        try:
            if await arena.cluster.is_live(slot):
                return
        except redis_faults.REDIS_ERRORS:
            pass
        await asyncio.sleep(0.1)


def stop(*stages: str) -> Run:
    """SIGSTOP for up to 12 s: a process that is there and does nothing, past its lease or not."""

    async def run(arena: Arena, rng: random.Random) -> None:
        slots = [
            slot
            for stage in stages
            if (slot := rng.choice(arena.cluster.of(stage))).is_alive and slot.stopped_since is None
        ]
        pids = [slot.process.pid for slot in slots if slot.process is not None]
        for slot in slots:
            arena.cluster.stop(slot)
        try:
            await asyncio.sleep(rng.choice([rng.uniform(0.5, 3), rng.uniform(3, 12)]))
        finally:
            for slot, pid in zip(slots, pids, strict=False):
                arena.cluster.go_on(slot, pid)

    return run


def leave(stage: str) -> Run:
    """SIGTERM to one that has come up: it hands its work on and goes."""

    async def run(arena: Arena, rng: random.Random) -> None:
        slot = rng.choice(arena.cluster.of(stage))
        if slot.stopped_since is None and await arena.cluster.is_live(slot):
            arena.cluster.leave(slot)

    return run


def table() -> dict[str, Fault]:
    faults = [Fault(f"kill-{stage}", 2, kill(stage), "SIGKILL to one replica") for stage in STAGES]
    faults += [
        Fault(f"kill-every-{stage}", 1, kill_all(stage), "SIGKILL to all replicas of the stage") for stage in STAGES
    ]
    faults += [Fault(f"stop-{stage}", 2, stop(stage), "SIGSTOP to one replica for 0.5 to 12 s") for stage in STAGES]
    faults += [Fault(f"leave-{stage}", 1, leave(stage), "SIGTERM to one replica") for stage in STAGES]
    faults += [
        Fault(
            f"burst-{stage}",
            1,
            burst(stage),
            f"{BURST} kills of one replica, each soon after it came back",
            family="burst",
        )
        for stage in STAGES
    ]
    faults += [
        Fault("kill-redis", 2, redis_faults.kill, "SIGKILL; back after 0 to 5 s", family="redis"),
        Fault("stop-redis", 2, redis_faults.stop, "SIGSTOP for 0.5 to 12 s", family="redis"),
        Fault(
            "readonly",
            2,
            redis_faults.readonly,
            "a replica of a dead primary for 0.3 to 6 s: READONLY, UNBLOCKED",
            family="redis",
        ),
        Fault("noreplicas", 2, redis_faults.no_replicas, "NOREPLICAS for 0.3 to 6 s", family="redis"),
        Fault("oom", 2, redis_faults.out_of_memory, "OOM for 0.3 to 6 s", family="redis"),
        Fault("busy", 1, redis_faults.busy, "a script that runs for 0.5 to 4 s: BUSY", family="redis"),
        Fault("drop-connections", 1, redis_faults.drop_connections, "Redis closes every connection", family="redis"),
        Fault("script-flush", 1, redis_faults.flush_scripts, "NOSCRIPT", family="redis"),
        Fault("flushall", 2, redis_faults.flush_all, "every key is gone", may_lose=True, family="redis"),
        Fault(
            "cut-aof",
            2,
            redis_faults.cut_log,
            "SIGKILL to Redis, and the end of its append-only file is gone",
            may_lose=True,
            family="redis",
        ),
    ]
    faults += [
        Fault("kill-gateway+sampler", 2, kill("gateway", "sampler"), "SIGKILL to one of each at once"),
        Fault("kill-compute+sampler", 2, kill("compute", "sampler"), "SIGKILL to one of each at once"),
        Fault("stop-compute+sampler", 1, stop("compute", "sampler"), "SIGSTOP to one of each for 0.5 to 12 s"),
        Fault("kill-everything", 1, kill_all(), "SIGKILL to every process but Redis"),
        Fault("hang-up", 2, client_faults.hang_up, "six clients go away, in the middle or at once"),
        Fault("resume-late", 1, client_faults.resume_late, "for 10 s, clients resume late; and a gateway is killed"),
        Fault(
            "resume-twice", 2, client_faults.resume_twice, "a stream is taken over, and again, while it is being read"
        ),
        Fault("resume-nonsense", 2, client_faults.resume_nonsense, "streams and positions that there are not"),
        Fault("poison-request", 2, client_faults.poison_request, "valid JSON whose numbers overflow"),
        Fault("invalid-body", 2, client_faults.invalid_body, "lone surrogates, wrong types, half a body"),
        Fault("poison-message", 2, poison.poison_message, "entries that nobody can read, on every stream"),
    ]
    faults += [
        Fault("kill-rank", 4, rank_faults.kill_rank, "SIGKILL to a rank other than 0 of a group", needs="ranks"),
        Fault(
            "stop-rank",
            4,
            rank_faults.stop_rank,
            "SIGSTOP to a rank other than 0, for shorter or longer than --group-timeout-s",
            needs="ranks",
        ),
    ]
    faults += more()
    return {fault.name: fault for fault in faults}


def more() -> list[Fault]:
    """Faults that the minute of CI does not draw."""
    faults = [
        Fault(
            f"{mode}-{stage}",
            1,
            partitions.partition(mode, stage),
            f"{mode}, between the stage and Redis, for 0.5 to 12 s",
            family="network",
            draw="more",
            needs="proxies",
        )
        for mode in MODES
        for stage in STAGES
    ]
    faults += [
        Fault(
            "promote-replica",
            2,
            redis_faults.promote_replica,
            "a replica that lags by 0.1 to 3 s takes the place of a dead Redis",
            may_lose=True,
            family="redis",
            draw="more",
        ),
        Fault(
            "fill-memory",
            2,
            redis_faults.fill_memory,
            "64 KiB below maxmemory for 1 to 8 s: OOM, now and then",
            family="redis",
            draw="more",
        ),
        Fault(
            "fill-disk",
            2,
            redis_faults.fill_disk,
            "the append-only file can't grow for 1 to 8 s: MISCONF",
            family="redis",
            draw="more",
        ),
        Fault(
            "starve-compute",
            2,
            more_faults.starve_compute,
            f"every compute with a KV cache of {more_faults.TINY_CACHE} for 5 to 12 s",
            family="burst",
            draw="more",
        ),
        Fault(
            "refused-bodies",
            2,
            client_faults.refused_bodies,
            "bodies of 7.8 MB that are refused, and what stays of them in Redis",
            draw="more",
        ),
        Fault(
            "change-keys",
            2,
            more_faults.change_keys,
            "a tenant's key is rotated and revoked",
            draw="more",
            needs="keys",
        ),
        Fault(
            "flip-kv-disk",
            4,
            more_faults.flip_kv_disk,
            "bytes of --kv-disk's file change, and a compute dies",
            draw="more",
            needs="kv-disk",
        ),
        Fault(
            "cut-kv-disk",
            2,
            more_faults.cut_kv_disk,
            "--kv-disk's file is cut off, or gone, and a compute dies",
            draw="more",
            needs="kv-disk",
        ),
        Fault(
            "clocks-back",
            2,
            more_faults.jump(-1),
            "clocks 90 s to 24 h back for 2 to 8 s: all, Redis', or one process's",
            may_lose=True,
            draw="named",
            needs="clocks",
        ),
        Fault(
            "clocks-forth",
            2,
            more_faults.jump(1),
            "the same, ahead: Redis forgets what expires",
            may_lose=True,
            draw="named",
            needs="clocks",
        ),
    ]
    for seconds in OUTAGES_S:
        faults += [
            Fault(
                f"outage-{seconds}",
                1,
                partitions.outage(seconds),
                f"Redis is dead for {seconds} s",
                family="long",
                draw="long",
            ),
            Fault(
                f"blackout-{seconds}",
                1,
                partitions.blackout(seconds),
                f"nobody reaches Redis for {seconds} s",
                family="long",
                draw="long",
                needs="proxies",
            ),
        ]
    says = (
        f"compute does not reach Redis for {partitions.BLIND_S + partitions.LONGER_S:g} s, and at their end a "
        f"gateway does not for {partitions.AWAY_S:g} s"
    )
    return [
        *faults,
        Fault("blind-compute", 2, partitions.blind_compute, says, family="long", draw="long", needs="proxies"),
    ]


FAULTS = table()


def choose(only: tuple[str, ...], excluded: tuple[str, ...], draws: tuple[Draw, ...] = ("always",)) -> list[Fault]:
    """The faults that these patterns leave; without `only`, of these draws. Raises ValueError where
    a pattern or the whole leaves none.
    """

    def matches(fault: Fault, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatch(fault.name, pattern) for pattern in patterns)

    for pattern in (*only, *excluded):
        if not fnmatch.filter(FAULTS, pattern):
            raise ValueError(f"no fault is called {pattern}: --list shows them")
    wanted = [fault for fault in FAULTS.values() if (matches(fault, only) if only else fault.draw in draws)]
    chosen = [fault for fault in wanted if not matches(fault, excluded)]
    if not chosen:
        raise ValueError("no fault is left")
    return chosen
