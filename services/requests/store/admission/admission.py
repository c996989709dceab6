"""Admission: the names that are served, and bounds on what is in the pipeline of a model, in
requests and in tokens, over all gateways.

The admitted requests that have not ended are a hash in Redis, `inflight:<model>`: tokens by request
id, and their sum under "". submit.lua checks it, adds to it and hands the requests over, all or none;
the scripts that write a request's end take it out (give_back.lua). So a place is held by a sequence,
not by a connection: it outlives its gateway, and is free when the sequence ends, whether a client
reads or not. An admitted request is never refused later.

A full pipeline is full for the tenants that fill it. A tenant with less than an even share of it is
admitted all the same, so there are never more than twice as many requests as the bound says.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import redis
import redis.asyncio
from msgspec import structs

from services.requests.store.admission.held import check_size, too_much_held
from services.requests.store.admission.known import KnownReplicas
from services.requests.store.admission.redis_memory import RedisMemory
from services.requests.store.client import redis_errors_as_503
from services.requests.store.record import ResponseRecord
from services.requests.store.tenants.limits import Caller, Charge
from services.requests.store.tenants.shared_limits import SharedLimits
from services.requests.store.tenants.tenant import Tenant
from shared.process.errors import Invalid, Rejected
from shared.process.settings import RequestSettings
from shared.process.stages import PIPELINE
from shared.wire.messages import GenerateRequest, SchedulingParams, encode
from shared.wire.registry import Registry
from shared.wire.replica import Replica
from shared.wire.script import load_script, table
from shared.wire.stage import Stage
from shared.wire.streams import (
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

# Kept of a background response that is refused, because its client hears of it by asking; other clients
# have their answer.
KEPT_BYTES = 1 << 20

BYTES_PER_TOKEN = 4  # of English text, roughly
IMAGE_TOKENS = 1024  # of an image: models make 64 to some thousands of one
UNBOUNDED_TOKENS = 512  # assumed of a request that names no max_tokens
RETRY_AFTER_S = 2
FULL_RETRY_AFTER_S = 10  # of a Redis that is nearly full: upkeep looks as often
LONG_BYTES = 256 << 10
UNSUBMITTED_TTL_S = 600  # of images whose gateway dies before it has submitted their requests
SUBMIT, KEEP_IMAGES = load_script("submit"), load_script("keep_images")


class Admission:
    def __init__(
        self,
        stage: Stage,
        client: "redis.asyncio.Redis",
        settings: RequestSettings,
        memory: RedisMemory | None = None,
        on_refused: Callable[[str, str], None] | None = None,
        known: KnownReplicas | None = None,
        shared: SharedLimits | None = None,
        mark: str = "",
    ) -> None:
        """memory: Redis' memory, if the process watches it (workers of batches stop earlier, in another
        way). on_refused: called with the model and the reason. known: also models without replicas,
        if requests may wait for one. shared: the limits of all cells, if there are several; mark:
        this cell's, unless it is home."""
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
        """The model that the tenant calls by this name.

        Raises Rejected (503) while one of its stages is missing and can't be waited for, Invalid
        (404) if no replica serves it, or the tenant may not use it.
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
        return Rejected(
            f"not ready: no {' and no '.join(stages)} is alive{suffix}", status=503, retry_after_s=RETRY_AFTER_S
        )

    async def submit(
        self,
        caller: Caller,
        response_id: str,
        record: bytes,
        model: str,
        submitted: list[GenerateRequest],
        stored: bytes = b"",
        keeps: int = 0,
        images: Mapping[str, bytes] | None = None,
    ) -> None:
        """Hand the requests of a response over, with its record and the data to be stored, all or
        none, and charge the caller for them.

        images: files by digest, kept until the response ends. keeps: most bytes that stay stored if
        the response is refused. Raises Rejected (429; 503 while Redis is nearly full) if they do not
        fit, Invalid if they never will, and what the client raises.
        """
        self.check_memory(model)
        outputs = [estimate_output(request, self.registry) for request in submitted]
        tokens = [estimate_prompt(request) + output for request, output in zip(submitted, outputs, strict=True)]
        limits = self.settings.max_requests, self.settings.max_tokens_in_flight
        # before anything is encoded: n may be many times a long prompt
        if len(submitted) > limits[0] or sum(tokens) > limits[1]:
            raise self._full(model, 0, 0, len(submitted), sum(tokens))
        messages, size, most = (
            list[bytes](),
            len(stored) + sum(map(len, (images or {}).values())),
            self.settings.max_held_size,
        )
        for request in submitted:
            messages.append(message := encode(request))
            size += len(message)
            check_size(size, most)
            if len(message) > LONG_BYTES:
                await asyncio.sleep(0)  # n choices of a long prompt: other requests have their turn in between
        charge = caller.charge(sum(tokens), sum(outputs), len(submitted))
        request_ids = [request.request_id for request in submitted]
        asked = table(
            stream=requests(model).key,
            gateway=self.stage.replica_id,
            ttl=RUNNING_LOG_TTL_S,
            max_requests=limits[0],
            max_tokens=limits[1],
            tokens=sum(tokens),
            charge=asdict(charge) if charge is not None and not self._is_charged_ahead(caller) else None,
            max_size=most,
            size=size,
            keeps=keeps,
            requests=list(zip(request_ids, tokens, strict=True)),
        )
        keys = [
            inflight_key(model),
            response_key(response_id),
            stored_key(response_id),
            open_key(response_id),
            shares_key(model),
            images_key(response_id),
            *caller.keys,
            held_key(caller.tenant.tenant_id),
            log_key(request_ids[0]),
        ]
        if images:
            await self._keep(images_key(response_id), images)

        def submit() -> Awaitable[Any]:
            return SUBMIT.run(self.client, keys, asked, record, stored, *messages)

        left, *exceeded = await self._hand_over(caller, model, charge, request_ids, submit)
        if not exceeded:
            return caller.admitted(left)
        if images:
            await self.client.unlink(images_key(response_id))
        kind, *rest = exceeded[0]
        if kind == b"full":
            raise self._full(model, rest[0], rest[1], len(submitted), sum(tokens))
        refusal = (
            too_much_held(rest[0], size, most, rest[1])
            if kind == b"held"
            else caller.refused(kind.decode(), rest[0], left)
        )
        self._count_refused(model, refusal.code)
        raise refusal

    async def _hand_over(
        self,
        caller: Caller,
        model: str,
        charge: Charge | None,
        request_ids: list[str],
        submit: Callable[[], Awaitable[Any]],
    ) -> Any:
        """Return what `submit`, the script, returns. Limits that are kept in another cell are charged
        before. Raises Rejected (429) for these."""
        if self.shared is None or charge is None or not self._is_charged_ahead(caller):
            reply = await submit()
            is_crowded = len(reply) > 1 and reply[1][0] == b"concurrency"
            if is_crowded and self.shared is not None and await self.shared.drop_ended(caller):
                reply = await submit()
            return reply
        try:
            left = await self.shared.charge(caller, self.mark, model, charge, request_ids)
        except Rejected as error:
            self._count_refused(model, error.code)
            raise
        try:
            _, *exceeded = await submit()
        except BaseException:  # the caller has it cancelled then
            await self.shared.give_back(caller, charge, request_ids)
            raise
        if exceeded:
            await self.shared.give_back(caller, charge, request_ids)
        else:
            await self.shared.confirm(caller, self.mark, model, request_ids)
        return [left, *exceeded]

    def _is_charged_ahead(self, caller: Caller) -> bool:
        """Whether the caller's limits are in another cell's Redis."""
        return bool(self.mark) and caller.tenant.has_limits

    async def _keep(self, key: str, images: Mapping[str, bytes]) -> None:
        """Put the files where compute finds them. If their response is not submitted, they expire."""
        digests_and_files = [part for item in images.items() for part in item]
        await KEEP_IMAGES.run(self.client, [key], UNSUBMITTED_TTL_S, *digests_and_files)

    def check_memory(self, model: str) -> None:
        """Raises Rejected (503) while Redis is nearly full: the requests that run need the room that is
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
        refusal = await caller.charge_work(home, 1)
        if refusal is not None:
            self._count_refused("", refusal.code)
            raise refusal
        caller.is_counted = True

    def _count_refused(self, model: str, reason: str) -> None:
        if self.on_refused is not None:
            self.on_refused(model, reason)

    def _full(self, model: str, num_requests: int, num_tokens: int, more_requests: int, more_tokens: int) -> Rejected:
        self._count_refused(model, "server_full")
        words = (
            f"{num_requests} requests of at most {self.settings.max_requests} and {num_tokens} tokens of at most "
            f"{self.settings.max_tokens_in_flight}"
        )
        message = f"the server is full: {words} are in it, and this would add {more_requests} and {more_tokens}"
        return Rejected(message, status=429, retry_after_s=RETRY_AFTER_S)


