"""Anthropic's endpoints: a message is a chat inside. docs/api-others.md says what is understood. Keys and versions in headers are accepted, and ignored."""

from dataclasses import replace

import orjson
from fastapi import APIRouter, Request, Response

from services.gateway.anthropic.blocks import Json
from services.gateway.anthropic.chat import chat_of
from services.gateway.anthropic.events import MessageEvents
from services.gateway.anthropic.schemas import CountTokensBody, MessagesBody
from services.gateway.context import Context
from services.gateway.metrics import Measured
from services.gateway.openai.docs import takes
from services.gateway.openai.respond import Responder
from services.gateway.openai.routes import chat_requests, check
from services.gateway.record import make_record
from services.gateway.translate import TranslatedResponder

router = APIRouter(prefix="/v1/messages")


@router.post("", openapi_extra=takes("message"))
async def messages(request: Request) -> Response:
    """Answer a conversation."""
    context: Context = request.app.state.context
    body = await context.bodies.read(request, "message")
    assert isinstance(body, MessagesBody)
    chat = chat_of(body)
    params, model = chat.params(), check(context, chat)
    measured = Measured(context.metrics)
    record = make_record("message", body.model, model)
    generation = await context.pipeline.submit(record, chat_requests(chat, params, record, context.stage.replica_id))
    context.log_submitted(record, chat.user, request.state.request_id)
    responder = TranslatedResponder(generation, measured, context.settings.ping_interval_s, MessageEvents(record))
    return await (responder.stream() if body.stream else responder.whole(request))


class TokenCount(Responder):
    """The tokenizer's answer, instead of a generation."""

    def _body(self) -> Json:
        return {"input_tokens": orjson.loads("".join(self.choices[0].text))["count"]}


@router.post("/count_tokens", openapi_extra=takes("count"))
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has, by the model's own template and tokenizer."""
    context: Context = request.app.state.context
    body = await context.bodies.read(request, "count")
    assert isinstance(body, CountTokensBody)
    chat = chat_of(body)
    params, model = replace(chat.params(), max_tokens=0), check(context, chat)
    measured = Measured(context.metrics)
    record = make_record("message", body.model, model)
    requests = [replace(each, task="tokenize") for each in chat_requests(chat, params, record, context.stage.replica_id)]
    generation = await context.pipeline.submit(record, requests)
    return await TokenCount(generation, measured, context.settings.ping_interval_s).whole(request)
