"""How many tokens a chat has: its request goes to the tokenizer, and ends with the answer. Nothing is computed."""

from collections.abc import Callable
from dataclasses import replace

import orjson
from fastapi import Request, Response

from services.gateway.context import Context
from services.gateway.generation import Generation
from services.gateway.metrics import Measured
from services.gateway.openai.respond import Responder
from services.gateway.openai.routes import chat_requests, check
from services.gateway.openai.schemas import ChatCompletionBody
from services.gateway.record import make_record
from services.gateway.translate import Json


class TokenCount(Responder):
    """The tokenizer's answer, instead of a generation."""

    def __init__(self, generation: Generation, measured: Measured, ping_interval_s: float, describe: Callable[[int], Json]) -> None:
        super().__init__(generation, measured, ping_interval_s)
        self.describe = describe

    def _body(self) -> Json:
        return self.describe(orjson.loads("".join(self.choices[0].text))["count"])


async def count_tokens(context: Context, request: Request, chat: ChatCompletionBody, kind: str, describe: Callable[[int], Json]) -> Response:
    """kind: of record.PREFIXES; describe: the number, as the API answers it."""
    params, model = replace(chat.params(), max_tokens=0), check(context, chat)
    measured = Measured(context.metrics)
    record = make_record(kind, chat.model, model)
    requests = [replace(each, task="tokenize") for each in chat_requests(chat, params, record, context.stage.replica_id)]
    generation = await context.pipeline.submit(record, requests)
    return await TokenCount(generation, measured, context.settings.ping_interval_s, describe).whole(request)
