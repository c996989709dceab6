"""The API's endpoints: bodies in, responses out."""

import time
from dataclasses import replace
from typing import Any

import orjson
from fastapi import APIRouter, Header, Request, Response

from services.gateway.admission import served_names
from services.gateway.context import Context
from services.gateway.metrics import Measured
from services.gateway.openai.ask import unless_gone
from services.gateway.openai.beams import check_beams, search_prompt
from services.gateway.openai.docs import takes
from services.gateway.openai.fields import MAX_SEQUENCES
from services.gateway.openai.formats import Choice, format_for, usage
from services.gateway.openai.respond import Responder
from services.gateway.openai.schemas import MAX_MESSAGES, ChatCompletionBody, CompletionBody, GenerateBody
from services.gateway.record import ResponseRecord, choice_params, make_record
from shared.errors import Invalid
from shared.messages import ChatMessage, GenerateRequest
from shared.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams

router = APIRouter(prefix="/v1")

LIMITS = {"max_logprobs": MAX_LOGPROBS, "max_sequences": MAX_SEQUENCES, "max_stop_strings": MAX_STOP_STRINGS, "max_messages": MAX_MESSAGES}


@router.post("/chat/completions", openapi_extra=takes("chat"))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context: Context = request.app.state.context
    body = await context.bodies.read(request, "chat")
    assert isinstance(body, ChatCompletionBody)
    params, model = body.params(), check(context, body)  # what is wrong, before what is missing
    record = make_record(
        "chat.completion", body.model, model, num_prompts=1, has_usage=body.has_usage, num_prompt_logprobs=body.prompt_logprobs,
        **each_choice(body, has_logprobs=bool(body.logprobs)),
    )  # fmt: skip
    messages = tuple(ChatMessage(message.role, message.content, message.name) for message in body.messages)
    now = time.time()
    scheduling = body.scheduling(now, record.response_id)
    requests = [
        GenerateRequest(request_id, context.stage.replica_id, model, own, messages, created_at=now, scheduling=scheduling, encoding=body.encoding())
        for request_id, own in zip(record.request_ids, each_params(body, params, 1), strict=True)
    ]
    return await respond(context, body, record, requests, request)


@router.post("/completions", openapi_extra=takes("completion"))
async def completions(request: Request) -> Response:
    """Continue one prompt or several, given as text or as token ids."""
    context: Context = request.app.state.context
    body = await context.bodies.read(request, "completion")
    assert isinstance(body, CompletionBody)
    params, prompts, model = body.params(), body.prompt, check(context, body)
    if (count := len(prompts) * (body.num_beams or body.num_sequences)) > MAX_SEQUENCES:
        raise Invalid(f"at most {MAX_SEQUENCES} prompts times n (or best_of) in one request, got {count}", param="n")
    record = make_record(
        "text_completion", body.model, model, num_prompts=len(prompts), has_usage=body.has_usage, num_echo_logprobs=body.num_echo_logprobs,
        num_prompt_logprobs=body.prompt_logprobs, **each_choice(body, has_logprobs=body.logprobs is not None),
    )  # fmt: skip
    now = time.time()
    requests = []
    for index, (request_id, own) in enumerate(zip(record.request_ids, each_params(body, params, len(prompts)), strict=True)):
        prompt = prompts[index // record.n]
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        requests.append(
            GenerateRequest(
                request_id, context.stage.replica_id, model, own,
                prompt=text, prompt_token_ids=token_ids, echo=body.echo, created_at=now,
                scheduling=body.scheduling(now, f"{record.response_id}.{index // record.n}"), encoding=body.encoding(),
            )
        )  # fmt: skip
    return await respond(context, body, record, requests, request)


@router.get("/streams/{response_id}")
async def resume_stream(response_id: str, request: Request, last_event_id: str | None = Header(None)) -> Response:
    """Go on with a stream whose gateway died: the events after Last-Event-ID, or all of them."""
    context: Context = request.app.state.context
    generation = await context.pipeline.resume(response_id, last_event_id)
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
            "root": replica.model, "parent": None, "max_model_len": replica.max_model_len, "limits": LIMITS,
        }
        for name, replica in sorted(served_names(context.stage.registry).items())
    ]  # fmt: skip


def check(context: Context, body: GenerateBody) -> str:
    """The served model that the body names. Raises Rejected, Invalid."""
    if body.priority < (least := context.settings.min_priority):
        raise Invalid(f"priority must be at least {least} here (smaller is sooner), got {body.priority}", param="priority")
    return context.admission.resolve(body.model)


def each_params(body: GenerateBody, params: SamplingParams, num_prompts: int) -> list[SamplingParams]:
    """For each prompt, for each of its n choices. With a seed, choice i of a prompt is the same whatever the other prompts."""
    seed = body.seed % (1 << 64) if body.seed is not None else None
    return [choice_params(params, seed, choice) for _ in range(num_prompts) for choice in range(body.num_sequences if body.num_beams is None else 1)]


def each_choice(body: GenerateBody, *, has_logprobs: bool) -> dict[str, Any]:
    """What the record says of a prompt's choices."""
    picks = body.num_beams is None and body.num_sequences > body.n
    return {
        "n": 1 if body.num_beams is not None else body.num_sequences, "num_best": body.n if picks else None, "hides_logprobs": picks and not has_logprobs,
        "has_token_ids": body.return_token_ids, "names_tokens_by_id": body.return_tokens_as_token_ids,
    }  # fmt: skip


async def respond(context: Context, body: GenerateBody, record: ResponseRecord, requests: list[GenerateRequest], request: Request) -> Response:
    """Submit, and answer as a stream or whole."""
    if body.num_beams is not None:
        return await respond_with_beams(context, body, record, requests, request)
    measured = Measured(context.metrics)
    generation = await context.pipeline.submit(record, requests)
    context.log_submitted(record, body.user, request.state.request_id)
    responder = Responder(generation, measured, context.settings.ping_interval_s)
    return await (responder.stream() if body.stream else responder.whole(request))


async def respond_with_beams(context: Context, body: GenerateBody, record: ResponseRecord, requests: list[GenerateRequest], request: Request) -> Response:
    """A beam search for each prompt, one after the other; what stands in its answer is whole."""
    width = body.num_beams or 1
    check_beams(requests[0].params, width)
    if getattr(body, "echo", False):
        raise Invalid("echo is not available with use_beam_search", param="echo")
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    measured = Measured(context.metrics)
    context.log_submitted(record, body.user, request.state.request_id)

    async def search() -> Response:
        choices: list[Choice] = []
        for each in requests:
            found = await search_prompt(context, each, width=width, length_penalty=length_penalty, early_stopping=body.early_stopping or False, num_best=body.n)
            choices += [replace(choice, index=len(choices) + choice.index) for choice in found]
        measured.whole(choices)
        answer = format_for(record).whole(choices)
        return Response(orjson.dumps(answer | {"usage": usage(choices, body.n)}), media_type="application/json")

    return await unless_gone(request, search())
