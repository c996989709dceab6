"""A tenant's limits over all gateways: requests and tokens a minute, as buckets that fill evenly,
and requests that run at once.

submit.lua checks them when it hands a request over, in the same round trip. A request runs from its
admission until it is no longer in flight, so a killed gateway's places are free when its requests end.
The running requests are counted again only if a limit seems to be reached.
"""

import math
from dataclasses import asdict, dataclass, field

import redis.asyncio

from services.requests.store.tenants.tenant import Tenant
from shared.process.errors import Invalid, Rejected
from shared.wire.script import load_script, table
from shared.wire.streams import quota_key, running_key

CHARGE = load_script("charge")


@dataclass(frozen=True, slots=True)
class Charge:
    """A tenant's limits (None: no such limit), and what a request of his is charged. limits.lua knows it as a table."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrency: int | None
    requests: float
    tokens: int


@dataclass(slots=True)
class Caller:
    """The sender of a request, and what it has been charged. Each client's request has one, even if it
    hands several requests over."""

    tenant: Tenant
    is_charged: bool = False
    is_counted: bool = False  # the request is charged, its tokens are not yet
    headers: dict[str, str] = field(default_factory=dict)  # what is left, for the client

    @property
    def keys(self) -> tuple[str, str]:
        """The tenant's quota and his running requests, as charge.lua takes them."""
        return quota_key(self.tenant.tenant_id), running_key(self.tenant.tenant_id)

    def charge(self, num_tokens: int, num_output_tokens: int, num_sequences: int) -> Charge | None:
        """The charge for requests that are handed over; None: the tenant has no limits.

        The request and its prompt are charged once, with what is handed over first. Raises Invalid
        for what can never pass.
        """
        tenant = self.tenant
        if not tenant.has_limits:
            return None
        num_requests, num_charged = (
            (0, num_output_tokens) if self.is_charged else (0 if self.is_counted else 1, num_tokens)
        )
        if tenant.tokens_per_minute is not None and num_charged > tenant.tokens_per_minute:
            message = (
                f"the request has {num_charged} tokens, prompt and output, and this key may use "
                f"{tenant.tokens_per_minute} a minute: lower max_tokens"
            )
            raise Invalid(message, param="max_tokens", code="request_exceeds_limit")
        if tenant.max_concurrency is not None and num_sequences > tenant.max_concurrency:
            message = (
                f"the request makes {num_sequences} sequences, and this key may run {tenant.max_concurrency} at "
                "once: lower n, or send fewer prompts"
            )
            raise Invalid(message, param="n", code="request_exceeds_limit")
        return Charge(*tenant.limits, num_requests, num_charged)

    async def charge_work(self, client: "redis.asyncio.Redis", num_requests: float) -> Rejected | None:
        """Charge work that hands nothing over, in requests. Returns the refusal if a limit is
        exceeded. Raises what the client raises."""
        charge = Charge(self.tenant.requests_per_minute, self.tenant.tokens_per_minute, None, num_requests, 0)
        left, *exceeded = await CHARGE.run(client, self.keys, table(charge=asdict(charge), requests=[]))
        if exceeded:
            kind, wait_ms = exceeded[0]
            return self.refused(kind.decode(), wait_ms, left)
        self.tell(left)
        return None

    def refused(self, kind: str, wait_ms: int, left: list[int]) -> Rejected:
        """The error for the limit that is exceeded."""
        self.tell(left)
        place = ("requests", "tokens", "concurrency").index(kind)
        limit, unit = self.tenant.limits[place], ("requests a minute", "tokens a minute", "requests at once")[place]
        retry_after_s = max(1, math.ceil(wait_ms / 1000))
        message = f"Rate limit reached: this key may make {limit} {unit}. Please try again in {retry_after_s}s."
        return Rejected(message, status=429, retry_after_s=retry_after_s, code="rate_limit_exceeded")

    def admitted(self, left: list[int]) -> None:
        """The request is charged, with its tokens. left: as the script returned it."""
        self.is_charged = True
        self.tell(left)

    def tell(self, left: list[int]) -> None:
        """Put what is left into OpenAI's headers. left: as the script returned it, with its time; empty
        without limits."""
        for unit, limit, rest in zip(("requests", "tokens"), self.tenant.limits, left, strict=False):
            if limit is not None:
                rest = max(rest, 0)
                self.headers |= {
                    f"x-ratelimit-limit-{unit}": str(limit),
                    f"x-ratelimit-remaining-{unit}": str(rest),
                    f"x-ratelimit-reset-{unit}": f"{(limit - rest) * 60 / limit:.3g}s",
                }
