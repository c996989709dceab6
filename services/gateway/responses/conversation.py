"""The conversation that a response goes on with: the one before it, the items that it names by their ids, and how much of all that fits the model."""

import re
from dataclasses import replace

from services.gateway.context import Context, RequestContext
from services.gateway.openai.ask import ask_tokenizer
from services.gateway.openai.routes import prepare_chat
from services.gateway.record import PREFIXES
from services.gateway.responses.chat import NAME_HERE, chat_of
from services.gateway.responses.items import Json
from services.gateway.responses.schemas import ResponseBody
from services.gateway.translate import own_terms
from shared.process.errors import Invalid

UNFINISHED = ("queued", "in_progress")
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_(?:in)?[0-9]+")  # as items.with_ids and events.py make them
MAX_REFERRED = 16  # responses whose items one input names


async def with_conversation(context: RequestContext, body: ResponseBody) -> tuple[ResponseBody, list[Json]]:
    """The body with the items that it names, and the items before it. Raises Invalid."""
    before = await conversation(context, body.previous_response_id, "previous_response_id") if body.previous_response_id else []
    if any(item["type"] == "item_reference" for item in body.input):
        body = body.model_copy(update={"input": await resolve(context, body.input)})
    return body, before


async def resolve(context: RequestContext, items: list[Json]) -> list[Json]:
    """The items, with those that are named in the place of their names. Raises Invalid (404) for one that is not stored."""
    found: dict[str, dict[str, Json]] = {}  # by response, the items by id
    resolved = []
    for number, item in enumerate(items):
        if item["type"] != "item_reference":
            resolved.append(item)
            continue
        field = f"input[{number}].id"
        named = ITEM_ID.fullmatch(item["id"])
        response_id = PREFIXES["response"] + named[1] if named is not None else ""
        if response_id not in found:
            if len(found) >= MAX_REFERRED:
                raise Invalid(f"input names items of more than {MAX_REFERRED} responses", param=field)
            try:
                found[response_id] = {each["id"]: each for each in await conversation(context, response_id, field)} if response_id else {}
            except Invalid as error:
                if error.code != "previous_response_not_found":
                    raise
                found[response_id] = {}
        if item["id"] not in found[response_id]:
            raise Invalid(f"Item with id '{item['id'][:128]}' not found.", param=field, code="item_not_found", status=404)
        resolved.append(found[response_id][item["id"]])
    return resolved


async def conversation(context: RequestContext, response_id: str, field: str) -> list[Json]:
    """The items up to a response's answer, that included. Raises Invalid, naming the field, for one that is not stored, or that can't be gone on with."""
    try:
        record, stored = await context.store.load(context.tenant, response_id)
        items = await context.store.items(stored)
        events = await context.store.read(record, stored, is_checked=False)
    except Invalid as error:
        raise Invalid(f"Previous response with id '{response_id}' not found.", param=field, code="previous_response_not_found") from error
    if events.status in UNFINISHED or events.status == "failed":
        raise Invalid(f"the response {response_id!r} is {events.status}: it can't be gone on with", param=field, code="previous_response_not_completed")
    await context.store.hand_over(record, stored)
    return [*items, *map(without_logprobs, events.output)]


def without_logprobs(item: Json) -> Json:
    """An item of the output as one of an input."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} if "logprobs" in part else part for part in item["content"]]}


async def num_too_many(context: Context, body: ResponseBody, before: list[Json]) -> int:
    """How many of the first items must go so that the rest fits the model, with room for the answer; what is left begins with a user's message. The
    instructions stay. The tokenizer counts, a few times: the more is left out, the shorter it is. Raises as any request."""
    items = [*before, *body.input]
    cuts = [0, *(number for number, item in enumerate(items) if number and item["type"] == "message" and item["role"] == "user")]
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


async def _fits(context: Context, body: ResponseBody, before: list[Json], num_dropped: int) -> bool:
    chat = chat_of(body, before, num_dropped=num_dropped)
    with own_terms(NAME_HERE):
        _, [request] = await prepare_chat(context, chat, "response", body.model, context.stage.replica_id)
    found = await ask_tokenizer(context, request.model, "tokenize", replace(request, params=replace(request.params, max_tokens=0)))
    longest, wanted = found["max_model_len"], body.max_output_tokens or 1
    return bool(found["count"] + (wanted if wanted < longest else 1) <= longest)  # more than the model's length is cut to what is left
