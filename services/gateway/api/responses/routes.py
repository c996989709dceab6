"""The Responses API's endpoints. docs/use/responses.md says how they differ from OpenAI's."""

from typing import Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from msgspec import structs

from services.gateway.answering.ask import ask_tokenizer
from services.gateway.answering.responder import EventStream
from services.gateway.answering.token_count import count_tokens
from services.gateway.answering.translated import TranslatedResponder
from services.gateway.api.responses.overview import find_any, held, running, summary
from services.gateway.context import GatewayContext, context_of
from services.gateway.http.auth import check_sees_all
from services.gateway.http.docs import takes
from services.gateway.telemetry.measured import ResponseMeter
from services.requests.dialects.openai.translate import own_terms
from services.requests.dialects.responses.chat import NAME_HERE, chat_of
from services.requests.dialects.responses.conversation import with_conversation
from services.requests.dialects.responses.events import ResponseEvents
from services.requests.dialects.responses.items import Json
from services.requests.dialects.responses.prepare import prepare_response
from services.requests.dialects.responses.schemas import ResponseBody
from services.requests.prepare import prepare
from shared.process.errors import Invalid, Rejected

router = APIRouter(prefix="/v1/responses")


def json_of(body: bytes) -> Response:
    return Response(body, media_type="application/json")


@router.post("", openapi_extra=takes(ResponseBody))
async def create(request: Request) -> Response:
    """Answer an input, given as a text or as items, on a conversation that is stored or on its
    own."""
    context, body = await context_of(request).read(request, ResponseBody)
    body, before = await with_conversation(context, body)
    num_dropped = await num_too_many(context, body, before) if body.truncation == "auto" else 0
    reader = None if body.background else context.stage.replica_id
    record, requests, content = await prepare_response(
        context, body, before, reader, num_dropped=num_dropped, is_background=body.background
    )
    events = ResponseEvents(record, body.asked(requests[0].params))
    if body.background:
        # before it is submitted: who is refused has begun nothing
        leave = context.reading.follow(context.tenant.tenant_id) if body.stream else None
        try:
            await context.pipeline.submit_unread(context.caller, record, requests, content)
        except BaseException:
            if leave is not None:
                leave()
            raise
        context.metrics.background.labels(record.served_model).inc()
        context.log_submitted(record, body.user, request.state.request_id)
        return (
            EventStream(context.store.follow(record, events.asked), on_close=leave)
            if leave is not None
            else JSONResponse(events.whole())
        )
    measured = ResponseMeter(context.metrics)
    generation = await context.pipeline.submit(context.caller, record, requests, content)
    context.log_submitted(record, body.user, request.state.request_id)
    responder = TranslatedResponder(generation, measured, context.settings.ping_interval_s, events)
    return await (responder.stream() if body.stream else responder.whole(request))


@router.get("")
async def list_responses(
    request: Request, tenant: str = Query("*", max_length=64), limit: int = Query(100, ge=1, le=1000)
) -> dict[str, Any]:
    """List, for administrators, the running responses of all APIs, the newest first; or those of
    one tenant, by its id, that run or are stored."""
    context = context_of(request)
    check_sees_all(context.tenant)
    responses = await running(context.everywhere) if tenant == "*" else await held(context.everywhere, tenant, limit)
    newest = sorted(responses, key=lambda each: each[0].created, reverse=True)
    return {
        "object": "list",
        "data": [summary(record, is_running=is_running) for record, is_running in newest[:limit]],
        "has_more": len(newest) > limit,
    }


@router.post("/input_tokens", openapi_extra=takes(ResponseBody))
async def input_tokens(request: Request) -> Response:
    """How many tokens the model would be given, by its own template and tokenizer."""
    context, body = await context_of(request).read(request, ResponseBody)
    body, before = await with_conversation(context, body)
    return await count_tokens(
        context,
        request,
        chat_of(body, before),
        "response",
        NAME_HERE,
        lambda number: {"object": "response.input_tokens", "input_tokens": number},
    )


