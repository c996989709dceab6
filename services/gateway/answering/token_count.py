"""How many tokens a chat has: its request goes to the tokenizer, and ends with the answer. Nothing
is computed."""

from collections.abc import Callable

import orjson
from fastapi import Request, Response
from msgspec.structs import replace

from services.gateway.answering.responder import Responder
from services.gateway.context import GatewayContext
from services.gateway.generation.generation import Generation
from services.gateway.telemetry.measured import ResponseMeter
from services.requests.dialects.openai.schemas import ChatCompletionBody
from services.requests.dialects.openai.translate import own_terms
from services.requests.prepare import prepare
from services.requests.text.answers.translate import Json


class TokenCount(Responder):
    """The tokenizer's answer, instead of a generation."""

    def __init__(
        self, generation: Generation, measured: ResponseMeter, ping_interval_s: float, describe: Callable[[int], Json]
    ) -> None:
        super().__init__(generation, measured, ping_interval_s)
        self.describe = describe

    def _body(self) -> Json:
        return self.describe(orjson.loads("".join(self.choices[0].text))["count"])


async def count_tokens(
    context: GatewayContext,
    request: Request,
    chat: ChatCompletionBody,
    kind: str,
    names: dict[str, str],
    describe: Callable[[int], Json],
) -> Response:
    """kind: of record.PREFIXES; names: of the chat's fields there; describe: the number, as the API
    answers it."""
    measured = ResponseMeter(context.metrics)
    with own_terms(names):
        record, requests = await prepare(context, chat.intent(), kind, context.stage.replica_id)
    requests = [replace(each, task="tokenize", params=replace(each.params, max_tokens=0)) for each in requests]
    generation = await context.pipeline.submit(context.caller, record, requests)
    return await TokenCount(generation, measured, context.settings.ping_interval_s, describe).whole(request)
