"""SageMaker's endpoint, as vLLM has it: what is asked there is known by its fields."""

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from services.gateway.api.openai.embeddings import answer_embeddings
from services.gateway.api.openai.routes import answer_chat, answer_completion
from services.gateway.context import context_of
from services.requests.dialects.openai.embeddings import EmbeddingBody
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody

KINDS: Mapping[str, type[ChatCompletionBody | CompletionBody | EmbeddingBody]] = {
    "messages": ChatCompletionBody,
    "prompt": CompletionBody,
    "input": EmbeddingBody,
}

router = APIRouter()


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    """Answer a chat (`messages`), a completion (`prompt`) or an embedding (`input`)."""
    context, body = await context_of(request).read(request, KINDS)
    if isinstance(body, ChatCompletionBody):
        return await answer_chat(context, body, request)
    if isinstance(body, CompletionBody):
        return await answer_completion(context, body, request)
    return await answer_embeddings(context, body, request)
