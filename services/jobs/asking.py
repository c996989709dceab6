"""Asking: a line's body to requests of the pipeline, by the gateway's own checks and translations,
and their token logs to the body of an answer.

The ids of the requests are a function of the batch, the line and the attempt, and so is the seed,
where the line has none: a worker that asks again finds what is there, and the rest is computed to the
same.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from services.requests.bodies import parse
from services.requests.bodies.ignored import collecting
from services.requests.context import RequestContext
from services.requests.dialects.anthropic.chat import NAME_HERE as MESSAGE_NAMES
from services.requests.dialects.anthropic.chat import chat_of as message_chat
from services.requests.dialects.anthropic.events import MessageEvents
from services.requests.dialects.anthropic.schemas import MessagesBody
from services.requests.dialects.openai.embeddings import EmbeddingBody
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody
from services.requests.dialects.openai.translate import in_own_terms, own_terms
from services.requests.dialects.responses.conversation import ConversationContext, with_conversation
from services.requests.dialects.responses.events import ResponseEvents
from services.requests.dialects.responses.prepare import prepare_response
from services.requests.dialects.responses.schemas import ResponseBody
from services.requests.errors import RequestFailed, check
from services.requests.prepare import prepare, prepare_embeddings
from services.requests.store.admission.admission import estimate_output, estimate_prompt
from services.requests.store.admission.held import check_size
from services.requests.store.batches.lines import BatchLine
from services.requests.store.batches.store import BatchRecord, Totals
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.choice import Choice, Usage, usage_of
from services.requests.text.answers.embeddings import embeddings_body
from services.requests.text.answers.formats import whole_body
from services.requests.text.answers.translate import Fold, Translation
from shared.process.errors import Invalid
from shared.wire.messages import GenerateRequest, TokenEvent, encode

Json = dict[str, Any]
Logs = list[list[TokenEvent]]  # of a response's sequences
Problems = list[list[Json]]  # where their answers break their schemas

# levels behind interactive requests: those that come within five minutes go first (aging_s is 30)
BATCH_PRIORITY = 10
MAX_PRIORITY = 100

C = TypeVar("C", ChatCompletionBody, CompletionBody)
G = TypeVar("G", ChatCompletionBody, CompletionBody, ResponseBody, MessagesBody)


@dataclass(frozen=True, slots=True)
class Asked:
    """A line, ready for the pipeline."""

    record: ResponseRecord
    requests: list[GenerateRequest]
    stored: bytes  # empty: nothing
    # the answer's body. Raises RequestFailed
    fold: Callable[[ResponseRecord, Logs, Problems], tuple[Any, Totals]]
    asked_at: float = 0.0  # wall clock, s; 0: it is not traced


def key_of(batch_id: str, custom_id: str, attempt: int = 0) -> str:
    """The end of the ids of a line's response and answer."""
    return hashlib.blake2b(
        f"{batch_id}/{attempt}/{custom_id}".encode("utf-8", "surrogatepass"), digest_size=16
    ).hexdigest()


async def ask(context: ConversationContext, batch: BatchRecord, line: BatchLine, key: str, seed: int) -> Asked:
    """Raises Invalid for a body that can't be answered, Rejected while that may pass."""
    with collecting(is_strict=context.settings.strict_fields):
        asked = await ENDPOINTS[batch.endpoint](context, line.body, key, seed)
    settings, outputs = context.settings, sum(estimate_output(each, context.registry) for each in asked.requests)
    tokens = sum(map(estimate_prompt, asked.requests)) + outputs
    if len(asked.requests) > settings.max_requests or tokens > settings.max_tokens_in_flight:
        raise Invalid("this request alone is more than the server takes at once", code="request_too_large")
    # raises for what the tenant's limits never allow
    context.caller.charge(tokens, outputs, len(asked.requests))
    requests = [
        structs.replace(each, scheduling=structs.replace(each.scheduling, priority=behind(each.scheduling.priority)))
        for each in asked.requests
    ]
    size = sum(len(encode(each)) for each in requests)
    check_size(size, settings.max_held_size)
    has_room = size + len(asked.stored) <= settings.max_held_size
    return replace(asked, requests=requests, stored=asked.stored if has_room else b"")


def behind(priority: int) -> int:
    return min(max(priority, 0) + BATCH_PRIORITY, MAX_PRIORITY)


