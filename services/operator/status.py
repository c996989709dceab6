"""`penstock status`: which replicas are alive and how busy, from Redis alone.

Replicas announce themselves once a second, with totals since their start. A rate is taken between
two of those announcements, and not between two looks, which may have one or two of them in between.
"""

import json
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import redis
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shared.process.errors import StartupError, words_of
from shared.process.stages import SERVING, STAGES
from shared.wire.registry import RENEW_EVERY_S, look, unlike_replicas
from shared.wire.replica import Replica
from shared.wire.streams import DEAD_LETTER, prompts, requests
from shared.wire.transport import connect, is_temporary

TOKENS = {
    "gateway": "output_tokens",
    "compute": "output_tokens",
    "sampler": "tokens",
}  # in a replica's load: a total since its start
LOOK_EVERY_S = 0.1
FIRST_LOOKS_S = 2.2  # two announcements come in that time
MAX_ANNOUNCEMENTS = 4  # that a rate is taken over
STUCK_AFTER_S = 10.0
WIDE = 110  # columns, from which on there is room for replicas' names and places
PIPE_WIDTH = 200


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's figures. None: it has no such figure, or not yet."""

    stage: str
    replica_id: str
    model: str | None
    running: int | None  # sequences
    waiting: int | None
    tokens_per_s: float | None
    ttft_s: float | None  # p50 of those that a gateway saw in the last minutes
    kv_cache_usage: float | None  # from 0 to 1
    prefix_hits: float | None  # of prompts' tokens, from 0 to 1
    disk_hits: float | None  # of prompts' tokens, those that were read from the disk
    offered: int | None  # requests that came since their prefix is there
    stolen: int | None  # requests that waited too long for the replica that has their prefix
    uptime_s: float
    host: str
    pid: int
    ranks: tuple[str, ...]  # the other processes of its group, by host and pid
    problem: str


@dataclass(frozen=True, slots=True)
class Status:
    replicas: list[ReplicaStatus]
    missing: list[str]  # stages without a live replica
    queues: dict[str, int]  # entries of a stream, waiting or being worked on
    dead_letters: int
    warnings: list[str]


class Watcher:
    """Looks at Redis again and again."""

    def __init__(self, client: "redis.Redis") -> None:
        self.client = client
        self._last: dict[str, Replica] = {}
        self._announced: dict[str, deque[tuple[float, float]]] = {}  # by replica: when, and its tokens until then

    def watch(self, seconds: float) -> Status:
        """Look for so long; returns how things are at the end. Raises what the client raises."""
        until = time.monotonic() + seconds
        while True:
            replicas = look(self.client).replicas
            now = time.monotonic()
            for replica in replicas:
                if replica != self._last.get(replica.replica_id) and (key := TOKENS.get(replica.stage)) is not None:
                    announced = self._announced.setdefault(replica.replica_id, deque(maxlen=MAX_ANNOUNCEMENTS))
                    announced.append((now, getattr(replica.load, key) or 0.0))
            self._last = {replica.replica_id: replica for replica in replicas}
            for gone in self._announced.keys() - self._last.keys():
                del self._announced[gone]
            if now >= until:
                return self._status(replicas)
            time.sleep(min(LOOK_EVERY_S, until - now))

    def _status(self, replicas: tuple[Replica, ...]) -> Status:
        models = sorted({replica.model for replica in replicas if replica.stage == "compute" and replica.model})
        keys = [stream(model).key for model in models for stream in (requests, prompts)]
        queues = {key: int(self.client.xlen(key)) for key in keys}
        order = {stage: number for number, stage in enumerate(STAGES)}
        lines = [
            self._line(each)
            for each in sorted(
                replicas, key=lambda each: (order.get(each.stage, len(order)), each.model or "", each.replica_id)
            )
        ]
        missing = [stage for stage in SERVING if all(each.stage != stage for each in replicas)]
        unlike = unlike_replicas(each for each in replicas if each.stage == "compute")
        return Status(lines, missing, queues, int(self.client.xlen(DEAD_LETTER)), unlike)

    def _line(self, replica: Replica) -> ReplicaStatus:
        load = replica.load
        running, waiting = load.sequences if load.running is None else load.running, load.waiting
        stuck = f"its loop has not come round for {replica.idle_s:.0f} s" if replica.idle_s > STUCK_AFTER_S else ""
        return ReplicaStatus(
            replica.stage,
            replica.replica_id,
            replica.model,
            whole(running),
            whole(waiting),
            self._rate(replica.replica_id),
            load.ttft_s,
            load.kv_cache_usage,
            share(load.prefix_cache_hits, load.prefix_cache_queries),
            share(load.kv_disk_tokens, load.prefix_cache_queries),
            whole(load.offered),
            whole(load.stolen),
            max(0.0, time.time() - replica.started_at),
            replica.host,
            replica.pid,
            replica.ranks,
            replica.problem or stuck,
        )

    def _rate(self, replica_id: str) -> float | None:
        """Tokens/s."""
        seen = self._announced.get(replica_id)
        if seen is None or len(seen) < 2:
            return None
        (began, first), (ended, last) = seen[0], seen[-1]
        return max(0.0, last - first) / (ended - began) if ended - began >= RENEW_EVERY_S / 2 else None


