"""The API's endpoints: bodies in, responses out."""

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from fastapi import APIRouter, Header, Request, Response

from services.gateway.context import Context
from services.gateway.generation import ResponseRecord, choice_params, make_record
from services.gateway.metrics import Measured
from services.gateway.openai.respond import Responder
from services.gateway.openai.schemas import MAX_SEQUENCES, ChatCompletionBody, CompletionBody, GenerateBody
from services.gateway.sse import parse_id
from shared.errors import Invalid
from shared.messages import ChatMessage, GenerateRequest
from shared.sampling_params import SamplingParams

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
    """Answer a conversation."""
    context: Context = request.app.state.context
    context.admission.check_model(body.model)
    record = make_record("chat.completion", "chatcmpl", body.model, num_prompts=1, n=body.n, has_usage=body.has_usage)
    messages = tuple(ChatMessage(message.role, message.text, message.name) for message in body.messages)
    now = time.time()
    scheduling = body.scheduling(now, record.response_id)
    requests = [
        GenerateRequest(request_id, context.stage.replica_id, body.model, params, messages=messages, created_at=now, scheduling=scheduling)
        for request_id, params in zip(record.request_ids, each_params(body, body.params(), 1), strict=True)
    ]
    return await respond(context, body, record, requests, request)


@router.post("/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several, given as text or as token ids."""
    context: Context = request.app.state.context
    context.admission.check_model(body.model)
    prompts = body.prompts()
    if len(prompts) * body.n > MAX_SEQUENCES:
        raise Invalid(f"at most {MAX_SEQUENCES} prompts times n in one request, got {len(prompts) * body.n}", param="n")
    if any(isinstance(token, int) and not 0 <= token < 1 << 31 for prompt in prompts for token in prompt):
        raise Invalid("prompt holds token ids that no vocabulary has", param="prompt")
    record = make_record("text_completion", "cmpl", body.model, num_prompts=len(prompts), n=body.n, has_usage=body.has_usage)
    now = time.time()
    requests = []
    for index, (request_id, params) in enumerate(zip(record.request_ids, each_params(body, body.params(), len(prompts)), strict=True)):
        prompt = prompts[index // body.n]
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, np.array(prompt, np.int32))
        requests.append(
            GenerateRequest(
                request_id, context.stage.replica_id, body.model, params,
                prompt=text, prompt_token_ids=token_ids, echo=body.echo, created_at=now,
                scheduling=body.scheduling(now, f"{record.response_id}.{index // body.n}"),
            )
        )  # fmt: skip
    return await respond(context, body, record, requests, request)


@router.get("/streams/{response_id}")
async def resume_stream(response_id: str, request: Request, last_event_id: str | None = Header(None)) -> Response:
    """Go on with a stream whose gateway died: the events after Last-Event-ID, or all of them."""
    context: Context = request.app.state.context
    record = await context.pipeline.find_record(response_id)
    num_sequences = len(record.request_ids)
    positions = parse_id(last_event_id, num_sequences) if last_event_id else [0] * num_sequences
    generation = await context.pipeline.resume(record, positions)
    responder = Responder(generation, ExitStack(), Measured(context.metrics), context.settings.ping_interval_s)
    return await responder.stream(is_resumed=True)


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models that live compute replicas serve."""
    return {"object": "list", "data": models(request.app.state.context)}


@router.get("/models/{model:path}")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    """One of them."""
    for card in models(request.app.state.context):
        if card["id"] == model:
            return card
    raise Invalid(f"the model {model!r} does not exist", param="model", code="model_not_found", status=404)


def models(context: Context) -> list[dict[str, Any]]:
    replicas = {replica.model: replica for replica in context.stage.registry.of("compute")}
    return [
        {"id": name, "object": "model", "created": int(replica.started_at), "owned_by": "penstock", "max_model_len": replica.max_model_len}
        for name, replica in sorted(replicas.items(), key=lambda item: item[0] or "")
    ]


def each_params(body: GenerateBody, params: SamplingParams, num_prompts: int) -> list[SamplingParams]:
    """For each prompt, for each of its n choices. With a seed, choice i of a prompt is the same whatever the other prompts."""
    seed = body.seed % (1 << 64) if body.seed is not None else None
    return [choice_params(params, seed, choice) for _ in range(num_prompts) for choice in range(body.n)]


async def respond(context: Context, body: GenerateBody, record: ResponseRecord, requests: list[GenerateRequest], request: Request) -> Response:
    """Admit, submit, and answer as a stream or whole."""
    held = ExitStack()
    held.enter_context(context.admission.admit(requests))
    measured = Measured(context.metrics)
    try:
        generation = await context.pipeline.submit(record, requests)
    except BaseException:
        held.close()
        raise
    context.log_submitted(record, body.user, request.state.request_id)
    responder = Responder(generation, held, measured, context.settings.ping_interval_s)
    return await (responder.stream() if body.stream else responder.whole(request))
