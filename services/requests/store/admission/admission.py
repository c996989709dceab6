"""Admission: the names that are served, and bounds on what is in the pipeline of a model, in
requests and in tokens, over all gateways.

What was admitted and has not ended is a hash in Redis, `inflight:<model>`: tokens by request id,
and their sum under "". The script here checks it, adds to it and hands the requests over, all or
nothing; the scripts that write a request's end remove it (shared/wire/token_log.py). So a place is
held by a sequence, not by a connection: it outlives its gateway, and comes back when the sequence
ends, whoever still reads. What has been admitted is never refused later.

A full pipeline is full for those who fill it. A tenant who has less than an even share of it is
admitted all the same, so there are never more than twice as many requests as the bound says.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import redis
import redis.asyncio
from msgspec import structs

from services.requests.store.admission.held import HELD, check_size, too_much_held
from services.requests.store.admission.known import KnownReplicas
from services.requests.store.admission.redis_memory import RedisMemory
from services.requests.store.client import redis_errors_as_503
from services.requests.store.record import ResponseRecord
from services.requests.store.tenants.limits import CHARGE_REQUEST, NUM_ARGUMENTS, SCRIPT, UNLIMITED, Caller
from services.requests.store.tenants.shared_limits import SharedLimits
from services.requests.store.tenants.tenant import Tenant
from shared.process.errors import Invalid, Rejected
from shared.process.settings import RequestSettings
from shared.process.stages import PIPELINE
from shared.wire.messages import GenerateRequest, SchedulingParams, encode
from shared.wire.registry import Registry
from shared.wire.replica import Replica
from shared.wire.stage import Stage
from shared.wire.streams import (
    GATEWAY_ID,
    MESSAGE,
    PREFIX,
    REQUEST_ID,
    RUNNING_LOG_TTL_S,
    held_key,
    images_key,
    inflight_key,
    log_key,
    open_key,
    requests,
    response_key,
    shares_key,
    stored_key,
)
from shared.wire.token_log import TOKENS

KEPT_BYTES = 1 << 20  # of a background response that is refused: its client hears of it by asking. Others have their answer

BYTES_PER_TOKEN = 4  # of English text, roughly
IMAGE_TOKENS = 1024  # of an image: models make 64 to some thousands of one
UNBOUNDED_TOKENS = 512  # assumed of a request that names no max_tokens
RETRY_AFTER_S = 2
FULL_RETRY_AFTER_S = 10  # of a Redis that is nearly full: upkeep looks as often
LONG_BYTES = 256 << 10
UNSUBMITTED_TTL_S = 600  # of images whose gateway dies before it has submitted their requests
# A response that is submitted a second time has given its images their time already.
KEEP = """
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if redis.call('TTL', KEYS[1]) < 0 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
"""

# KEYS: inflight key, response key, stored key, open key, shares key, images key, the tenant's quota,
# running and account, the first request's log. ARGV: requests stream (a gateway may only write it,
# and must be allowed to read a script's keys), response record, what is stored ('': nothing), their
# TTL in seconds, most requests, most tokens, tokens in all, gateway id, most bytes that stay stored
# if it is refused; what limits.py says of the tenant; most bytes in the account, bytes in all; then
# for each request its id, its tokens and its message.
# Returns what is left to the tenant (nothing, if it has no limits), and, if they do not fit, why:
# {'full', requests, tokens} with what is held, {'held', bytes, s to wait}, or {'requests' |
# 'tokens' | 'concurrency', ms to wait}. A response that was submitted before is not again: a batch
# that goes on after a death does not know how far it had come.
LIMITS = 10
ACCOUNT = LIMITS + NUM_ARGUMENTS
FIRST = ACCOUNT + 2
SUBMIT = (
    PREFIX
    + SCRIPT
    + HELD
    + f"""
