"""end_response: end a response from outside the pipeline. Apart from its record, which helpers read that need no
Redis."""

import redis.asyncio

from services.requests.store.record import ResponseRecord
from shared.wire.messages import Control, RequestError
from shared.wire.registry import broadcast
from shared.wire.streams import LOG_TTL_S, tombstone_key
from shared.wire.token_log import end_request


async def end_response(
    client: "redis.asyncio.Redis", record: ResponseRecord, error: RequestError | None = None
) -> None:
    """End the response as cancelled, or with an error, now: its logs say so before any stage is told. What has
    ended stays as it is. Raises what the client raises."""
    async with client.pipeline(transaction=False) as pipe:
        for request_id in record.request_ids:
            pipe.set(tombstone_key(request_id), "1", ex=LOG_TTL_S)
            end_request(pipe, record.served_model, request_id, None, error=error)
        broadcast(pipe, Control("cancel", tuple(record.request_ids)))
        await pipe.execute()
