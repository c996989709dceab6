"""Submits a list of inputs, and answers with a vector for each."""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from services.gateway.answering.responder import Responder
from services.gateway.context import GatewayContext
from services.gateway.telemetry.measured import ResponseMeter
from services.requests.dialects.openai.embeddings import EmbeddingBody
from services.requests.prepare import prepare_embeddings
from services.requests.text.answers.embeddings import embeddings_body


class EmbeddingResponder(Responder):
    """A generation's events as a list of vectors."""

    is_base64 = False

    def _body(self) -> dict[str, Any]:
        return embeddings_body(self.generation.record, self.choices, is_base64=self.is_base64)


R = TypeVar("R", bound=EmbeddingResponder)


async def submit_embeddings(
    context: GatewayContext, body: EmbeddingBody, request: Request, make: Callable[..., R], kind: str = "embedding"
) -> R:
    """Hand the inputs over, all or none. Returns what answers, which `make` makes of a generation.
    kind: of record.PREFIXES."""
    record, requests = prepare_embeddings(context, body, context.stage.replica_id, kind)
    measured = ResponseMeter(context.metrics)
    generation = await context.pipeline.submit(context.caller, record, requests)
    context.log_submitted(record, body.user, request.state.request_id)
    return make(generation, measured, context.settings.ping_interval_s)
