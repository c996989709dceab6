"""Requests that no replica takes, because their model has none: each waits as long as the operator
allows, and then ends with one clear error.

Any gateway ends any of them, for the one that submitted a request may be gone, and a response in
the background has no reader. The time counts while the stage is missing and until a replica takes
the request.
"""

import asyncio
from typing import Any

import redis.asyncio

from services.requests.errors import NO_REPLICA
from services.requests.store.admission.known import KnownReplicas
from services.requests.store.client import persist
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.telemetry import get_logger
from shared.wire.messages import RequestError, TokenEvent
from shared.wire.streams import GroupStream, prompts, requests
from shared.wire.token_log import end_waiting, queue_find_waiting
from shared.wire.transport import Backoff

log = get_logger("penstock.gateway")

LOOK_EVERY_S = 1.0
MOST = 64  # in a round trip


class Unattended:
    """Watches the streams of models that have no tokenizer or no compute."""

    def __init__(
        self, known: KnownReplicas, client: "redis.asyncio.Redis", wait_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """wait_s: how long a request may wait."""
        self.known = known
        self.client = client
        self.wait_s = wait_s
        self.clock = clock
        self.backoff = Backoff()
        self._missing_since: dict[tuple[str, str], float] = {}  # by stage and model, monotonic, s

    async def run(self) -> None:
        """Look at them now and then, until cancelled."""
        while True:
            for stage, model in self.overdue():
                await persist(lambda: self._end(stage, model), self.backoff)  # noqa: B023
            await asyncio.sleep(LOOK_EVERY_S)

    def overdue(self) -> list[tuple[str, str]]:
        """The stages and models without a replica for longer than a request may wait. Time in which
        this gateway could not see counts for nothing."""
        now = self.clock.monotonic()
        sight = self.known.stage.registry.sight_since(now)
        models = {replica.model for replica in self.known.registry.replicas if replica.model is not None}
        missing = {(stage, model) for model in models for stage in self.known.missing(model)}
        self._missing_since = {each: max(self._missing_since.get(each, now), sight) for each in missing}
        return [each for each, since in self._missing_since.items() if now - since > self.wait_s and each[0] in STREAMS]

    async def _end(self, stage: str, model: str) -> None:
        """End what has waited for too long. Raises RedisError, OSError."""
        stream: GroupStream = STREAMS[stage](model)
        error = RequestError(
            f"no {stage} of the model {model} was there within {self.wait_s:g} s: try again later", 503, code=NO_REPLICA
        )
        waiting: list[Any] = [None] * MOST
        while len(waiting) == MOST:
            async with self.client.pipeline(transaction=False) as pipe:
                queue_find_waiting(pipe, stream, round(self.wait_s * 1000), MOST)
                [waiting] = await pipe.execute()
            async with self.client.pipeline(transaction=False) as pipe:
                for entry_id, request_id, gateway_id in waiting:
                    event = TokenEvent(
                        request_id.decode(errors="replace"), 0, None, "", finish_reason="error", error=error
                    )
                    end_waiting(
                        pipe,
                        stream,
                        self.known.stage.replica_id,
                        entry_id,
                        model,
                        event,
                        gateway_id.decode(errors="replace") or None,
                    )
                await pipe.execute()
        if waiting:
            log.warning("requests waited in vain for a replica", stage=stage, model=model, num_requests=len(waiting))


STREAMS = {"tokenizer": requests, "compute": prompts}  # by the stage that reads them
