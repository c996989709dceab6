"""Who may enter: the names that are served, and bounds on what is in the pipeline of a model, in requests and in tokens, over all gateways.

What was admitted and has not ended is a hash in Redis, `inflight:<model>`: tokens by request id, and their sum under "". The script here checks it,
adds to it and hands the requests over, all or nothing; the scripts that write a request's end remove it (shared/token_log.py). So a place is held by
a sequence, not by a connection: it outlives its gateway, and comes back when the sequence ends, whoever still reads. What has been admitted is never
refused later.
"""

import asyncio

import redis.asyncio

from services.gateway.metrics import Metrics
from shared.errors import Invalid, Rejected
from shared.messages import GenerateRequest, Replica, encode
from shared.registry import Registry
from shared.settings import GatewaySettings
from shared.stage import Stage
from shared.streams import GATEWAY_ID, MESSAGE, REQUEST_ID, RUNNING_LOG_TTL_S, inflight_key, requests, response_key, stored_key

STAGES = ("tokenizer", "compute", "sampler")
BYTES_PER_TOKEN = 4  # of English text, roughly
UNBOUNDED_TOKENS = 512  # assumed of a request that names no max_tokens
RETRY_AFTER_S = 2
LONG_BYTES = 256 << 10

# ARGV: inflight key, requests stream, response key, response record, stored key, what is stored ('': nothing), their TTL in seconds, most requests, most
# tokens, tokens in all, gateway id; then for each request its id, its tokens and its message. Returns nil, or, if they do not fit, what is held: requests
# and tokens.
SUBMIT = f"""
local inflight, stream, response, record, stored, content, ttl, max_requests, max_tokens, tokens, gateway = unpack(ARGV, 1, 11)
local held_requests = math.max(redis.call('HLEN', inflight) - 1, 0)
local held_tokens = tonumber(redis.call('HGET', inflight, '') or '0')
if held_requests + (#ARGV - 11) / 3 > tonumber(max_requests) or held_tokens + tokens > tonumber(max_tokens) then
  return {{held_requests, held_tokens}}
end
redis.call('SET', response, record, 'EX', ttl)
if content ~= '' then redis.call('SET', stored, content, 'EX', ttl) end
for i = 12, #ARGV, 3 do
  redis.call('HSET', inflight, ARGV[i], ARGV[i + 1])
  redis.call('XADD', stream, '*', '{MESSAGE.decode()}', ARGV[i + 2], '{REQUEST_ID.decode()}', ARGV[i], '{GATEWAY_ID.decode()}', gateway)
end
redis.call('HINCRBY', inflight, '', tokens)
redis.call('EXPIRE', inflight, ttl)
"""


class Admission:
    def __init__(self, stage: Stage, client: "redis.asyncio.Redis", settings: GatewaySettings, metrics: Metrics) -> None:
        self.stage = stage
        self.client = client
        self.settings = settings
        self.metrics = metrics

    def resolve(self, name: str) -> str:
        """The model that clients call so. Raises Rejected (503) while one of its stages is missing, Invalid (404) if nobody serves it."""
        registry = self.stage.registry
        for replica in sorted(registry.replicas, key=lambda each: each.started_at):
            if replica.model is not None and name in names_of(replica):
                self._check_stages(registry, replica.model)
                return replica.model
        missing = [stage for stage in STAGES if not registry.of(stage)]
        if missing:  # it may be the model of those that are not there yet
            raise self._missing(missing, None)
        known = ", ".join(sorted(served_names(registry)))
        raise Invalid(f"the model {name!r} does not exist; served: {known}", param="model", code="model_not_found", status=404)

    def _check_stages(self, registry: Registry, model: str) -> None:
        if missing := [stage for stage in STAGES if not registry.of(stage, model)]:
            raise self._missing(missing, model)

    def _missing(self, stages: list[str], model: str | None) -> Rejected:
        self.metrics.rejected.labels(model or "", "stage_missing").inc()
        suffix = f" for the model {model}" if model else ""
        return Rejected(f"not ready: no {' and no '.join(stages)} is alive{suffix}", status=503, retry_after_s=RETRY_AFTER_S)

    async def submit(self, response_id: str, record: bytes, model: str, submitted: list[GenerateRequest], stored: bytes = b"") -> None:
        """Hand the requests of a response over, with its record and what is to be stored of it, all or none.

        Raises Rejected (429) if they do not fit, and what the client raises.
        """
        tokens = [estimate_tokens(request) for request in submitted]
        limits = self.settings.max_requests, self.settings.max_tokens_in_flight
        if len(submitted) > limits[0] or sum(tokens) > limits[1]:  # before anything is encoded: n may be many times a long prompt
            raise self._full(model, 0, 0, len(submitted), sum(tokens))
        arguments: list[str | bytes | int] = [inflight_key(model), requests(model).key, response_key(response_id), record]
        arguments += [stored_key(response_id), stored, RUNNING_LOG_TTL_S, *limits, sum(tokens), self.stage.replica_id]
        for request, count in zip(submitted, tokens, strict=True):
            arguments += [request.request_id, count, message := encode(request)]
            if len(message) > LONG_BYTES:
                await asyncio.sleep(0)  # n choices of a long prompt: others have their turn in between
        held = await self.client.eval(SUBMIT, 0, *arguments)
        if held is not None:
            raise self._full(model, held[0], held[1], len(submitted), sum(tokens))

    def _full(self, model: str, num_requests: int, num_tokens: int, more_requests: int, more_tokens: int) -> Rejected:
        self.metrics.rejected.labels(model, "server_full").inc()
        words = f"{num_requests} requests of at most {self.settings.max_requests} and {num_tokens} tokens of at most {self.settings.max_tokens_in_flight}"
        message = f"the server is full: {words} are in it, and this would add {more_requests} and {more_tokens}"
        return Rejected(message, status=429, retry_after_s=RETRY_AFTER_S)


def names_of(replica: Replica) -> tuple[str, ...]:
    """What clients may call its model, its own name first."""
    return () if replica.model is None else (replica.model, *replica.aliases)


def served_names(registry: Registry) -> dict[str, Replica]:
    """Every name of every model that a live compute replica serves, and one such replica."""
    computes = sorted(registry.of("compute"), key=lambda each: each.started_at, reverse=True)
    return {name: replica for replica in computes for name in names_of(replica)}


def estimate_tokens(request: GenerateRequest) -> int:
    """Prompt and output tokens; the prompt's by its length in bytes, for the gateway has no tokenizer."""
    ids = request.prompt_token_ids
    prompt = len(ids) if ids is not None else sum(map(num_bytes, texts_of(request))) // BYTES_PER_TOKEN + 1
    if request.embedding is not None:
        return prompt
    return prompt + (UNBOUNDED_TOKENS if request.params.max_tokens is None else request.params.max_tokens)


def texts_of(request: GenerateRequest) -> list[str]:
    """All of a prompt that is text."""
    if request.prompt is not None:
        return [request.prompt]
    messages = request.messages or ()
    arguments = [call.arguments for message in messages for call in message.tool_calls]
    return [
        *(message.content for message in messages),
        *(message.reasoning or "" for message in messages),
        *arguments,
        request.chat.tools,
        request.chat.documents,
    ]


def num_bytes(text: str) -> int:
    """In UTF-8, roughly: exact for ASCII, and for other texts without encoding them (n choices would do it n times)."""
    return len(text) if text.isascii() else 3 * len(text)
