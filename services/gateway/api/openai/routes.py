"""The API's endpoints: bodies in, responses out."""

from dataclasses import replace

import orjson
from fastapi import APIRouter, Header, Request, Response

from services.gateway.answering.infill import infilled
from services.gateway.answering.responder import Responder
from services.gateway.answering.token_count import count_tokens
from services.gateway.api.openai.beams import check_beams, search_prompt
from services.gateway.api.openai.fim import FimBody
from services.gateway.context import GatewayContext, context_of
from services.gateway.http.disconnect import unless_gone
from services.gateway.http.docs import takes
from services.gateway.telemetry.measured import ResponseMeter
from services.requests.dialects.openai.intent import Intent
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody
from services.requests.prepare import prepare
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.choice import Choice, parsed, usage_of
from services.requests.text.answers.formats import format_for, usage_fields
from shared.wire.messages import GenerateRequest

KINDS = ("chat.completion", "text_completion")  # of responses that are streamed as chunks with positions

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=takes(ChatCompletionBody))
@router.post("/chat/completions", openapi_extra=takes(ChatCompletionBody))  # as llama.cpp has it
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context, body = await context_of(request).read(request, ChatCompletionBody)
    return await respond(context, body.intent(), request, "chat.completion")


@router.post("/v1/chat/completions/input_tokens", openapi_extra=takes(ChatCompletionBody))
async def input_tokens(request: Request) -> Response:
    """How many tokens the model would be given, by its own template and tokenizer: as llama.cpp has it."""
    context, body = await context_of(request).read(request, ChatCompletionBody)
    return await count_tokens(
        context,
        request,
        body,
        "chat.completion",
        {},
        lambda number: {"object": "response.input_tokens", "input_tokens": number},
    )


@router.post("/v1/completions", openapi_extra=takes(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue one prompt or several, given as text or as token ids."""
    context, body = await context_of(request).read(request, CompletionBody)
    return await respond(context, await infilled(context, body.intent()), request, "text_completion")


@router.post("/v1/fim/completions", openapi_extra=takes(FimBody))
async def fim_completions(request: Request) -> Response:
    """Write what stands between a prompt and a suffix, as Mistral's API has it: the answer has the form of a chat's."""
    context, body = await context_of(request).read(request, FimBody)
    return await respond(context, await infilled(context, body.intent(), is_asked=True), request, "chat.completion")


@router.get("/v1/streams/{response_id}")
async def resume_stream(response_id: str, request: Request, last_event_id: str | None = Header(None)) -> Response:
    """Go on with a stream whose gateway died: the events after Last-Event-ID, or all of them."""
    context = context_of(request)
    async with context.reading.place(context.caller):
        generation = await context.pipeline.resume(context.tenant, response_id, last_event_id, KINDS)
    return await Responder(
        generation,
        ResponseMeter(context.metrics, is_resumed=True),
        context.settings.ping_interval_s,
        has_positions=True,
    ).stream()


async def respond(context: GatewayContext, intent: Intent, request: Request, kind: str) -> Response:
    """Submit, and answer as a stream or whole. kind: of record.PREFIXES."""
    record, requests = await prepare(context, intent, kind, context.stage.replica_id)
    if intent.beams is not None:
        return await respond_with_beams(context, intent, record, requests, request)
    measured = ResponseMeter(context.metrics)
    generation = await context.pipeline.submit(context.caller, record, requests)
    context.log_submitted(record, intent.user, request.state.request_id)
    interval_s = context.settings.ping_interval_s
    responder = Responder(
        generation, measured, interval_s, has_positions=intent.has_positions, has_timings=intent.has_timings
    )
    return await (responder.stream() if intent.stream else responder.whole(request))


async def respond_with_beams(
    context: GatewayContext, intent: Intent, record: ResponseRecord, requests: list[GenerateRequest], request: Request
) -> Response:
    """A beam search for each prompt, one after the other; what stands in its answer is whole."""
    assert intent.beams is not None
    check_beams(requests[0], intent.beams.width)
    measured = ResponseMeter(context.metrics)
    context.log_submitted(record, intent.user, request.state.request_id)
    options, num_best = intent.beams, intent.num_answers

    async def search() -> Response:
        choices: list[Choice] = []
        for request in requests:
            beams = await search_prompt(context, request, options, num_best=num_best)
            choices += [parsed(replace(choice, index=len(choices) + choice.index), record) for choice in beams]
        measured.whole(record, choices)
        answer = format_for(record).whole(choices)
        # how many tokens of a text that comes whole are thoughts is not known
        usage = usage_fields(usage_of([replace(choice, answer=None) for choice in choices], num_best))
        return Response(orjson.dumps(answer | {"usage": usage}), media_type="application/json")

    return await unless_gone(request, search())
