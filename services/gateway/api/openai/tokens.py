"""The endpoints beside generation: texts to tokens and back, what the tokenizer is, and what load
balancers ask."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from services.gateway.answering.ask import ask_tokenizer, question
from services.gateway.api.openai.tokenize import ContentBody, DetokenizeBody, TokenizeBody
from services.gateway.context import Context, context_of
from services.gateway.http.docs import takes
from services.requests.prepare import messages_for
from shared.model.sampling_params import SamplingParams

KINDS: Mapping[str, type[TokenizeBody | ContentBody]] = {"prompt": TokenizeBody, "messages": TokenizeBody, "content": ContentBody}

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
    found = await ask_tokenizer(context, model, "tokenize", asked)
    return {name: found[name] for name in ("count", "max_model_len", "tokens", "token_strs")}


async def tokenize_content(context: Context, body: ContentBody) -> dict[str, Any]:
    """The answer as llama.cpp has it."""
    model = context.resolve(body.model)
    found = await ask_tokenizer(context, model, "tokenize", question(context, model, encoding=body.encoding(), prompt=body.content))
    if not body.with_pieces:
        return {"tokens": found["tokens"]}
    return {"tokens": [{"id": token, "piece": piece} for token, piece in zip(found["tokens"], found["pieces"], strict=True)]}


@router.post("/detokenize", openapi_extra=takes(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of tokens, special ones spelt out."""
    context, body = await context_of(request).read(request, DetokenizeBody)
    model = context.resolve(body.model)
    params = SamplingParams(skip_special_tokens=False)
    return await ask_tokenizer(context, model, "detokenize", question(context, model, params, prompt_token_ids=np.array(body.tokens, np.int32)))


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
