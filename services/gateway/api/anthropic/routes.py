"""Anthropic's endpoints: a message is a chat inside. docs/use/other-apis.md says what is understood.
Versions in headers are accepted, and ignored."""

from fastapi import APIRouter, Request, Response

from services.gateway.answering.token_count import count_tokens
from services.gateway.answering.translated import TranslatedResponder
from services.gateway.context import context_of
from services.gateway.http.docs import takes
from services.gateway.telemetry.measured import Measured
from services.requests.dialects.anthropic.chat import NAME_HERE, chat_of
from services.requests.dialects.anthropic.events import MessageEvents
from services.requests.dialects.anthropic.schemas import CountTokensBody, MessagesBody
from services.requests.dialects.openai.translate import own_terms
from services.requests.prepare import prepare

router = APIRouter(prefix="/v1/messages")


@router.post("", openapi_extra=takes(MessagesBody))
async def messages(request: Request) -> Response:
    """Answer a conversation."""
    context, body = await context_of(request).read(request, MessagesBody)
    chat = chat_of(body)
    measured = Measured(context.metrics)
    with own_terms(NAME_HERE):
        record, requests = await prepare(context, chat.intent(), "message", context.stage.replica_id)
    generation = await context.pipeline.submit(context.caller, record, requests)
    context.log_submitted(record, chat.user, request.state.request_id)
    responder = TranslatedResponder(generation, measured, context.settings.ping_interval_s, MessageEvents(record))
    return await (responder.stream() if body.stream else responder.whole(request))


@router.post("/count_tokens", openapi_extra=takes(CountTokensBody))
async def count(request: Request) -> Response:
    """How many tokens a conversation has, by the model's own template and tokenizer."""
    context, body = await context_of(request).read(request, CountTokensBody)
    return await count_tokens(context, request, chat_of(body), "message", NAME_HERE, lambda number: {"input_tokens": number})
