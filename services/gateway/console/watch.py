"""LiveView: reads the pipeline's state twice a second while there are watchers, as one JSON text for
all of them."""

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

import redis
import redis.asyncio

from services.gateway.console.recent import RecentRequests
from services.gateway.console.snapshot import PipelineFigures, Queue, snapshot
from services.gateway.generation.subscriptions import Subscriptions
from services.requests.text.answers.sse import PING, encode_event
from shared.process.errors import Invalid, Rejected
from shared.process.telemetry import get_logger
from shared.wire.messages import decode
from shared.wire.stage import Stage
from shared.wire.streams import DEAD_LETTER, WATCHED, inflight_key, prompts, requests, view_key
from shared.wire.transport import is_temporary
from shared.wire.views import ComputeView

log = get_logger("penstock.gateway")

READ_EVERY_S = 0.5
WATCHED_TTL_MS = 3000  # replicas stop writing views when a gateway has died with its watchers
MAX_WATCHERS = 32
PING_EVERY_S = 5.0  # while nothing can be shown


class LiveView:
    def __init__(
        self, stage: Stage, client: "redis.asyncio.Redis", subscriptions: Subscriptions, *, can_kill: bool
    ) -> None:
        """can_kill: the page may offer to."""
        self.stage = stage
        self.client = client
        self.subscriptions = subscriptions
        self.can_kill = can_kill
        self._num_watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._recent = RecentRequests()
        self._latest = b""
        self._has_new = asyncio.Event()
        self._is_ending = False
        self._killed: set[str] = set()  # replica ids

    def enter(self) -> None:
        """One more watches. Raises Rejected if too many do."""
        if self._num_watchers >= MAX_WATCHERS:
            raise Rejected(
                f"{MAX_WATCHERS} clients watch the pipeline already: try again later", status=429, retry_after_s=5
            )
        self._num_watchers += 1
        if self._task is None:
            self._recent = RecentRequests()
            self._task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """One fewer does. With the last of them the reading ends, and what the replicas do for it
        within WATCHED_TTL_MS."""
        self._num_watchers -= 1
        if self._num_watchers == 0 and self._task is not None:
            self._task.cancel()
            self._task, self._latest = None, b""

    def killed(self, replica_id: str) -> None:
        """Show the replica as dead, though its lease still runs."""
        self._killed.add(replica_id)

    def drain(self) -> None:
        """End every stream: the gateway is leaving."""
        self._is_ending = True
        self._has_new.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Snapshots as server-sent events, to who has entered. A watcher that reads slowly misses
        some, and never delays others."""
        if self._latest:
            yield self._latest
        while not self._is_ending:
            try:
                async with asyncio.timeout(PING_EVERY_S):
                    await self._has_new.wait()
            except TimeoutError:
                yield PING
                continue
            if not self._is_ending:
                yield self._latest

    async def _run(self) -> None:
        """Run until cancelled. While Redis can't serve, show that."""
        loop = asyncio.get_running_loop()
        while True:
            started_at = loop.time()
            try:
                self._show(await self._read_state())
            except (redis.RedisError, OSError) as error:
                if not is_temporary(error):
                    log.exception("the pipeline can't be shown", error=error)
                self._show({"problem": f"Redis can't serve: {error}"})
            await asyncio.sleep(max(0.1, started_at + READ_EVERY_S - loop.time()))

    def _show(self, payload: dict[str, Any]) -> None:
        self._latest = encode_event(payload)
        self._has_new.set()
        self._has_new = asyncio.Event()

    async def _read_state(self) -> dict[str, Any]:
        """One round trip."""
        replicas = self.stage.registry.replicas
        served = {
            replica.replica_id: replica.model
            for replica in replicas
            if replica.stage == "compute" and replica.model is not None
        }
        models = sorted(set(served.values()))
        lost = self._recent.lost()
        streams = [
            (stage, model, stream(model))
            for model in models
            for stage, stream in (("tokenizer", requests), ("compute", prompts))
        ]
        async with self.client.pipeline(transaction=False) as pipe:
            pipe.set(WATCHED, 1, px=WATCHED_TTL_MS)
            pipe.xlen(DEAD_LETTER)
            for _, _, stream in streams:
                pipe.xlen(stream.key)
                pipe.xpending(stream.key, stream.group)
            for model in models:
                pipe.hlen(inflight_key(model))
            for replica_id in served:
                pipe.get(view_key(replica_id))
            for request in lost:
                pipe.hexists(inflight_key(request.model), request.request_id)
            _, num_letters, *replies = await pipe.execute(raise_on_error=False)
        if isinstance(num_letters, redis.ResponseError):
            raise num_letters
        queues = [queue_of(stage, model, *replies[2 * at : 2 * at + 2]) for at, (stage, model, _) in enumerate(streams)]
        rest = iter(replies[2 * len(streams) :])
        in_flight = list(islice(rest, len(models)))
        views = [view for packed in islice(rest, len(served)) if (view := view_in(packed)) is not None]
        for request, is_in_flight in zip(lost, rest, strict=True):
            if not is_in_flight:
                request.ended_at, request.is_lost = request.stays[-1].seen_at, False
        figures = PipelineFigures(
            queues, views, sum(max(num - 1, 0) for num in in_flight if isinstance(num, int)), num_letters
        )
        self._killed &= {replica.replica_id for replica in replicas}
        shown = snapshot(replicas, figures, here=self.stage.replica_id, killed=self._killed, can_kill=self.can_kill)
        now = shown["time"]
        self._recent.see(
            now, views, {replica_id: model for replica_id, model in served.items() if replica_id not in self._killed}
        )
        self._recent.hear([*self.subscriptions.recent, *self.subscriptions.all()])
        return shown | {"recent_requests": self._recent.shown(now)}


def queue_of(stage: str, model: str, length: Any, pending: Any) -> Queue:
    """Read XLEN's and XPENDING's replies. A group that does not exist yet has taken nothing."""
    num_taken = pending["pending"] if isinstance(pending, dict) else 0
    return Queue(stage, model, max(0, (length if isinstance(length, int) else 0) - num_taken), num_taken)


def view_in(packed: Any) -> ComputeView | None:
    """Decode a view. None: the replica has shown nothing yet, or has another version."""
    try:
        return decode(ComputeView, packed) if isinstance(packed, bytes) else None
    except Invalid:
        return None
