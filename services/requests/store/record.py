"""A response before and in addition to its events: its record in Redis, and the seeds of its
choices."""

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
from msgspec import structs

from services.requests.store.tenants.tenant import Tenant
from shared.model.parsing.answer import Parsing
from shared.model.sampling_params import SEEDS, SamplingParams
from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.messages import decode_record
from shared.wire.streams import response_key

if TYPE_CHECKING:  # the helper that parses bodies needs no Redis, and each gateway starts it
    import redis.asyncio

log = get_logger("penstock.gateway")

R = TypeVar("R")

PREFIXES = {  # of the ids, by kind
    "chat.completion": "chatcmpl-",
    "text_completion": "cmpl-",
    "embedding": "embd-",
    "score": "score-",
    "rerank": "rerank-",
    "pooling": "pool-",
    "classification": "classify-",
    "response": "resp_",
    "message": "msg_",
    "ollama": "ollama-",
    "llama": "llama-",
    "internal": "internal-",  # what the gateway asks for itself
}
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the choices' seeds


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """The facts that any gateway needs to stream a response again."""

    response_id: str
    kind: str  # of PREFIXES
    model: str  # as the client called it
    created: int
    num_prompts: int
    n: int
    has_usage: bool  # stream_options.include_usage
    served_model: str  # the model's own name, which is part of streams' and keys' names
    num_echo_logprobs: int | None = None  # of each token that `echo` repeats; None: not asked
    num_prompt_logprobs: int | None = None  # prompt_logprobs, as the client asked
    parsing: Parsing | None = None  # None: what the model writes is the answer
    has_reasoning: bool = True  # include_reasoning
    has_continuous_usage: bool = False  # stream_options.continuous_usage_stats
    fingerprint: str = ""  # system_fingerprint
    num_best: int | None = None  # of each prompt's n sequences so many are answers, the likeliest; None: all
    hides_logprobs: bool = False  # they are there to choose the best by
    has_token_ids: bool = False  # return_token_ids
    names_tokens_by_id: bool = False  # return_tokens_as_token_ids
    is_background: bool = False  # no client's leaving cancels it; its readers follow the log
    tenant_id: str = ""  # of its owner
    traceparent: str = ""  # of its trace; empty: it has none
    resume_within_s: float = 0.0  # stream_options.resume_within_s: its client's leaving cancels it only then
    echoed: str = ""  # what a chat's answer begins with: its last message, which it goes on with
    # as of schemas.prepare.Enforceable: what the answer is held against at its end
    checks: Sequence[Sequence[str]] = ()
    # files of images, by digest: here until it is submitted, and in no record
    images: dict[str, bytes] = field(default_factory=dict)

    @property
    def request_ids(self) -> list[str]:
        return [f"{self.response_id}.{index}" for index in range(self.num_prompts * self.n)]

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(asdict(replace(self, images={})))
        return packed


def read_record(record_type: type[R], key: str, packed: bytes | None) -> R | None:
    """The record under a key of Redis. None where there is none, and, with a line in the log, for
    what is not such a record."""
    if packed is None:
        return None
    try:
        return decode_record(record_type, packed)
    except Invalid as error:
        log.error("a record in Redis can't be read", key=key, error=error)
        return None


def read_response(response_id: str, packed: bytes | None) -> ResponseRecord | None:
    """Read a response's record. A record that says another id than its key counts as none."""
    record = read_record(ResponseRecord, response_key(response_id), packed)
    return record if record is not None and record.response_id == response_id else None


def make_record(
    kind: str,
    model: str,
    served_model: str,
    *,
    num_prompts: int = 1,
    n: int = 1,
    has_usage: bool = False,
    key: str = "",
    mark: str = "",
    **others: Any,
) -> ResponseRecord:
    """The record of a new response; others: its further fields."""
    return ResponseRecord(
        new_id(kind, key, mark), kind, model, int(time.time()), num_prompts, n, has_usage, served_model, **others
    )


def new_id(kind: str, key: str = "", mark: str = "") -> str:
    """A response's id. key: its end; by default random digits, of which the last are the mark."""
    return PREFIXES[kind] + (key or uuid.uuid4().hex[len(mark) :] + mark)


def choice_params(params: SamplingParams, seed: int | None, choice: int) -> SamplingParams:
    """The params of one of n choices: its own seed, a function of the request's."""
    base = int.from_bytes(os.urandom(8)) if seed is None else seed
    return structs.replace(params, seed=(base + choice * GOLDEN) % SEEDS)


async def find_record(
    client: "redis.asyncio.Redis", tenant: Tenant, response_id: str, *, of_all: bool = False
) -> ResponseRecord | None:
    """Find the record of this tenant's response; of_all: of any that it may see, as an
    administrator does. None: there is none. Raises what the client raises."""
    packed: Any = await client.get(response_key(response_id))
    record = read_response(response_id, packed)
    if record is None or not (tenant.sees(record.tenant_id) if of_all else record.tenant_id == tenant.tenant_id):
        return None
    return record