def show_status(redis_url: str, *, watch_s: float | None, as_json: bool) -> int:
    """Print it, once or every watch_s seconds. Returns the exit code: 1 if a stage is missing.
    Raises StartupError if Redis is away.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=PIPE_WIDTH)
    with answering(redis_url):
        watcher = Watcher(connect(redis_url))
        status = watcher.watch(FIRST_LOOKS_S)
    if watch_s is None:
        show(console, status, as_json)
        return 1 if status.missing else 0
    is_live = console.is_terminal and not as_json
    live = Live(render(status, console.width), console=console, screen=True, auto_refresh=False) if is_live else None
    try:
        with live or nullcontext():
            while True:
                if live is None:
                    show(console, status, as_json)
                try:
                    with answering(redis_url):
                        status = watcher.watch(watch_s)
                    shown = render(status, console.width)
                except StartupError as error:  # it may come back
                    if live is None:
                        raise
                    shown = Group(render(status, console.width), Text(f"\n{error}", style="bold red"))
                    time.sleep(watch_s)
                if live is not None:
                    live.update(shown, refresh=True)
    except KeyboardInterrupt:
        return 0


@contextmanager
def answering(redis_url: str) -> Iterator[None]:
    """Raises StartupError if Redis does not answer."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        where = re.sub("//.*@", "//", redis_url)  # without a password
        word = f"Redis does not answer at {where}: is Penstock up?" if is_temporary(error) else "Redis refuses:"
        # Sentinels' errors show objects
        raise StartupError(f"{word} ({words_of(error).partition(' : <')[0]})") from None


def show(console: Console, status: Status, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(asdict(status)) + "\n")
        sys.stdout.flush()
    else:
        console.print(render(status, console.width))


def render(status: Status, width: int) -> RenderableType:
    """A line a replica, what is wrong, and the queues."""
    is_wide = width >= WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("STAGE", no_wrap=True)
    table.add_column("MODEL", no_wrap=True, min_width=8, overflow="ellipsis")
    for name in ("RUNNING", "WAITING", "TOKENS/S", "TTFT", "KV", "UP"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("REPLICA", no_wrap=True, overflow="ellipsis")
        table.add_column("HOST", no_wrap=True, overflow="ellipsis")
        table.add_column("PID", justify="right", no_wrap=True)
    for line in status.replicas:
        table.add_row(
            *cells(line),
            *((line.replica_id, line.host, str(line.pid)) if is_wide else ()),
            style="red" if line.problem else "",
        )
    parts: list[RenderableType] = [table] if status.replicas else []
    if status.missing:
        missing = (
            "nothing runs: no stage is alive"
            if len(status.missing) == len(SERVING)
            else f"no {', no '.join(status.missing)} is alive"
        )
        parts.append(Text(missing, style="bold red"))
    parts += [Text(f"{line.replica_id}: {line.problem}", style="bold red") for line in status.replicas if line.problem]
    parts += [Text(each, style="bold yellow") for each in status.warnings]
    parts += [
        Text(text, style="dim") for line in status.replicas for text in (ranks_text(line), prefixes_text(line)) if text
    ]
    queues: dict[str, Any] = status.queues | {DEAD_LETTER: status.dead_letters}
    parts.append(
        Text("\nentries in streams: " + ", ".join(f"{key} {count:,}" for key, count in queues.items()), style="dim")
    )
    return Group(*parts)


def ranks_text(line: ReplicaStatus) -> str:
    """The processes of a compute replica that is a group; empty for one process."""
    if not line.ranks:
        return ""
    first, others = (
        f"{line.host}:{line.pid}",
        ", ".join(f"rank {rank} at {each}" for rank, each in enumerate(line.ranks, 1)),
    )
    return f"{line.replica_id}: a group, rank 0 at {first}, {others} (host:pid)"


def prefixes_text(line: ReplicaStatus) -> str:
    """Where a compute replica found its prompts' tokens; empty if it has no figures."""
    if not line.prefix_hits and not line.offered and not line.stolen:
        return ""
    found = f"{line.prefix_hits or 0:.0%} of its prompts' tokens were in its prefix cache"
    from_disk = f", {line.disk_hits:.0%} from disk" if line.disk_hits else ""
    moved = (
        f"; {line.offered or 0:,} prompts came for that, {line.stolen or 0:,} were stolen"
        if line.offered or line.stolen
        else ""
    )
    return f"{line.replica_id}: {found}{from_disk}{moved}"


def share(part: float | None, of: float | None) -> float | None:
    return None if part is None or not of else min(1.0, part / of)


def whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def cells(line: ReplicaStatus) -> tuple[str, ...]:
    return (
        line.stage,
        line.model or "",
        "" if line.running is None else f"{line.running:,}",
        "" if line.waiting is None else f"{line.waiting:,}",
        "" if line.tokens_per_s is None else f"{line.tokens_per_s:,.1f}",
        "" if line.ttft_s is None else f"{line.ttft_s:.3f} s" if line.ttft_s < 1 else f"{line.ttft_s:.1f} s",
        "" if line.kv_cache_usage is None else f"{line.kv_cache_usage:.0%}",
        duration(line.uptime_s),
    )


def duration(seconds: float) -> str:
    """Format a duration with its two largest units: 42s, 3m 12s, 5h 07m, 2d 03h."""
    whole = int(seconds)
    for unit, size, part, part_size in (("d", 86_400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part_size:02d}{part}"
    return f"{whole}s"
