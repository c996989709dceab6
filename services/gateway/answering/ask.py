"""Requests of the gateway's own: a response that is read to its end here, and goes to no client as
it is."""

import json
from typing import Any

import numpy as np
from msgspec.structs import replace

from services.gateway.context import GatewayContext
from services.gateway.generation.subscription import ResponseFailed
from services.requests.bodies.fields import TokenIds
from services.requests.errors import RequestFailed, check
from services.requests.store.record import make_record
from shared.model.sampling_params import SamplingParams
from shared.wire.messages import EncodingParams, GenerateRequest, Task, TokenEvent


async def ask_all(context: GatewayContext, model: str, requests: list[GenerateRequest]) -> list[list[TokenEvent]]:
    """The events of each request, whose ids are given here. Raises Rejected, Recoverable,
    RequestFailed."""
    record = make_record("internal", model, model, num_prompts=len(requests), n=1, has_usage=False)
    named = [
        replace(each, request_id=request_id) for each, request_id in zip(requests, record.request_ids, strict=True)
    ]
    generation = await context.pipeline.submit(context.caller, record, named)
    events: list[list[TokenEvent]] = [[] for _ in requests]
    try:
        while not all(each and each[-1].finish_reason is not None for each in events):
            for index, event in await generation.next(context.settings.ping_interval_s):
                check(event)
                events[index].append(event)
    except ResponseFailed as failed:
        raise RequestFailed(failed.error) from None
    finally:
        generation.close()
    return events


async def ask_tokenizer(context: GatewayContext, model: str, task: Task, request: GenerateRequest) -> dict[str, Any]:
    """The tokenizer's answer, JSON. Raises as above; what is wrong with the request is
    RequestFailed, with status 400."""
    [answer] = await ask_each(context, model, task, [request])
    return answer


async def ask_each(
    context: GatewayContext, model: str, task: Task, requests: list[GenerateRequest]
) -> list[dict[str, Any]]:
    """The tokenizer's answers to several requests, as many at once as the caller may have. Raises as above."""
    at_once = context.tenant.max_concurrency or max(1, len(requests))
    answers: list[list[TokenEvent]] = []
    for at in range(0, len(requests), at_once):
        answers += await ask_all(
            context, model, [replace(request, task=task) for request in requests[at : at + at_once]]
        )
    return [json.loads(event.text) for [event] in answers]


async def token_ids_of(
    context: GatewayContext, model: str, texts: list[str], encodings: list[EncodingParams]
) -> list[TokenIds]:
    """The tokens of each text, encoded as the one of the same number in `encodings` says. Raises as
    above."""
    asked = [
        question(context, model, encoding=encoding, prompt=text)
        for text, encoding in zip(texts, encodings, strict=True)
    ]
    return [np.array(answer["tokens"], np.int32) for answer in await ask_each(context, model, "tokenize", asked)]


def question(
    context: GatewayContext,
    model: str,
    params: SamplingParams | None = None,
    encoding: EncodingParams | None = None,
    **prompt: Any,
) -> GenerateRequest:
    """A request without a name; `prompt`: messages, prompt or prompt_token_ids."""
    return GenerateRequest(
        "", context.stage.replica_id, model, params or SamplingParams(), encoding=encoding or EncodingParams(), **prompt
    )
