"""The API's endpoints: bodies in, responses out."""

import time
from typing import Any

from fastapi import APIRouter, Header, Request, Response

from services.gateway.admission import served_names
from services.gateway.context import Context
from services.gateway.metrics import Measured
from services.gateway.openai.docs import takes
from services.gateway.openai.fields import MAX_SEQUENCES
from services.gateway.openai.respond import Responder
from services.gateway.openai.schemas import ChatCompletionBody, CompletionBody, EmbeddingBody, GenerateBody
from services.gateway.record import ResponseRecord, choice_params, make_record
from shared.errors import Invalid
from shared.messages import ChatMessage, GenerateRequest
from shared.sampling_params import SamplingParams

KINDS = ("chat.completion", "text_completion")  # of responses that are streamed as chunks with positions

router = APIRouter(prefix="/v1")


@router.post("/chat/completions", openapi_extra=takes("chat"))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context: Context = request.app.state.context
    body = await context.bodies.read(request, "chat")
    assert isinstance(body, ChatCompletionBody)
    params, model = body.params(), check(context, body)  # what is wrong, before what is missing
    record = make_record("chat.completion", body.model, model, num_prompts=1, n=body.n, has_usage=body.has_usage, num_prompt_logprobs=body.prompt_logprobs)
    return await respond(context, body, record, chat_requests(body, params, record, context.stage.replica_id), request)


@router.post("/completions", openapi_extra=takes("completion"))
async def completions(request: Request) -> Response:
    """Continue one prompt or several, given as text or as token ids."""
    context: Context = request.app.state.context
    body = await context.bodies.read(request, "completion")
    assert isinstance(body, CompletionBody)
    params, prompts, model = body.params(), body.prompt, check(context, body)
    if len(prompts) * body.n > MAX_SEQUENCES:
        raise Invalid(f"at most {MAX_SEQUENCES} prompts times n in one request, got {len(prompts) * body.n}", param="n")
    record = make_record(
        "text_completion", body.model, model, num_prompts=len(prompts), n=body.n, has_usage=body.has_usage,
        num_echo_logprobs=body.num_echo_logprobs, num_prompt_logprobs=body.prompt_logprobs,
    )  # fmt: skip
    now = time.time()
    requests = []
    for index, (request_id, own) in enumerate(zip(record.request_ids, each_params(body, params, len(prompts)), strict=True)):
        prompt = prompts[index // body.n]
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        requests.append(
            GenerateRequest(
                request_id, context.stage.replica_id, model, own,
                prompt=text, prompt_token_ids=token_ids, echo=body.echo, created_at=now,
                scheduling=body.scheduling(now, f"{record.response_id}.{index // body.n}"),
            )
        )  # fmt: skip
    return await respond(context, body, record, requests, request)


@router.get("/streams/{response_id}")
async def resume_stream(response_id: str, request: Request, last_event_id: str | None = Header(None)) -> Response:
    """Go on with a stream whose gateway died: the events after Last-Event-ID, or all of them."""
    context: Context = request.app.state.context
    generation = await context.pipeline.resume(response_id, last_event_id, KINDS)
    return await Responder(generation, Measured(context.metrics, is_resumed=True), context.settings.ping_interval_s).stream()


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
    """A card for each name; `root` is the model's own."""
    return [
        {
            "id": name, "object": "model", "created": int(replica.started_at), "owned_by": "penstock",
            "root": replica.model, "max_model_len": replica.max_model_len,
        }
        for name, replica in sorted(served_names(context.stage.registry).items())
    ]  # fmt: skip


def check(context: Context, body: GenerateBody | EmbeddingBody) -> str:
    """The served model that the body names. Raises Rejected, Invalid."""
    if body.priority < (least := context.settings.min_priority):
        raise Invalid(f"priority must be at least {least} here (smaller is sooner), got {body.priority}", param="priority")
    return context.admission.resolve(body.model)


def chat_requests(body: ChatCompletionBody, params: SamplingParams, record: ResponseRecord, gateway_id: str | None) -> list[GenerateRequest]:
    """What goes into the pipeline for a chat, whichever API it came by. gateway_id: who reads the events; None: nobody, the log is enough."""
    messages = tuple(ChatMessage(message.role, message.content, message.name) for message in body.messages)
    now = time.time()
    scheduling = body.scheduling(now, record.response_id)
    return [
        GenerateRequest(request_id, gateway_id, record.served_model, own, messages=messages, created_at=now, scheduling=scheduling)
        for request_id, own in zip(record.request_ids, each_params(body, params, 1), strict=True)
    ]


def each_params(body: GenerateBody, params: SamplingParams, num_prompts: int) -> list[SamplingParams]:
    """For each prompt, for each of its n choices. With a seed, choice i of a prompt is the same whatever the other prompts."""
    seed = body.seed % (1 << 64) if body.seed is not None else None
    return [choice_params(params, seed, choice) for _ in range(num_prompts) for choice in range(body.n)]


async def respond(context: Context, body: GenerateBody, record: ResponseRecord, requests: list[GenerateRequest], request: Request) -> Response:
    """Submit, and answer as a stream or whole."""
    measured = Measured(context.metrics)
    generation = await context.pipeline.submit(record, requests)
    context.log_submitted(record, body.user, request.state.request_id)
    responder = Responder(generation, measured, context.settings.ping_interval_s)
    return await (responder.stream() if body.stream else responder.whole(request))
