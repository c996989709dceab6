"""Taking a response over from another reader: validate first, then become its next reader in one step.
An invalid request disturbs no reader."""

from typing import Any

import redis.asyncio

from services.requests.text.answers.sse import parse_id
from shared.process.errors import Invalid, Recoverable, Rejected
from shared.wire.messages import Control, encode
from shared.wire.script import load_script
from shared.wire.stage import Stage
from shared.wire.streams import CONTROL, inflight_key, log_key, reader_key, response_key

ATTEMPTS = 20  # readers that take the same response over at the same moment

TAKE_OVER = load_script("take_over")


class Takeover:
    def __init__(self, stage: Stage, client: "redis.asyncio.Redis") -> None:
        self.stage = stage
        self.client = client

    async def take(
        self, response_id: str, model: str, request_ids: list[str], last_event_id: str | None
    ) -> tuple[list[int], int]:
        """The positions to go on from, and this reader's generation.

        Raises Invalid: 400 for a Last-Event-ID that is malformed or beyond the logs, 404 for logs that
        have expired; Rejected while a log may still reach the position again.
        """
        positions = parse_id(last_event_id, len(request_ids)) if last_event_id else [0] * len(request_ids)
        for _ in range(ATTEMPTS):
            generation = await self._generation_of_reader(response_id, model, request_ids, positions)
            message = encode(Control("attach", tuple(request_ids), self.stage.replica_id, generation + 1))
            keys = (reader_key(response_id), response_key(response_id), CONTROL.key)
            if await TAKE_OVER.run(self.client, keys, generation, self.stage.replica_id, message):
                return positions, generation + 1
        raise Recoverable("other readers take the response over again and again: try again later")

    async def _generation_of_reader(
        self, response_id: str, model: str, request_ids: list[str], positions: list[int]
    ) -> int:
        """The generation of the present reader. Raises as `take` if the logs do not reach the positions."""
        async with self.client.pipeline(transaction=True) as pipe:  # at one moment: a request that ends leaves inflight
            pipe.hget(reader_key(response_id), "generation")
            for request_id in request_ids:
                pipe.xrevrange(log_key(request_id), count=1)
                pipe.hget(inflight_key(model), request_id)
            generation, *replies = await pipe.execute()
        for index, position in enumerate(positions):
            last: Any = replies[2 * index]
            max_tokens = int(replies[2 * index + 1] or 0)  # tokens of prompt and answer, at most; 0: it does not run
            if not last and not max_tokens:
                message = f"the response {response_id!r} is too old: its tokens are not kept any more"
                raise Invalid(message, param="response_id", code="response_not_found", status=404)
            end = int(last[0][0].partition(b"-")[0]) if last else 0
            if end < position <= max_tokens:
                message = "Redis has lost a part of this answer, which is being computed again: come back in a moment"
                raise Rejected(message, status=503, retry_after_s=1, code="tokens_lost")
            if position > end:
                message = (
                    f"Last-Event-ID is beyond the response: position {position} of sequence {index}, which has {end}"
                )
                raise Invalid(message, param="Last-Event-ID")
        return int(generation or 0)
