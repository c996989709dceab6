"""Embeddings: one vector of each input. An input is a request of its own in the pipeline, which
ends with its vector and without a token."""

from fastapi import APIRouter, Request, Response

from services.gateway.answering.embeddings import EmbeddingResponder, submit_embeddings
from services.gateway.context import GatewayContext, context_of
from services.gateway.http.docs import takes
from services.requests.dialects.openai.embeddings import EmbeddingBody

router = APIRouter(prefix="/v1")


@router.post("/embeddings", openapi_extra=takes(EmbeddingBody))
async def embeddings(request: Request) -> Response:
    """A vector of each input, given as texts or as token ids."""
    return await answer_embeddings(*await context_of(request).read(request, EmbeddingBody), request)


async def answer_embeddings(context: GatewayContext, body: EmbeddingBody, request: Request) -> Response:
    """Submit inputs, and answer their vectors."""
    responder = await submit_embeddings(context, body, request, EmbeddingResponder)
    responder.is_base64 = body.encoding_format == "base64"
    return await responder.whole(request)