@router.get("/{response_id}")
async def retrieve(
    response_id: str, request: Request, stream: bool = False, starting_after: int | None = Query(None, ge=0)
) -> Response:
    """A stored response as it is now; or its events, from the first or after one of them, as they
    were and as they come."""
    context = context_of(request)
    async with context.reading.place(context.caller):
        record, stored = await context.store.load(context.tenant, response_id, of_all=True)
        if not stream:
            if starting_after is not None:
                raise Invalid("starting_after is for streams: set stream to true", param="starting_after")
            return json_of((await context.store.read(record, stored)).body())
        has_ended = record.is_background or await context.store.has_ended(record)
    after = -1 if starting_after is None else starting_after
    if has_ended:
        leave = context.reading.follow(record.tenant_id)
        try:
            return EventStream(context.store.follow(record, stored.asked, after), on_close=leave)
        except Rejected:
            leave()
            raise
    events = ResponseEvents(record, stored.asked, after=after)
    generation = await context.pipeline.resume(context.tenant, response_id, None, ("response",))
    return await TranslatedResponder(
        generation, ResponseMeter(context.metrics, is_resumed=True), context.settings.ping_interval_s, events
    ).stream_resumed()


@router.post("/{response_id}/cancel")
async def cancel(response_id: str, request: Request) -> Response:
    """End a background response; for an administrator, any tenant's response of any API. One that
    has ended stays as it is."""
    context = context_of(request)
    if context.tenant.sees_all and (other := await find_any(context, response_id)) is not None:
        await context.store.cancel(other)
        return JSONResponse(summary(other, is_running=False))
    record, stored = await context.store.load(context.tenant, response_id, of_all=True)
    if not record.is_background:
        raise Invalid(
            "Only responses created with background=true can be cancelled: of others, close the connection.",
            param="response_id",
        )
    await context.store.cancel(record)
    return json_of((await context.store.read(record, stored)).body())


@router.delete("/{response_id}")
async def delete(response_id: str, request: Request) -> dict[str, Any]:
    """Forget a stored response; one that runs is cancelled."""
    context = context_of(request)
    record, _ = await context.store.load(context.tenant, response_id, of_all=True)
    await context.store.delete(record)
    return {"id": response_id, "object": "response.deleted", "deleted": True}


@router.get("/{response_id}/input_items")
async def input_items(
    response_id: str,
    request: Request,
    after: str | None = None,
    limit: int = Query(20, ge=1, le=100),
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """The items that the model was given: the conversation before, and the input."""
    context = context_of(request)
    async with context.reading.place(context.caller):
        _, stored = await context.store.load(context.tenant, response_id, of_all=True)
        stored_items = await context.store.items(stored)
    items = stored_items if order == "asc" else stored_items[::-1]
    if after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise Invalid(
                f"no item {after!r} in the input: give the id of one that it has, or leave after out", param="after"
            )
        items = items[places[0] + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


async def num_too_many(context: GatewayContext, body: ResponseBody, before: list[Json]) -> int:
    """How many of the first items must go so that the rest fits the model, with room for the
    answer; what is left begins with a user's message. The instructions stay. The tokenizer counts,
    a few times: the more is left out, the shorter it is. Raises as any request."""
    items = [*before, *body.input]
    cuts = [
        0,
        *(
            number
            for number, item in enumerate(items)
            if number and item["type"] == "message" and item["role"] == "user"
        ),
    ]
    if await _fits(context, body, before, cuts[0]):
        return cuts[0]
    # From the end on: what is counted is never much longer than what fits
    low, high, step = 0, len(cuts) - 1, 1
    while high - step > low and await _fits(context, body, before, cuts[high - step]):
        high, step = high - step, 2 * step
    low = max(low, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        if await _fits(context, body, before, cuts[middle]):
            high = middle
        else:
            low = middle
    return cuts[high]


async def _fits(context: GatewayContext, body: ResponseBody, before: list[Json], num_dropped: int) -> bool:
    chat = chat_of(body, before, num_dropped=num_dropped)
    with own_terms(NAME_HERE):
        _, [request] = await prepare(context, chat.intent(), "response", context.stage.replica_id)
    reply = await ask_tokenizer(
        context,
        request.model,
        "tokenize",
        structs.replace(request, params=structs.replace(request.params, max_tokens=0)),
    )
    longest, wanted = reply["max_model_len"], body.max_output_tokens or 1
    # more than the model's length is cut to what is left
    return bool(reply["count"] + (wanted if wanted < longest else 1) <= longest)
