"""The bytes that a tenant's requests and stored responses hold in Redis: bounded over all gateways, so that
one tenant can't take all of its memory.

A request counts from its admission to its end, a stored response as long as it is stored. submit.lua
adds a response to its tenant's account, give_back.lua takes it out. What Redis has lost, or dropped
early, is looked for when there seems to be no room.
"""

import redis.asyncio

from shared.process.errors import Invalid, Rejected
from shared.process.host_memory import size_text
from shared.wire.script import load_script
from shared.wire.streams import held_key, stored_key

CODE = "storage_limit_exceeded"
# in Retry-After: other requests of the tenant may end long before its oldest response expires
MAX_WAIT_S = 60
DELETE_STORED, REWRITE_STORED = load_script("delete_stored"), load_script("rewrite_stored")


def check_size(size: int, most: int) -> None:
    """Raises Invalid for a request that never fits, whatever its tenant holds."""
    if size > most:
        raise Invalid(
            f"the request is more than the {size_text(most)} that are kept for a key: lower n, or send less",
            code="request_exceeds_limit",
        )


def too_much_held(held: int, more: int, most: int, wait_s: int) -> Rejected:
    """The refusal of a request of `more` bytes by a tenant that holds `held`."""
    message = (
        f"this key's requests and stored responses hold {size_text(held)}, and {size_text(most)} at most are kept: "
        f"this request would add {size_text(more)}. "
        f"Delete stored responses, send store: false, or come again: the oldest expires in {wait_s} s"
    )
    return Rejected(message, status=429, retry_after_s=min(wait_s, MAX_WAIT_S), code=CODE)


def queue_delete(pipe: "redis.asyncio.client.Pipeline", tenant_id: str, response_id: str) -> None:
    """Queue the deletion of the stored data of a response that has ended."""
    DELETE_STORED.call(pipe, [held_key(tenant_id), stored_key(response_id)], response_id)


def queue_rewrite(
    pipe: "redis.asyncio.client.Pipeline", tenant_id: str, response_id: str, size: int, content: bytes, needed: str = ""
) -> None:
    """Queue new stored data for a response that has ended, if the old has not changed since it was read.
    size: of the old data, in bytes. needed: a response that must be stored, too; empty: none."""
    keys = [held_key(tenant_id), stored_key(response_id), *([stored_key(needed)] if needed else [])]
    REWRITE_STORED.call(pipe, keys, response_id, size, content)
