"""The ends of requests for embeddings: compute writes them itself, for no sampler has a part in
them."""

import time
from collections.abc import Sequence

from services.compute.exchange.active import ActiveRequest
from shared.model.arrays import Array
from shared.wire.line import Pipeline
from shared.wire.messages import Moments, TokenEvent
from shared.wire.token_log import write_end


def write_embeddings(pipe: Pipeline, model: str, ended: Sequence[tuple[ActiveRequest, Array]], replica_id: str) -> None:
    now = time.time()
    for active, vector in ended:
        sequence, request = active.sequence, active.message
        moments = Moments(request.request_id, 0, request.tokenized_at, active.scheduled_at, now, replica_id)
        num_prompt, num_cached = sequence.tokens.num_prompt, sequence.num_cached_tokens
        event = TokenEvent(request.request_id, 0, None, "", num_prompt, num_cached, finish_reason="stop", embedding=vector)
        write_end(pipe, model, event, active.gateway_id, (moments,))
