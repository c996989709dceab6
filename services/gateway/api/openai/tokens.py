"""The endpoints that generate nothing: texts to tokens and back, the tokens and parameters of a
request (vLLM's render), the tokenizer's description, and what load balancers ask."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from services.gateway.answering.ask import ask_each, ask_tokenizer, question
from services.gateway.answering.infill import infilled
from services.gateway.api.openai.token_schemas import ContentBody, DetokenizeBody, TokenizeBody
from services.gateway.context import GatewayContext, context_of
from services.gateway.http.docs import takes
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody, GenerateBody
from services.requests.prepare import messages_for, prepare, refuse_modules
from services.requests.store.record import ResponseRecord
from shared.model.sampling_params import SamplingParams
from shared.model.wire_struct import as_dict
from shared.wire.messages import GenerateRequest

KINDS: Mapping[str, type[TokenizeBody | ContentBody]] = {
    "prompt": TokenizeBody,
    "messages": TokenizeBody,
    "content": ContentBody,
}

router = APIRouter()


@router.post("/tokenize", openapi_extra=takes(TokenizeBody, ContentBody))
async def tokenize(request: Request) -> dict[str, Any]:
    """The tokens of a text or of a conversation, and how many they are."""
    context, body = await context_of(request).read(request, KINDS)
    if isinstance(body, ContentBody):
        return await tokenize_content(context, body)
    body.check()
    chat = body.as_chat()
    options = chat.chat_options(chat.calling(), may_bring_template=context.settings.trust_request_chat_template)
    model = context.resolve(body.model)
    messages = (await messages_for(context, body.messages, model))[0] if body.messages is not None else None
    asked = question(context, model, encoding=body.encoding(), messages=messages, prompt=body.prompt, chat=options)
    reply = await ask_tokenizer(context, model, "tokenize", asked)
    return {name: reply[name] for name in ("count", "max_model_len", "tokens", "token_strs")}


async def tokenize_content(context: GatewayContext, body: ContentBody) -> dict[str, Any]:
    """The answer as llama.cpp has it."""
    model = context.resolve(body.model)
    reply = await ask_tokenizer(
        context, model, "tokenize", question(context, model, encoding=body.encoding(), prompt=body.content)
    )
    if not body.with_pieces:
        return {"tokens": reply["tokens"]}
    return {
        "tokens": [{"id": token, "piece": piece} for token, piece in zip(reply["tokens"], reply["pieces"], strict=True)]
    }


@router.post("/detokenize", openapi_extra=takes(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of tokens, special ones spelt out."""
    context, body = await context_of(request).read(request, DetokenizeBody)
    model = context.resolve(body.model)
    params = SamplingParams(skip_special_tokens=False)
    return await ask_tokenizer(
        context, model, "detokenize", question(context, model, params, prompt_token_ids=np.array(body.tokens, np.int32))
    )


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
    """Describe the model's tokenizer: its class, its special tokens, its chat template."""
    context, name = context_of(request).named(model)
    return await ask_tokenizer(context, name, "describe", question(context, name))


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of Penstock."""
    return {"version": version("penstock")}


@router.get("/load")
async def show_load(request: Request) -> dict[str, int]:
    """How many sequences this gateway is answering, for load balancers."""
    return {"server_load": context_of(request).pipeline.subscriptions.num_sequences}


Json = dict[str, Any]

OWN = ("bad_words_token_ids", "returns_prompt_token_ids")  # of SamplingParams, what the stages tell each other


@router.post("/v1/chat/completions/render", openapi_extra=takes(ChatCompletionBody))
async def render_chat(request: Request) -> Json:
    """The tokens that the model's template makes of a conversation, and the sampling parameters."""
    context, body = await context_of(request).read(request, ChatCompletionBody)
    intent = body.intent()
    refuse_modules(intent)
    record, [asked, *_] = await prepare(context, intent, "chat.completion", context.stage.replica_id)
    [rendered] = await render(context, body, record, [asked])
    return rendered


@router.post("/v1/completions/render", openapi_extra=takes(CompletionBody))
async def render_completion(request: Request) -> list[Json]:
    """The tokens of each prompt, and the sampling parameters."""
    context, body = await context_of(request).read(request, CompletionBody)
    intent = body.intent()
    refuse_modules(intent)
    record, requests = await prepare(
        context, await infilled(context, intent), "text_completion", context.stage.replica_id
    )
    return await render(context, body, record, requests[:: record.n])


async def render(
    context: GatewayContext, body: GenerateBody, record: ResponseRecord, requests: list[GenerateRequest]
) -> list[Json]:
    """The requests in the form that vLLM calls GenerateRequest."""
    options = body.stream_options.model_dump() if body.stream_options is not None else None
    return [
        {
            "request_id": record.response_id,
            "model": record.model,
            "token_ids": found["tokens"],
            "sampling_params": {name: value for name, value in as_dict(asked.params).items() if name not in OWN},
            "stream": body.stream,
            "stream_options": options,
            "priority": body.priority,
            "cache_salt": body.cache_salt or None,
        }
        for asked, found in zip(
            requests, await ask_each(context, record.served_model, "tokenize", requests), strict=True
        )
    ]
