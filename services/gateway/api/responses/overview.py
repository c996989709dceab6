"""An administrator's view of all tenants' responses, whatever API they are of and whether their
keys are still good: what runs, and what is stored."""

from typing import Any

from services.gateway.context import GatewayContext
from services.requests.store.client import redis_errors_as_503
from services.requests.store.record import ResponseRecord, find_record, read_response
from shared.wire.streams import held_key, inflight_key, open_key, response_key, response_of, stored_key

Found = list[tuple[ResponseRecord, bool]]  # with each, whether it runs


async def running(contexts: list[GatewayContext]) -> Found:
    """The responses of all tenants that run now, in these cells."""
    return [response for context in contexts for response in await _running(context)]


async def _running(context: GatewayContext) -> Found:
    models = {replica.model for replica in context.stage.registry.replicas if replica.model is not None}
    with redis_errors_as_503():
        async with context.client.pipeline(transaction=False) as pipe:
            for model in models:
                pipe.hkeys(inflight_key(model))
            request_ids = [each.decode() for keys in await pipe.execute() for each in keys]
        return await _records(context, sorted({response_of(request_id) for request_id in request_ids if request_id}))


async def held(contexts: list[GatewayContext], tenant_id: str, count: int) -> Found:
    """A tenant's responses that run or are stored: in each of these cells, the `count` that stay
    longest, and one more."""
    return [response for context in contexts for response in await _held(context, tenant_id, count)]


async def _held(context: GatewayContext, tenant_id: str, count: int) -> Found:
    with redis_errors_as_503():
        members: Any = await context.client.zrevrange(held_key(tenant_id), 0, count)
        return await _records(context, [member.decode().partition("/")[2] for member in members])


async def _records(context: GatewayContext, response_ids: list[str]) -> Found:
    async with context.client.pipeline(transaction=False) as pipe:
        for response_id in response_ids:
            pipe.get(response_key(response_id))
            pipe.exists(open_key(response_id))
        replies = await pipe.execute()
    records = [
        read_response(response_id, packed) for response_id, packed in zip(response_ids, replies[::2], strict=True)
    ]
    return [
        (record, bool(is_open)) for record, is_open in zip(records, replies[1::2], strict=True) if record is not None
    ]


async def find_any(context: GatewayContext, response_id: str) -> ResponseRecord | None:
    """Find another tenant's response, or one that is not stored. None: there is none, or it is the
    administrator's own, which is handled as everybody's."""
    with redis_errors_as_503():
        record = await find_record(context.client, context.tenant, response_id, of_all=True)
        if record is None or (
            record.tenant_id == context.tenant.tenant_id and await context.client.exists(stored_key(response_id))
        ):
            return None
        return record


def summary(record: ResponseRecord, *, is_running: bool) -> dict[str, Any]:
    """A response's kind, state and owner, without its input."""
    return {
        "id": record.response_id,
        "object": "response.summary",
        "kind": record.kind,
        "model": record.model,
        "created_at": record.created,
        "status": "in_progress" if is_running else "ended",
        "tenant_id": record.tenant_id,
    }