local inflight, response, stored, open, shares, images, quota, running, account, log = unpack(KEYS)
local stream, record, content, ttl, max_requests, max_tokens, tokens, gateway, keeps = unpack(ARGV, 1, {LIMITS - 1})
if redis.call('HEXISTS', inflight, ARGV[{FIRST}]) == 1 or redis.call('EXISTS', log) == 1 then return {{{{}}}} end
local rpm, tpm, concurrency, charged_requests, charged_tokens = unpack(ARGV, {LIMITS}, {ACCOUNT - 1})
rpm, tpm, concurrency = tonumber(rpm), tonumber(tpm), tonumber(concurrency)
local is_limited = rpm ~= {UNLIMITED} or tpm ~= {UNLIMITED} or concurrency ~= {UNLIMITED}
local max_size, size = tonumber(ARGV[{ACCOUNT}]), tonumber(ARGV[{ACCOUNT + 1}])
local num_sequences = (#ARGV - {FIRST - 1}) / 3
local left, exceeded = {{}}, nil
if is_limited then
  left, exceeded = look_at_limits(quota, running, rpm, tpm, concurrency, tonumber(charged_requests), tonumber(charged_tokens), num_sequences)
  if exceeded then return {{left, exceeded}} end
end
local held = held_by(account, max_size - size)
if held + size > max_size then return {{left, {{'held', held, wait_for_room(account)}}}} end
local held_requests = math.max(redis.call('HLEN', inflight) - 1, 0)
local held_tokens = tonumber(redis.call('HGET', inflight, '') or '0')
local own_requests, own_tokens = unpack(redis.call('HMGET', shares, account, account .. '{TOKENS}'))
local num_tenants = redis.call('HLEN', shares) / 2 + (own_requests and 0 or 1)
local function fits(held, own, more, most) return held + more <= most or (tonumber(own) or 0) + more <= most / num_tenants end
if not (fits(held_requests, own_requests, num_sequences, tonumber(max_requests)) and fits(held_tokens, own_tokens, tokens, tonumber(max_tokens))) then
  return {{left, {{'full', held_requests, held_tokens}}}}
end
if is_limited then charge(quota, rpm, tpm, left) end
redis.call('SET', response, record, 'EX', ttl)
if content ~= '' then redis.call('SET', stored, content, 'EX', ttl) end
redis.call('EXPIRE', images, ttl)
redis.call('HSET', open, 'left', num_sequences, 'account', account, 'size', size, 'keeps', keeps)
redis.call('EXPIRE', open, ttl)
hold(account, size .. '/' .. string.match(ARGV[{FIRST}], '^(.*)%.'), size, ttl)
for i = {FIRST}, #ARGV, 3 do
  redis.call('HSET', inflight, ARGV[i], ARGV[i + 1])
  redis.call('XADD', prefix .. stream, '*', '{MESSAGE.decode()}', ARGV[i + 2], '{REQUEST_ID.decode()}', ARGV[i], '{GATEWAY_ID.decode()}', gateway)
end
redis.call('HINCRBY', inflight, '', tokens)
redis.call('EXPIRE', inflight, ttl)
redis.call('HINCRBY', shares, account, num_sequences)
redis.call('HINCRBY', shares, account .. '{TOKENS}', tokens)
redis.call('EXPIRE', shares, ttl)
if concurrency > 0 then
  for i = {FIRST}, #ARGV, 3 do redis.call('HSET', running, ARGV[i], inflight) end
  redis.call('EXPIRE', running, ttl)
end
return {{left}}
"""
)


class Admission:
    def __init__(
        self, stage: Stage, client: "redis.asyncio.Redis", settings: RequestSettings, memory: RedisMemory | None = None,
        on_refused: Callable[[str, str], None] | None = None, known: KnownReplicas | None = None, shared: SharedLimits | None = None, mark: str = "",
    ) -> None:  # fmt: skip
        """memory: of who looks at Redis' memory; batches, which stop earlier, do it in another way.
        on_refused: is told the model and the reason. known: of who takes requests for models without
        replicas, None: nobody does. shared: the limits of all cells, if there are several; mark: of
        this one, unless it is home."""
        self.memory = memory or RedisMemory(client)
        self.stage = stage
        self.client = client
        self.settings = settings
        self.on_refused = on_refused
        self.shared = shared
        self.mark = mark
        self.known = known

    @property
    def registry(self) -> Registry:
        """The replicas that requests are made for: the live ones, and those that a request may wait for."""
        return self.known.registry if self.known is not None else self.stage.registry

    def is_starting(self, model: str) -> bool:
        """Whether the model's requests wait for a replica of some stage."""
        return self.known is not None and bool(self.known.missing(model))

    def resolve(self, name: str, tenant: Tenant) -> str:
        """The model that the tenant calls so.

        Raises Rejected (503) while one of its stages is missing and can't be waited for, Invalid
        (404) if nobody serves it, or not to him.
        """
        registry = self.registry
        for replica in sorted(registry.replicas, key=lambda each: each.started_at):
            if replica.model is not None and name in (names := names_of(replica)) and tenant.may_use(names):
                self._check_stages(registry, replica.model)
                return replica.model
        missing = [stage for stage in PIPELINE if not registry.of(stage)]
        if missing:  # it may be the model of those that are not there yet
            raise self._missing(missing, None)
        raise unknown_model(name, served_names(registry, tenant))

    def _check_stages(self, registry: Registry, model: str) -> None:
        if missing := [stage for stage in PIPELINE if not registry.of(stage, model)]:
            raise self._missing(missing, model)

    def _missing(self, stages: list[str], model: str | None) -> Rejected:
        self._count_refused(model or "", "stage_missing")
        suffix = f" for the model {model}" if model else ""
        return Rejected(f"not ready: no {' and no '.join(stages)} is alive{suffix}", status=503, retry_after_s=RETRY_AFTER_S)

    async def submit(
        self, caller: Caller, response_id: str, record: bytes, model: str, submitted: list[GenerateRequest], stored: bytes = b"", keeps: int = 0,
        images: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        """Hand the requests of a response over, with its record and what is to be stored of it, all
        or none, and charge the caller for them.

        images: files by digest, kept until the response ends; keeps: most bytes that stay stored for a while should the response be refused. Raises
        Rejected (429; 503 while Redis is nearly full) if they do not fit, Invalid if they never
        will, and what the client raises.
        """
        self.check_memory(model)
        outputs = [estimate_output(request, self.registry) for request in submitted]
        tokens = [estimate_prompt(request) + output for request, output in zip(submitted, outputs, strict=True)]
        limits = self.settings.max_requests, self.settings.max_tokens_in_flight
        if len(submitted) > limits[0] or sum(tokens) > limits[1]:  # before anything is encoded: n may be many times a long prompt
            raise self._full(model, 0, 0, len(submitted), sum(tokens))
        messages, size, most = list[bytes](), len(stored) + sum(map(len, (images or {}).values())), self.settings.max_held_size
        for request in submitted:
            messages.append(message := encode(request))
            size += len(message)
            check_size(size, most)
            if len(message) > LONG_BYTES:
                await asyncio.sleep(0)  # n choices of a long prompt: others have their turn in between
        keys = [inflight_key(model), response_key(response_id), stored_key(response_id), open_key(response_id), shares_key(model)]
        keys += [images_key(response_id), *caller.keys, held_key(caller.tenant.tenant_id), log_key(submitted[0].request_id)]
        arguments: list[str | bytes | int] = [requests(model).key, record, stored, RUNNING_LOG_TTL_S, *limits, sum(tokens), self.stage.replica_id, keeps]
        charged, request_ids = caller.arguments(sum(tokens), sum(outputs), len(submitted)), [request.request_id for request in submitted]
        arguments += [*([UNLIMITED, UNLIMITED, UNLIMITED, 0, 0] if self._is_charged_ahead(caller) else charged), most, size]
        for request, count, message in zip(submitted, tokens, messages, strict=True):
            arguments += [request.request_id, count, message]
        if images:
            await self._keep(images_key(response_id), images)
        left, *exceeded = await self._hand_over(caller, model, charged, request_ids, (keys, arguments))
        if not exceeded:
            return caller.admitted(left)
        if images:
            await self.client.unlink(images_key(response_id))
        kind, *rest = exceeded[0]
        if kind == b"full":
            raise self._full(model, rest[0], rest[1], len(submitted), sum(tokens))
        refusal = too_much_held(rest[0], size, most, rest[1]) if kind == b"held" else caller.refused(kind.decode(), rest[0], left)
        self._count_refused(model, refusal.code)
        raise refusal

    async def _hand_over(
        self, caller: Caller, model: str, charged: list[str | int], request_ids: list[str], script: tuple[list[str], list[str | bytes | int]]
    ) -> Any:
        """Return what SUBMIT does with these keys and arguments. Limits that are kept in another cell
        are charged before. Raises Rejected (429) for these."""
        keys, arguments = script
        if self.shared is None or not self._is_charged_ahead(caller):
            found: Any = await self.client.eval(SUBMIT, len(keys), *keys, *arguments)
            is_crowded = len(found) > 1 and found[1][0] == b"concurrency"
            if is_crowded and self.shared is not None and await self.shared.drop_ended(caller):
                found = await self.client.eval(SUBMIT, len(keys), *keys, *arguments)
            return found
        try:
            left = await self.shared.charge(caller, self.mark, model, charged, request_ids)
        except Rejected as error:
            self._count_refused(model, error.code)
            raise
        try:
            _, *exceeded = await self.client.eval(SUBMIT, len(keys), *keys, *arguments)
        except BaseException:  # whoever submits it has it cancelled then
            await self.shared.give_back(caller, charged, request_ids)
            raise
        if exceeded:
            await self.shared.give_back(caller, charged, request_ids)
        else:
            await self.shared.confirm(caller, self.mark, model, request_ids)
        return [left, *exceeded]

    def _is_charged_ahead(self, caller: Caller) -> bool:
        """Whether the caller's limits are in another cell's Redis."""
        return bool(self.mark) and caller.tenant.has_limits

    async def _keep(self, key: str, images: Mapping[str, bytes]) -> None:
        """Put the files where compute finds them. If nothing is submitted then, they expire."""
        await self.client.eval(KEEP, 1, key, UNSUBMITTED_TTL_S, *(part for item in images.items() for part in item))

    def check_memory(self, model: str) -> None:
        """Raises Rejected (503) while Redis is nearly full: what runs needs the room that is
        left."""
        if self.memory.is_nearly_full:
            self._count_refused(model, "redis_nearly_full")
            raise Rejected(self.memory.problem, status=503, retry_after_s=FULL_RETRY_AFTER_S, code="redis_nearly_full")

    async def charge_request(self, caller: Caller) -> None:
        """Charge the caller for one request, before work is done for it. Raises Rejected (429), and
        what the client raises."""
        if caller.tenant.requests_per_minute is None or caller.is_charged or caller.is_counted:
            return
        home = self.shared.home if self.shared is not None else self.client
        left, *exceeded = await home.eval(CHARGE_REQUEST, 1, caller.keys[0], *caller.request_arguments())
        if not exceeded:
            return caller.counted(left)
        kind, wait_ms = exceeded[0]
        refusal = caller.refused(kind.decode(), wait_ms, left)
        self._count_refused("", refusal.code)
        raise refusal

    def _count_refused(self, model: str, reason: str) -> None:
        if self.on_refused is not None:
            self.on_refused(model, reason)

    def _full(self, model: str, num_requests: int, num_tokens: int, more_requests: int, more_tokens: int) -> Rejected:
        self._count_refused(model, "server_full")
        words = f"{num_requests} requests of at most {self.settings.max_requests} and {num_tokens} tokens of at most {self.settings.max_tokens_in_flight}"
        message = f"the server is full: {words} are in it, and this would add {more_requests} and {more_tokens}"
        return Rejected(message, status=429, retry_after_s=RETRY_AFTER_S)


def unknown_model(name: str, known: Iterable[str]) -> Invalid:
    return Invalid(f"the model {name!r} does not exist; served: {', '.join(sorted(known))}", param="model", code="model_not_found", status=404)


def names_of(replica: Replica) -> tuple[str, ...]:
    """The names that clients may call the replica's model by, its own first."""
    return () if replica.model is None else (replica.model, *replica.aliases)


def served_names(registry: Registry, tenant: Tenant) -> dict[str, Replica]:
    """Every name of every model that the tenant may use and any stage is there for, with a compute
    replica of it if one is alive.

    A model whose compute is away for a moment has not vanished: as of any request for it, others
    say that it is not ready.
    """
    replicas = sorted(registry.replicas, key=lambda each: (each.stage == "compute", -each.started_at))  # the last one stays: compute, the oldest
    return {name: replica for replica in replicas for name in names_of(replica) if tenant.may_use(names_of(replica))}


def estimate_prompt(request: GenerateRequest) -> int:
    """Tokens of the prompt, by its length in bytes, for the gateway has no tokenizer."""
    ids = request.prompt_token_ids
    num_given = sum(len(part.token_ids) + part.max_tokens for module in request.modules for part in module.parts)
    num_given += IMAGE_TOKENS * sum(part.image is not None for message in request.messages or () for part in message.parts)
    return num_given + (len(ids) if ids is not None else sum(map(num_bytes, texts_of(request))) // BYTES_PER_TOKEN + 1)


def estimate_output(request: GenerateRequest, registry: Registry) -> int:
    """Tokens that it may generate: never more than the model's length, whatever it asks for."""
    if request.embedding is not None or request.task != "generate":
        return 0
    if request.params.max_tokens is None:
        return UNBOUNDED_TOKENS
    lengths = [replica.max_model_len for replica in registry.of("compute", request.model) if replica.max_model_len is not None]
    return min([request.params.max_tokens, *lengths])


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
    """Roughly the length in UTF-8: exact for ASCII, else estimated without encoding, which n
    choices would do n times."""
    return len(text) if text.isascii() else 3 * len(text)


async def admit(admission: Admission, caller: Caller, record: ResponseRecord, requests: list[GenerateRequest], stored: bytes) -> None:
    """The one way in: what comes by it is its tenant's, shares cached prefixes with nobody else's,
    and has his priority.

    Raises Rejected (429), Invalid for what his limits never allow, Recoverable if Redis can't
    serve.
    """
    packed = replace(record, tenant_id=caller.tenant.tenant_id).pack()
    owned = [structs.replace(each, scheduling=scheduling_of(caller.tenant, each.scheduling)) for each in requests] if caller.tenant.tenant_id else requests
    with redis_errors_as_503():
        keeps = KEPT_BYTES if record.is_background else 0
        await admission.submit(caller, record.response_id, packed, record.served_model, owned, stored, keeps, record.images)
    record.images.clear()  # the record lives as long as its answer


def scheduling_of(tenant: Tenant, scheduling: SchedulingParams) -> SchedulingParams:
    """How the tenant's request is scheduled."""
    priority, salt = scheduling.priority + tenant.priority, tenant.salted(scheduling.cache_salt)
    return structs.replace(scheduling, priority=priority, cache_salt=salt, tenant_id=tenant.tenant_id)
