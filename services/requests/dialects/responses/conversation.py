"""The conversation that a response goes on with: the one before it, the items that it names by
their ids, and how much of all that fits the model."""

import re
from dataclasses import dataclass

from services.requests.bodies.fields import shortened
from services.requests.context import RequestContext
from services.requests.dialects.responses.items import Json
from services.requests.dialects.responses.schemas import ResponseBody
from services.requests.dialects.responses.stored import Store, loads
from services.requests.store.record import PREFIXES
from shared.process.errors import Invalid

UNFINISHED = ("queued", "in_progress")
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_(?:in)?[0-9]+")  # as items.with_ids and events.py make them
MAX_REFERRED = 16  # responses whose items one input names


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationContext(RequestContext):
    """A RequestContext that finds stored responses."""

    store: Store


async def with_conversation(context: ConversationContext, body: ResponseBody) -> tuple[ResponseBody, list[Json]]:
    """The body with the items that it names, and the items before it. Raises Invalid."""
    before = (
        await conversation(context, body.previous_response_id, "previous_response_id")
        if body.previous_response_id
        else []
    )
    if any(item["type"] == "item_reference" for item in body.input):
        body = body.model_copy(update={"input": await resolve(context, body.input)})
    return body, before


async def resolve(context: ConversationContext, items: list[Json]) -> list[Json]:
    """The items, with those that are named in the place of their names. Raises Invalid (404) for
    one that is not stored."""
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
                found[response_id] = (
                    {each["id"]: each for each in await conversation(context, response_id, field)}
                    if response_id
                    else {}
                )
            except Invalid as error:
                if error.code != "previous_response_not_found":
                    raise
                found[response_id] = {}
        if item["id"] not in found[response_id]:
            raise Invalid(
                f"Item with id '{shortened(item['id'])}' not found.", param=field, code="item_not_found", status=404
            )
        resolved.append(found[response_id][item["id"]])
    return resolved


async def conversation(context: ConversationContext, response_id: str, field: str) -> list[Json]:
    """The items up to a response's answer, that included. Raises Invalid, naming the field, for one
    that is not stored, or that can't be gone on with."""
    try:
        record, stored = await context.store.load(context.tenant, response_id)
        items = await context.store.items(stored)
        answer = await loads((await context.store.read(record, stored, is_checked=False)).body())
    except Invalid as error:
        reason = f"Previous response with id '{shortened(response_id)}' not found."
        raise Invalid(reason, param=field, code="previous_response_not_found") from error
    if answer["status"] in UNFINISHED or answer["status"] == "failed":
        reason = f"the response {response_id!r} is {answer['status']}: it can't be gone on with"
        raise Invalid(reason, param=field, code="previous_response_not_completed")
    await context.store.hand_over(record, stored)
    return [*items, *map(without_logprobs, answer["output"])]


def without_logprobs(item: Json) -> Json:
    """An item of the output as one of an input."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} if "logprobs" in part else part for part in item["content"]]}
