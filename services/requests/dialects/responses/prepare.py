"""Makes the pipeline's requests of a request of the Responses API."""

from typing import Any

from services.requests.context import RequestContext
from services.requests.dialects.openai.translate import own_terms
from services.requests.dialects.responses.chat import NAME_HERE, chat_of
from services.requests.dialects.responses.items import Json, with_ids
from services.requests.dialects.responses.schemas import ResponseBody
from services.requests.dialects.responses.stored import StoredResponse
from services.requests.prepare import prepare
from services.requests.store.record import ResponseRecord
from shared.process.errors import Invalid
from shared.wire.messages import GenerateRequest


async def prepare_response(
    context: RequestContext,
    body: ResponseBody,
    before: list[Json],
    gateway_id: str | None,
    *,
    num_dropped: int = 0,
    **others: Any,
) -> tuple[ResponseRecord, list[GenerateRequest], bytes]:
    """Make the requests and the record of a response, as `prepare` of a chat, and the bytes to
    store of it; empty: none.

    before: the items that it goes on from; num_dropped: how many of all items the model is not
    given.
    """
    chat = chat_of(body, before, num_dropped=num_dropped)
    with own_terms(NAME_HERE):
        record, requests = await prepare(context, chat.intent(), "response", gateway_id, **others)
    if not body.store:
        return record, requests, b""
    content = StoredResponse(
        body.asked(requests[0].params), [*before, *with_ids(body.input, record.response_id)]
    ).encode()
    if len(content) > (longest := context.settings.max_body_bytes):
        raise Invalid(f"the conversation has {len(content)} bytes, and at most {longest} are stored", param="input")
    return record, requests, content
