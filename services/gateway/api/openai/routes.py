"""The API's endpoints: bodies in, responses out."""

from dataclasses import replace

import orjson
from fastapi import APIRouter, Header, Request, Response

from services.gateway.answering.infill import infilled
from services.gateway.answering.responder import Responder
from services.gateway.answering.token_count import count_tokens
from services.gateway.api.openai.beams import check_beams, search_prompt
from services.gateway.api.openai.fim import FimBody
from services.gateway.context import Context, context_of
from services.gateway.http.disconnect import unless_gone
from services.gateway.http.docs import takes
from services.gateway.telemetry.measured import Measured
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody, GenerateBody
from services.requests.prepare import prepare_chat, prepare_completion
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.choice import Choice, parsed, usage_of
from services.requests.text.answers.formats import format_for, usage_fields
from shared.process.errors import Invalid
from shared.wire.messages import GenerateRequest

KINDS = ("chat.completion", "text_completion")  # of responses that are streamed as chunks with positions

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=takes(ChatCompletionBody))
@router.post("/chat/completions", openapi_extra=takes(ChatCompletionBody))  # as llama.cpp has it
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await answer_chat(*await context_of(request).read(request, ChatCompletionBody), request)


async def answer_chat(context: Context, body: ChatCompletionBody, request: Request) -> Response:
    """Submit a conversation, and answer it."""
    record, requests = await prepare_chat(context, body, "chat.completion", body.model, context.stage.replica_id)
    return await respond(context, body, record, requests, request)


@router.post("/v1/chat/completions/input_tokens", openapi_extra=takes(ChatCompletionBody))
async def input_tokens(request: Request) -> Response:
    """How many tokens the model would be given, by its own template and tokenizer: as llama.cpp has it."""
    context, body = await context_of(request).read(request, ChatCompletionBody)
    return await count_tokens(context, request, body, "chat.completion", {}, lambda number: {"object": "response.input_tokens", "input_tokens": number})


@router.post("/v1/completions", openapi_extra=takes(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue one prompt or several, given as text or as token ids."""
    return await answer_completion(*await context_of(request).read(request, CompletionBody), request)


async def answer_completion(context: Context, body: CompletionBody, request: Request) -> Response:
    """Submit prompts, and answer them."""
    record, requests = await prepare_completion(context, await infilled(context, body), context.stage.replica_id)
    return await respond(context, body, record, requests, request)


@router.post("/v1/fim/completions", openapi_extra=takes(FimBody))
async def fim_completions(request: Request) -> Response:
    """Write what stands between a prompt and a suffix, as Mistral's API has it: the answer has the form of a chat's."""
    context, body = await context_of(request).read(request, FimBody)
    asked = await infilled(context, body, is_asked=True)
    record, requests = await prepare_completion(context, asked, context.stage.replica_id, kind="chat.completion")
    return await respond(context, asked, record, requests, request)


@router.get("/v1/streams/{response_id}")
async def resume_stream(response_id: str, request: Request, last_event_id: str | None = Header(None)) -> Response:
    """Go on with a stream whose gateway died: the events after Last-Event-ID, or all of them."""
    context = context_of(request)
    async with context.reading.place(context.caller):
        generation = await context.pipeline.resume(context.tenant, response_id, last_event_id, KINDS)
    return await Responder(generation, Measured(context.metrics, is_resumed=True), context.settings.ping_interval_s, has_positions=True).stream()


async def respond(context: Context, body: GenerateBody, record: ResponseRecord, requests: list[GenerateRequest], request: Request) -> Response:
    """Submit, and answer as a stream or whole."""
    if body.num_beams is not None:
        return await respond_with_beams(context, body, record, requests, request)
    measured = Measured(context.metrics)
    generation = await context.pipeline.submit(context.caller, record, requests)
    context.log_submitted(record, body.user, request.state.request_id)
    responder = Responder(generation, measured, context.settings.ping_interval_s, has_positions=body.has_positions, has_timings=body.timings_per_token)
    return await (responder.stream() if body.stream else responder.whole(request))


async def respond_with_beams(context: Context, body: GenerateBody, record: ResponseRecord, requests: list[GenerateRequest], request: Request) -> Response:
    """A beam search for each prompt, one after the other; what stands in its answer is whole."""
    width = body.num_beams or 1
    check_beams(requests[0], width)
    if getattr(body, "echo", False):
        raise Invalid("echo is not available with use_beam_search", param="echo")
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    measured = Measured(context.metrics)
    context.log_submitted(record, body.user, request.state.request_id)

    async def search() -> Response:
        choices: list[Choice] = []
        for each in requests:
            found = await search_prompt(context, each, width=width, length_penalty=length_penalty, early_stopping=body.early_stopping or False, num_best=body.n)
            choices += [parsed(replace(choice, index=len(choices) + choice.index), record) for choice in found]
        measured.whole(record, choices)
        answer = format_for(record).whole(choices)
        told = usage_fields(
            usage_of([replace(choice, answer=None) for choice in choices], body.n)
        )  # of texts that come whole nobody knows how many tokens are thoughts
        return Response(orjson.dumps(answer | {"usage": told}), media_type="application/json")

    return await unless_gone(request, search())
