"""Embeddings: one vector of each input. An input is a request of its own in the pipeline, which ends with its vector and without a token."""

import base64
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from services.gateway.context import Context, RequestContext, context_of
from services.gateway.measured import Measured
from services.gateway.openai.docs import takes
from services.gateway.openai.formats import Choice
from services.gateway.openai.respond import Responder
from services.gateway.openai.routes import check
from services.gateway.openai.schemas import EmbeddingBody
from services.gateway.record import ResponseRecord, make_record
from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid
from shared.wire.messages import Float32Array, GenerateRequest, SchedulingParams

router = APIRouter(prefix="/v1")


class EmbeddingResponder(Responder):
    """A generation's events as a list of vectors."""

    is_base64 = False

    def _body(self) -> dict[str, Any]:
        return embeddings_body(self.generation.record, self.choices, is_base64=self.is_base64)


def embeddings_body(record: ResponseRecord, choices: list[Choice], *, is_base64: bool) -> dict[str, Any]:
    """The answer: the vectors as arrays, or spelt in base64."""
    num_tokens = sum(choice.num_prompt_tokens for choice in choices)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": choice.index, "embedding": _vector(choice.embedding, is_base64=is_base64)} for choice in choices],
        "model": record.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _vector(vector: Float32Array | None, *, is_base64: bool) -> Any:
    assert vector is not None, "the end of an embedding's log has its vector"
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector


R = TypeVar("R", bound=EmbeddingResponder)


@router.post("/embeddings", openapi_extra=takes("embedding"))
async def embeddings(request: Request) -> Response:
    """A vector of each input, given as texts or as token ids."""
    context = context_of(request)
    body = await context.read(request, "embedding")
    assert isinstance(body, EmbeddingBody)
    return await answer_embeddings(context, body, request)


async def answer_embeddings(context: Context, body: EmbeddingBody, request: Request) -> Response:
    """Submit inputs, and answer their vectors."""
    responder = await submit_embeddings(context, body, request, EmbeddingResponder)
    responder.is_base64 = body.encoding_format == "base64"
    return await responder.whole(request)


async def submit_embeddings(context: Context, body: EmbeddingBody, request: Request, make: Callable[..., R], kind: str = "embedding") -> R:
    """Hand the inputs over, all or none. Returns what answers, which `make` makes of a generation. kind: of record.PREFIXES."""
    record, requests = prepare_embeddings(context, body, context.stage.replica_id, kind)
    measured = Measured(context.metrics)
    generation = await context.pipeline.submit(context.caller, record, requests)
    context.log_submitted(record, body.user, request.state.request_id)
    return make(generation, measured, context.settings.ping_interval_s)


def prepare_embeddings(
    context: RequestContext, body: EmbeddingBody, gateway_id: str | None, kind: str = "embedding", **others: Any
) -> tuple[ResponseRecord, list[GenerateRequest]]:
    """What goes into the pipeline for a list of inputs: as `prepare_chat` for a chat. kind: of record.PREFIXES."""
    model = check(context, body)
    prompts = body.prompts(may_bring_template=context.settings.trust_request_chat_template)
    if len(prompts) > (most := context.settings.max_requests):
        raise Invalid(f"at most {most} inputs in one request here, got {len(prompts)}", param="input")
    record = make_record(kind, body.model, model, num_prompts=len(prompts), **others)
    now = time.time()
    scheduling = SchedulingParams(body.priority, now + body.deadline_s if body.deadline_s is not None else 0.0, "", body.cache_salt)
    requests = [
        GenerateRequest(
            request_id, gateway_id, model, SamplingParams(max_tokens=0),
            created_at=now, scheduling=scheduling, embedding=body.embedding, encoding=body.encoding(), **prompt,
        )
        for request_id, prompt in zip(record.request_ids, prompts, strict=True)
    ]  # fmt: skip
    return record, requests
