"""SageMaker's endpoint, as vLLM has it: what is asked there is known by its fields."""

from fastapi import APIRouter, Request, Response

from services.gateway.context import context_of
from services.gateway.openai.embeddings import answer_embeddings
from services.gateway.openai.parse import INVOCATION
from services.gateway.openai.routes import answer_chat, answer_completion
from services.gateway.openai.schemas import ChatCompletionBody, CompletionBody, EmbeddingBody

router = APIRouter()


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    """Answer a chat (`messages`), a completion (`prompt`) or an embedding (`input`)."""
    context = context_of(request)
    body = await context.read(request, INVOCATION)
    if isinstance(body, ChatCompletionBody):
        return await answer_chat(context, body, request)
    if isinstance(body, CompletionBody):
        return await answer_completion(context, body, request)
    assert isinstance(body, EmbeddingBody)
    return await answer_embeddings(context, body, request)
