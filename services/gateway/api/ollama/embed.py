"""Ollama's embeddings: POST /api/embed, and /api/embeddings, which is the older one."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from services.gateway.answering.embeddings import EmbeddingResponder, submit_embeddings
from services.gateway.api.ollama.routes import name_here
from services.gateway.context import context_of
from services.gateway.http.docs import takes
from services.requests.dialects.ollama.schemas import OllamaEmbedBody, OllamaEmbeddingsBody
from services.requests.dialects.openai.embeddings import EmbeddingBody
from services.requests.prepare import embedder
from shared.process.errors import Invalid

router = APIRouter(prefix="/api")


class OllamaEmbeddings(EmbeddingResponder):
    """Vectors of length 1, and how long they took."""

    began_ns = 0

    def _body(self) -> dict[str, Any]:
        return {
            "model": self.generation.record.model,
            "embeddings": [choice.embedding for choice in self.choices],
            "total_duration": time.monotonic_ns() - self.began_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(choice.num_prompt_tokens for choice in self.choices),
        }


class OneEmbedding(EmbeddingResponder):
    """A vector as the model has it."""

    def _body(self) -> dict[str, Any]:
        return {"embedding": self.choices[0].embedding}


@router.post("/embed", openapi_extra=takes(OllamaEmbedBody))
async def embed(request: Request) -> Response:
    """A vector of each input."""
    context, body = await context_of(request).read(request, OllamaEmbedBody)
    began_ns = time.monotonic_ns()
    if not body.input:
        embedder(context, name_here(context, body.model))
        return JSONResponse({"model": body.model, "embeddings": []})
    if not all(isinstance(each, str) for each in body.input):
        raise Invalid("input takes a text, or a list of texts", param="input")
    truncation = None if body.truncate is False else -1
    asked = EmbeddingBody.model_construct(
        model=name_here(context, body.model),
        input=body.input,
        dimensions=body.dimensions,
        truncate_prompt_tokens=truncation,
    )
    responder = await submit_embeddings(context, asked, request, OllamaEmbeddings)
    responder.began_ns = began_ns
    return await responder.whole(request)


@router.post("/embeddings", openapi_extra=takes(OllamaEmbeddingsBody))
async def embeddings(request: Request) -> Response:
    """One vector."""
    context, body = await context_of(request).read(request, OllamaEmbeddingsBody)
    if not body.prompt:
        embedder(context, name_here(context, body.model))
        return JSONResponse({"embedding": []})
    asked = EmbeddingBody.model_construct(
        model=name_here(context, body.model), input=[body.prompt], normalize=False, truncate_prompt_tokens=-1
    )
    return await (await submit_embeddings(context, asked, request, OneEmbedding)).whole(request)