def unknown_model(name: str, known: Iterable[str]) -> Invalid:
    return Invalid(
        f"the model {name!r} does not exist; served: {', '.join(sorted(known))}",
        param="model",
        code="model_not_found",
        status=404,
    )


def names_of(replica: Replica) -> tuple[str, ...]:
    """The names that clients may call the replica's model by, its own first."""
    return () if replica.model is None else (replica.model, *replica.aliases)


def served_names(registry: Registry, tenant: Tenant) -> dict[str, Replica]:
    """Every name of every model that the tenant may use and any stage is there for, with a compute
    replica of it if one is alive.

    A model whose compute is away for a moment is listed: a request for it is told that it is not ready.
    """
    # the last one of a name stays: compute, the oldest
    replicas = sorted(registry.replicas, key=lambda each: (each.stage == "compute", -each.started_at))
    return {name: replica for replica in replicas for name in names_of(replica) if tenant.may_use(names_of(replica))}


def estimate_prompt(request: GenerateRequest) -> int:
    """Tokens of the prompt, by its length in bytes, for the gateway has no tokenizer."""
    ids = request.prompt_token_ids
    num_given = sum(len(part.token_ids) + part.max_tokens for module in request.modules for part in module.parts)
    num_given += IMAGE_TOKENS * sum(
        part.image is not None for message in request.messages or () for part in message.parts
    )
    return num_given + (len(ids) if ids is not None else sum(map(num_bytes, texts_of(request))) // BYTES_PER_TOKEN + 1)


def estimate_output(request: GenerateRequest, registry: Registry) -> int:
    """Tokens that it may generate: never more than the model's length, whatever it asks for."""
    if request.embedding is not None or request.task != "generate":
        return 0
    if request.params.max_tokens is None:
        return UNBOUNDED_TOKENS
    lengths = [
        replica.max_model_len for replica in registry.of("compute", request.model) if replica.max_model_len is not None
    ]
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
    """About the length in UTF-8: exact for ASCII, else estimated. Encoding would be repeated for each of
    n choices."""
    return len(text) if text.isascii() else 3 * len(text)


async def admit(
    admission: Admission, caller: Caller, record: ResponseRecord, requests: list[GenerateRequest], stored: bytes
) -> None:
    """Submit requests as their tenant's: they share cached prefixes with no other tenant's, and have his
    priority. There is no other way in.

    Raises Rejected (429), Invalid for what his limits never allow, Recoverable if Redis can't
    serve.
    """
    packed = replace(record, tenant_id=caller.tenant.tenant_id).pack()
    owned = (
        [structs.replace(each, scheduling=scheduling_of(caller.tenant, each.scheduling)) for each in requests]
        if caller.tenant.tenant_id
        else requests
    )
    with redis_errors_as_503():
        keeps = KEPT_BYTES if record.is_background else 0
        await admission.submit(
            caller, record.response_id, packed, record.served_model, owned, stored, keeps, record.images
        )
    record.images.clear()  # the record lives as long as its answer


def scheduling_of(tenant: Tenant, scheduling: SchedulingParams) -> SchedulingParams:
    """How the tenant's request is scheduled."""
    priority, salt = scheduling.priority + tenant.priority, tenant.salted(scheduling.cache_salt)
    return structs.replace(scheduling, priority=priority, cache_salt=salt, tenant_id=tenant.tenant_id)
