"""How much of a conversation fits the model."""

from dataclasses import replace

from services.gateway.answering.ask import ask_tokenizer
from services.gateway.context import Context
from services.requests.dialects.openai.translate import own_terms
from services.requests.dialects.responses.chat import NAME_HERE, chat_of
from services.requests.dialects.responses.items import Json
from services.requests.dialects.responses.schemas import ResponseBody
from services.requests.prepare import prepare


async def num_too_many(context: Context, body: ResponseBody, before: list[Json]) -> int:
    """How many of the first items must go so that the rest fits the model, with room for the
    answer; what is left begins with a user's message. The instructions stay. The tokenizer counts,
    a few times: the more is left out, the shorter it is. Raises as any request."""
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
        _, [request] = await prepare(context, chat.intent(), "response", context.stage.replica_id)
    found = await ask_tokenizer(context, request.model, "tokenize", replace(request, params=replace(request.params, max_tokens=0)))
    longest, wanted = found["max_model_len"], body.max_output_tokens or 1
    return bool(found["count"] + (wanted if wanted < longest else 1) <= longest)  # more than the model's length is cut to what is left