async def ask_openai(kind: str, body_type: type[C], context: RequestContext, value: Json, key: str, seed: int) -> Asked:
    body = parse.take(body_type, value)
    if body.use_beam_search:
        raise Invalid("use_beam_search is not available in a batch", param="use_beam_search")
    intent = seeded(body, seed).intent()
    record, requests = await prepare(context, intent, kind, None, key=key, is_background=True)
    return Asked(record, requests, b"", fold_choices)


async def ask_embeddings(context: RequestContext, value: Json, key: str, _: int) -> Asked:
    body = parse.take(EmbeddingBody, value)
    record, requests = prepare_embeddings(context, body, None, key=key, is_background=True)

    def fold(record: ResponseRecord, logs: Logs, problems: Problems) -> tuple[Any, Totals]:
        choices = choices_of(record, logs, problems)
        found = embeddings_body(record, choices, is_base64=body.encoding_format == "base64")
        return found, Totals(completed=1, input_tokens=found["usage"]["prompt_tokens"])

    return Asked(record, requests, b"", fold)


async def ask_response(context: ConversationContext, value: Json, key: str, seed: int) -> Asked:
    body = seeded(parse.take(ResponseBody, value), seed)
    if body.background:
        raise Invalid("background is not available in a batch", param="background")
    if body.truncation == "auto":
        raise Invalid(
            "truncation 'auto' is not available in a batch: what does not fit is an error of its line",
            param="truncation",
        )
    body, before = await with_conversation(context, body)
    record, requests, stored = await prepare_response(context, body, before, None, key=key, is_background=True)

    def fold(record: ResponseRecord, logs: Logs, problems: Problems) -> tuple[Any, Totals]:
        return fold_translation(
            record, logs, problems, ResponseEvents(record, body.asked(requests[0].params) | {"background": False})
        )

    return Asked(record, requests, stored, fold)


async def ask_message(context: RequestContext, value: Json, key: str, seed: int) -> Asked:
    chat = message_chat(seeded(parse.take(MessagesBody, value), seed))
    with own_terms(MESSAGE_NAMES):
        record, requests = await prepare(context, chat.intent(), "message", None, key=key, is_background=True)

    def fold(record: ResponseRecord, logs: Logs, problems: Problems) -> tuple[Any, Totals]:
        return fold_translation(record, logs, problems, MessageEvents(record))

    return Asked(record, requests, b"", fold)


def fold_translation(
    record: ResponseRecord, logs: Logs, problems: Problems, translation: Translation
) -> tuple[Any, Totals]:
    """The answer of another API. Raises RequestFailed, in its terms."""
    folded = Fold(record, translation)
    [folded.choice.schema_errors] = problems
    translation.opening(None)
    for event in logs[0]:
        try:
            check(event)
        except RequestFailed as failed:
            raise RequestFailed(in_own_terms(failed.error, translation.names)) from None
        folded.add(event)
    return translation.whole(), count(usage_of([folded.choice], 1))


ENDPOINTS: dict[str, Callable[[ConversationContext, Json, str, int], Awaitable[Asked]]] = {
    "/v1/chat/completions": partial(ask_openai, "chat.completion", ChatCompletionBody),
    "/v1/completions": partial(ask_openai, "text_completion", CompletionBody),
    "/v1/embeddings": ask_embeddings,
    "/v1/responses": ask_response,
    "/v1/messages": ask_message,
}


def seeded(body: G, seed: int) -> G:
    """The body with a seed of its own, unless it has one. Raises Invalid for a stream, which no batch has."""
    if body.stream:
        raise Invalid("stream is not available in a batch", param="stream")
    return body if body.seed is not None else body.model_copy(update={"seed": seed})


def fold_choices(record: ResponseRecord, logs: Logs, problems: Problems) -> tuple[Any, Totals]:
    choices = choices_of(record, logs, problems)
    return whole_body(record, choices), count(usage_of(choices, record.n))


def choices_of(record: ResponseRecord, logs: Logs, problems: Problems) -> list[Choice]:
    """Raises RequestFailed."""
    choices = []
    for index, events in enumerate(logs):
        choices.append(choice := Choice.begin(index, record))
        choice.schema_errors = problems[index]
        for event in events:
            check(event)
            choice.add(event)
    return choices


def count(used: Usage) -> Totals:
    """One completed line, of its usage."""
    return Totals(
        1, 0, used.num_prompt_tokens, used.num_cached_tokens, used.num_output_tokens, used.num_reasoning_tokens or 0
    )
