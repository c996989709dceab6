"""vLLM's render endpoints: what a request becomes before it is computed. No model runs."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from services.gateway.answering.ask import ask_each
from services.gateway.answering.infill import infilled
from services.gateway.context import Context, context_of
from services.gateway.http.docs import takes
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody, GenerateBody
from services.requests.prepare import prepare, refuse_modules
from services.requests.store.record import ResponseRecord
from shared.wire.messages import GenerateRequest

Json = dict[str, Any]

OWN = ("bad_words_token_ids", "returns_prompt_token_ids")  # of SamplingParams, what the stages tell each other

router = APIRouter(prefix="/v1")


@router.post("/chat/completions/render", openapi_extra=takes(ChatCompletionBody))
async def render_chat(request: Request) -> Json:
    """The tokens that the model's template makes of a conversation, and the sampling parameters."""
    context, body = await context_of(request).read(request, ChatCompletionBody)
    intent = body.intent()
    refuse_modules(intent)
    record, [asked, *_] = await prepare(context, intent, "chat.completion", context.stage.replica_id)
    [rendered] = await render(context, body, record, [asked])
    return rendered


@router.post("/completions/render", openapi_extra=takes(CompletionBody))
async def render_completion(request: Request) -> list[Json]:
    """The tokens of each prompt, and the sampling parameters."""
    context, body = await context_of(request).read(request, CompletionBody)
    intent = body.intent()
    refuse_modules(intent)
    record, requests = await prepare(context, await infilled(context, intent), "text_completion", context.stage.replica_id)
    return await render(context, body, record, requests[:: record.n])


async def render(context: Context, body: GenerateBody, record: ResponseRecord, requests: list[GenerateRequest]) -> list[Json]:
    """The requests in the form that vLLM calls GenerateRequest."""
    options = body.stream_options.model_dump() if body.stream_options is not None else None
    return [
        {
            "request_id": record.response_id, "model": record.model, "token_ids": found["tokens"],
            "sampling_params": {name: value for name, value in asdict(asked.params).items() if name not in OWN},
            "stream": body.stream, "stream_options": options, "priority": body.priority, "cache_salt": body.cache_salt or None,
        }
        for asked, found in zip(requests, await ask_each(context, record.served_model, "tokenize", requests), strict=True)
    ]  # fmt: skip
