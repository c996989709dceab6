"""Ollama's endpoints, for the front ends that speak it: a chat inside. docs/use/other-apis.md says what
is understood."""

import hashlib
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from msgspec import structs

from services.gateway.answering.translated import TranslatedResponder
from services.gateway.context import GatewayContext, context_of
from services.gateway.http.docs import takes
from services.gateway.telemetry.measured import ResponseMeter
from services.requests.dialects.ollama.lines import OllamaLines, now_text
from services.requests.dialects.ollama.schemas import (
    NAME_HERE,
    Json,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaModelBody,
    OllamaPullBody,
    with_images,
)
from services.requests.dialects.openai.schemas import ChatCompletionBody
from services.requests.dialects.openai.translate import make_chat, own_terms, thinking_kwargs
from services.requests.prepare import parsers_of, prepare
from shared.process.errors import Invalid
from shared.wire.messages import ChatOptions, GenerateRequest
from shared.wire.replica import Replica

STAYS_UNTIL = "9999-12-31T23:59:59Z"
OLLAMA_LEVEL = "0.14.0"  # of Ollama's API, as clients ask for it: the release whose fields and answers are spoken here
LATEST = ":latest"  # what Ollama's clients take for said where no tag is

router = APIRouter(prefix="/api")


@router.post("/chat", openapi_extra=takes(OllamaChatBody))
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    context, body = await context_of(request).read(request, OllamaChatBody)
    if not body.messages:
        return loaded(context, body, {"message": {"role": "assistant", "content": ""}})
    return await answer(context, request, body, translated(context, body, body.messages, body.tools or []), None)


@router.post("/generate", openapi_extra=takes(OllamaGenerateBody))
async def generate(request: Request) -> Response:
    """Answer a prompt, or continue it as it is."""
    context, body = await context_of(request).read(request, OllamaGenerateBody)
    if not body.prompt:
        return loaded(context, body, {"response": ""})
    system = [{"role": "system", "content": body.system}] if body.system else []
    if body.images and body.raw:
        raise Invalid("images need the model's template: leave raw out", param="images")
    content = with_images(body.prompt, body.images, "images") if body.images else body.prompt
    chat = translated(context, body, [*system, {"role": "user", "content": content}], [])
    return await answer(context, request, body, chat, body.prompt if body.raw else None)


def translated(
    context: GatewayContext, body: OllamaBody, messages: list[Json], tools: list[Json]
) -> ChatCompletionBody:
    given: Json = {
        **body.sampling(),
        "model": name_here(context, body.model),
        "messages": messages,
        "tools": tools,
        "stream": body.stream,
        "response_format": body.response_format(),
        "chat_template_kwargs": thinking_kwargs(body.think) if isinstance(body.think, bool) else None,
        "reasoning_effort": body.think if isinstance(body.think, str) else None,
    }
    is_chat = isinstance(body, OllamaChatBody)
    return make_chat(
        given, NAME_HERE, lambda number: f"messages[{number}]" if is_chat else "prompt", "tools[{}]".format
    )


async def answer(
    context: GatewayContext, request: Request, body: OllamaBody, chat: ChatCompletionBody, raw: str | None
) -> Response:
    """Submit and answer; raw: the prompt, if it is not to be a chat."""
    measured = ResponseMeter(context.metrics)
    with own_terms(NAME_HERE):
        record, requests = await prepare(context, chat.intent(), "ollama", context.stage.replica_id, name=body.model)
    if raw is not None:  # no template, so no marks of it in the answer, and no thought before it
        record = replace(record, parsing=None)
        requests = [as_it_is(each, raw) for each in requests]
    lines = OllamaLines(record, is_chat=isinstance(body, OllamaChatBody))
    generation = await context.pipeline.submit(context.caller, record, requests)
    context.log_submitted(record, None, request.state.request_id)
    responder = TranslatedResponder(generation, measured, context.settings.ping_interval_s, lines)
    return await (responder.stream() if body.stream else responder.whole(request))


def as_it_is(request: GenerateRequest, prompt: str) -> GenerateRequest:
    """The request of a chat, to go on with a prompt instead."""
    constraint = (
        structs.replace(request.constraint, thought_begin="", thought_end="")
        if request.constraint is not None
        else None
    )
    params = structs.replace(request.params, skip_special_tokens=True)
    return structs.replace(
        request, messages=None, prompt=prompt, chat=ChatOptions(), params=params, constraint=constraint
    )


