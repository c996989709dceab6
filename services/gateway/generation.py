"""Generation: one response of the API on its way through the pipeline. It has one sequence for each prompt and choice.

Submits the requests, hands out their events, and cancels what is unfinished when nobody listens any more.
"""

import os
import time
import uuid
from dataclasses import asdict, dataclass, replace

import msgpack
import redis
import redis.asyncio

from services.gateway.subscriptions import Subscription, Subscriptions
from shared.errors import Invalid, Recoverable
from shared.messages import Control, GenerateRequest, TokenEvent
from shared.registry import broadcast
from shared.sampling_params import SEEDS, SamplingParams
from shared.stage import Stage
from shared.streams import LOG_TTL_S, RUNNING_LOG_TTL_S, reader_key, response_key, tombstone_key
from shared.streams import requests as requests_stream
from shared.telemetry import get_logger
from shared.transport import append_to_group

log = get_logger("penstock.gateway")

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the choices' seeds


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """What it takes to stream a response again, from any gateway."""

    response_id: str
    kind: str  # "chat.completion" or "text_completion"
    model: str
    created: int
    num_prompts: int
    n: int
    has_usage: bool  # stream_options.include_usage

    @property
    def request_ids(self) -> list[str]:
        return [f"{self.response_id}.{index}" for index in range(self.num_prompts * self.n)]


def make_record(kind: str, prefix: str, model: str, *, num_prompts: int, n: int, has_usage: bool) -> ResponseRecord:
    return ResponseRecord(f"{prefix}-{uuid.uuid4().hex}", kind, model, int(time.time()), num_prompts, n, has_usage)


def choice_params(params: SamplingParams, seed: int | None, choice: int) -> SamplingParams:
    """The params of one of n choices: its own seed, a function of the request's."""
    base = int.from_bytes(os.urandom(8)) if seed is None else seed
    return replace(params, seed=(base + choice * GOLDEN) % SEEDS)


class Generation:
    """The events of a response's sequences, from submission or from a resumption to the end."""

    def __init__(self, pipeline: "Pipeline", record: ResponseRecord, positions: list[int]) -> None:
        self.pipeline = pipeline
        self.record = record
        self.request_ids = record.request_ids
        self.subscription: Subscription = pipeline.subscriptions.subscribe(dict(zip(self.request_ids, positions, strict=True)))
        self.index_by_request = {request_id: index for index, request_id in enumerate(self.request_ids)}

    @property
    def positions(self) -> list[int]:
        return [self.subscription.positions[request_id] for request_id in self.request_ids]

    @property
    def is_over(self) -> bool:
        """Every sequence has ended."""
        return not self.subscription.unfinished

    async def next(self, timeout_s: float) -> list[tuple[int, TokenEvent]]:
        """The events that have come, each with its sequence's index; none after timeout_s."""
        return [(self.index_by_request[event.request_id], event) for event in await self.subscription.next(timeout_s)]

    async def close(self) -> None:
        """Cancel what is unfinished, and listen no more. Safe to call twice."""
        self.pipeline.subscriptions.unsubscribe(self.subscription)
        unfinished, self.subscription.unfinished = self.subscription.unfinished, set()
        if unfinished:
            log.info("cancelling", response_id=self.record.response_id, num_sequences=len(unfinished))
            await self.pipeline.cancel(sorted(unfinished))


class Pipeline:
    """The gateway's way into the pipeline."""

    def __init__(self, stage: Stage, client: "redis.asyncio.Redis", subscriptions: Subscriptions) -> None:
        self.stage = stage
        self.client = client
        self.subscriptions = subscriptions
        self.is_draining = False  # from now on a connection that ends was ended by us: its client may resume elsewhere

    async def submit(self, record: ResponseRecord, requests: list[GenerateRequest]) -> Generation:
        """Write the record and the requests, atomically. Raises Recoverable if Redis is away."""
        generation = Generation(self, record, [0] * len(requests))
        try:
            async with self.client.pipeline(transaction=True) as pipe:
                pipe.set(response_key(record.response_id), msgpack.packb(asdict(record)), ex=RUNNING_LOG_TTL_S)
                for request in requests:
                    append_to_group(pipe, requests_stream(request.model), request)
                await pipe.execute()
        except redis.ConnectionError as error:
            self.subscriptions.unsubscribe(generation.subscription)
            raise Recoverable(str(error)) from error
        return generation

    async def find_record(self, response_id: str) -> ResponseRecord:
        """Raises Invalid (404) for a response that is unknown or too old."""
        packed = await self.client.get(response_key(response_id))
        if packed is None:
            raise Invalid(f"no response {response_id!r}, or it is too old", param="response_id", code="response_not_found", status=404)
        return ResponseRecord(**msgpack.unpackb(packed))

    async def resume(self, record: ResponseRecord, positions: list[int]) -> Generation:
        """Take the response over: from now on its events come here."""
        generation = Generation(self, record, positions)
        async with self.client.pipeline(transaction=False) as pipe:
            for request_id in record.request_ids:
                pipe.hset(reader_key(record.response_id), "gateway", self.stage.replica_id)
            broadcast(pipe, Control("attach", tuple(record.request_ids), self.stage.replica_id))
            await pipe.execute()
        await generation.subscription.replay()
        return generation

    async def cancel(self, request_ids: list[str]) -> None:
        """In every stage: a tombstone for what is queued, a word on the control stream for what runs."""
        if self.is_draining:
            return
        try:
            async with self.client.pipeline(transaction=False) as pipe:
                for request_id in request_ids:
                    pipe.set(tombstone_key(request_id), b"1", ex=LOG_TTL_S)
                broadcast(pipe, Control("cancel", tuple(request_ids)))
                await pipe.execute()
        except (redis.RedisError, OSError) as error:
            log.warning("could not cancel", num_sequences=len(request_ids), error=error)