def loaded(context: GatewayContext, body: OllamaBody, nothing: Json) -> Response:
    """Nothing was asked: Ollama would load the model, or with keep_alive 0 unload it. It is there
    and stays, or the error says so."""
    context.resolve(name_here(context, body.model))
    return JSONResponse(
        {
            "model": body.model,
            "created_at": now_text(),
            "done": True,
            "done_reason": "unload" if body.unloads else "load",
            **nothing,
        }
    )


@router.get("/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The models that are served."""
    return {"models": [card(name, replica) for name, replica in sorted(context_of(request).served_names().items())]}


@router.get("/ps")
async def running(request: Request) -> dict[str, Any]:
    """List the models that a live compute replica has in memory, where they stay."""
    context = context_of(request)
    loaded = [
        (name, replica)
        for name, replica in sorted(context.served_names().items())
        if context.stage.registry.of("compute", replica.model)
    ]
    return {
        "models": [
            card(name, replica) | {"expires_at": STAYS_UNTIL, "size_vram": 0, "context_length": replica.max_model_len}
            for name, replica in loaded
        ]
    }


@router.post("/show", openapi_extra=takes(OllamaModelBody))
async def show(request: Request) -> dict[str, Any]:
    """Describe a model: its length, and what it can do."""
    context, body = await context_of(request).read(request, OllamaModelBody)
    name = name_here(context, body.wanted)
    replica = context.served(name)
    described = card(name, replica)
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": described["details"],
        "model_info": model_info(name, replica),
        "capabilities": capabilities(context, name, replica),
        "modified_at": described["modified_at"],
    }


def capabilities(context: GatewayContext, name: str, replica: Replica) -> list[str]:
    """List what the model can do, in Ollama's words."""
    if replica.is_encoder:
        return ["embedding"]
    tool_calls, reasoning = parsers_of(context, replica.model or name)
    return [
        "completion",
        *(["vision"] if replica.takes_images else []),
        *(["tools"] if tool_calls else []),
        *(["thinking"] if reasoning else []),
    ]


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The level of Ollama's API, which clients compare with what they need, and what speaks it."""
    return {"version": OLLAMA_LEVEL, "penstock": version("penstock")}


@router.post("/pull", openapi_extra=takes(OllamaPullBody))
async def pull(request: Request) -> Response:
    """A model that is served is there already; others are not fetched."""
    context, body = await context_of(request).read(request, OllamaPullBody)
    name = name_here(context, body.wanted)
    if name not in context.served_names():
        context.resolve(name)
    success = {"status": "success"}
    if not body.stream:
        return JSONResponse(success)
    lines = ({"status": "pulling manifest"}, {"status": "verifying sha256 digest"}, success)
    return Response(b"".join(orjson.dumps(line) + b"\n" for line in lines), media_type=OllamaLines.media_type)


def name_here(context: GatewayContext, name: str) -> str:
    """The name as it is served: without the tag that Ollama's clients add."""
    names = context.served_names()
    return name.removesuffix(LATEST) if name not in names and name.endswith(LATEST) else name


def card(name: str, replica: Replica) -> Json:
    """A model in Ollama's lists. What compute has not announced is left empty.

    Its digest is of what tells one model from another here, as the fingerprint does; Ollama's
    command line cuts twelve digits off it, and fails at fewer.
    """
    digest = hashlib.sha256(f"{replica.model} {replica.fingerprint}".encode()).hexdigest()
    weights, count = replica.weights, replica.sizes.get("n_params")
    details = {name: weights.get(name, "") for name in ("format", "family", "quantization_level")} | {
        "parent_model": "",
        "families": [weights["family"]] if "family" in weights else [],
        "parameter_size": rounded(count) if count else "",
    }
    return {
        "name": name,
        "model": name,
        "modified_at": now_text(replica.started_at),
        "size": replica.sizes.get("size", 0),
        "digest": digest,
        "details": details,
    }


def rounded(count: int) -> str:
    """A number of parameters in Ollama's words: 7.2B, 134.52M, 12K."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.2f}M" if count >= 10**6 else f"{count / 10**3:.0f}K" if count >= 10**3 else str(count)


def model_info(name: str, replica: Replica) -> Json:
    """The facts of a model, by GGUF's names. Those of its shape stand under its family's."""
    family, sizes = replica.weights.get("family", "penstock"), replica.sizes
    fields = {
        "general.architecture": family,
        "general.basename": replica.model or name,
        "general.name": name,
        "general.type": "model",
        "general.parameter_count": sizes.get("n_params"),
        f"{family}.context_length": replica.max_model_len,
        f"{family}.embedding_length": sizes.get("n_embd"),
        f"{family}.vocab_size": sizes.get("n_vocab"),
    }
    return {key: value for key, value in fields.items() if value is not None}
