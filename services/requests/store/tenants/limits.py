"""A tenant's limits over all gateways: requests and tokens a minute, as buckets that fill evenly,
and requests that run at once.

They are checked by the script that hands a request over (admission.py), in the same round trip.
What runs is what was admitted and is still in flight by the pipeline's own books, so a killed
gateway's places come back when its requests end. They are counted again only where a limit seems to
be reached.
"""

import math
from dataclasses import dataclass, field

from services.requests.store.tenants.tenant import Tenant
from shared.process.errors import Invalid, Rejected
from shared.wire.streams import quota_key, running_key

BUCKET_TTL_S = 120  # of an unused one: it is full after a minute
UNLIMITED = -1
NUM_ARGUMENTS = 5  # of a script that admits: Caller.arguments

# For that script. The first function returns what will be left (requests, tokens, as of when), and,
# if a limit is exceeded, its kind and the ms until it is there. The second one takes what was
# asked.
SCRIPT = f"""
local function look_at_limits(quota, running, rpm, tpm, concurrency, requests, tokens, num_sequences)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local held = redis.call('HMGET', quota, 'requests', 'tokens', 'at')
  local minutes = math.max(now - (tonumber(held[3]) or now), 0) / 60000
  local function level(value, limit) return limit > 0 and math.min((tonumber(value) or limit) + minutes * limit, limit) or 0 end
  if (tonumber(held[3]) or now) > now then redis.call('HSET', quota, 'at', now) end  -- Redis' clock went back: from here it fills again
  local left = {{level(held[1], rpm), level(held[2], tpm), now}}
  if rpm > 0 and left[1] < requests then return left, {{'requests', math.ceil((requests - left[1]) / rpm * 60000)}} end
  if tpm > 0 and left[2] < tokens then return left, {{'tokens', math.ceil((tokens - left[2]) / tpm * 60000)}} end
  if concurrency > 0 and redis.call('HLEN', running) + num_sequences > concurrency then
    local fields = redis.call('HGETALL', running)
    for i = 1, #fields, 2 do
      local is_here = string.sub(fields[i + 1], 1, 1) ~= '@'  -- others are in another cell: shared_limits.py
      if is_here and redis.call('HEXISTS', fields[i + 1], fields[i]) == 0 then redis.call('HDEL', running, fields[i]) end
    end
    if redis.call('HLEN', running) + num_sequences > concurrency then return left, {{'concurrency', 1000}} end
  end
  left[1], left[2] = left[1] - requests, left[2] - tokens
  return left, nil
end
local function charge(quota, rpm, tpm, left)
  redis.call('HSET', quota, 'requests', rpm > 0 and left[1] or '', 'tokens', tpm > 0 and left[2] or '', 'at', left[3])
  redis.call('EXPIRE', quota, {BUCKET_TTL_S})
end
"""


# KEYS[1]: quota key. ARGV: requests a minute, tokens a minute. Charges one request, before work is done for
# it. Returns as the first function does
CHARGE_REQUEST = (
    SCRIPT
    + """
local quota, rpm, tpm = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local left, exceeded = look_at_limits(quota, '', rpm, tpm, 0, 1, 0, 0)
if exceeded then return {left, exceeded} end
charge(quota, rpm, tpm, left)
return {left}
"""
)


@dataclass(slots=True)
class Caller:
    """The sender of a request, and what it has been charged. Each client's request has one, though
    it may hand several over."""

    tenant: Tenant
    is_charged: bool = False
    is_counted: bool = False  # the request is charged, of its tokens nothing yet
    headers: dict[str, str] = field(default_factory=dict)  # what is left, for the client

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of what the tenant has been charged, and of what runs."""
        return quota_key(self.tenant.tenant_id), running_key(self.tenant.tenant_id)

    def arguments(self, num_tokens: int, num_output_tokens: int, num_sequences: int) -> list[str | int]:
        """The script's arguments: requests a minute, tokens a minute, requests at once (UNLIMITED:
        no limit), and how many requests and tokens to charge.

        The request and its prompt are charged once, with what is handed over first. Raises Invalid
        for what can never pass.
        """
        tenant = self.tenant
        if not tenant.has_limits:
            return [UNLIMITED, UNLIMITED, UNLIMITED, 0, 0]
        num_requests, num_charged = (0, num_output_tokens) if self.is_charged else (0 if self.is_counted else 1, num_tokens)
        if tenant.tokens_per_minute is not None and num_charged > tenant.tokens_per_minute:
            message = f"the request has {num_charged} tokens, prompt and output, and this key may use {tenant.tokens_per_minute} a minute: lower max_tokens"
            raise Invalid(message, param="max_tokens", code="request_exceeds_limit")
        if tenant.max_concurrency is not None and num_sequences > tenant.max_concurrency:
            message = f"the request makes {num_sequences} sequences, and this key may run {tenant.max_concurrency} at once: lower n, or send fewer prompts"
            raise Invalid(message, param="n", code="request_exceeds_limit")
        limits = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_concurrency)
        return [*(UNLIMITED if limit is None else limit for limit in limits), num_requests, num_charged]

    def refused(self, kind: str, wait_ms: int, left: list[int]) -> Rejected:
        """The error for the limit that is exceeded."""
        self.tell(left)
        limit, unit = {
            "requests": (self.tenant.requests_per_minute, "requests a minute"),
            "tokens": (self.tenant.tokens_per_minute, "tokens a minute"),
            "concurrency": (self.tenant.max_concurrency, "requests at once"),
        }[kind]
        retry_after_s = max(1, math.ceil(wait_ms / 1000))
        message = f"Rate limit reached: this key may make {limit} {unit}. Please try again in {retry_after_s}s."
        return Rejected(message, status=429, retry_after_s=retry_after_s, code="rate_limit_exceeded")

    def request_arguments(self) -> list[str | int]:
        """The arguments of CHARGE_REQUEST."""
        limits = (self.tenant.requests_per_minute, self.tenant.tokens_per_minute)
        return [*(UNLIMITED if limit is None else limit for limit in limits)]

    def counted(self, left: list[int]) -> None:
        """The request is charged. left: as the script returned it."""
        self.is_counted = True
        self.tell(left)

    def admitted(self, left: list[int]) -> None:
        """left: as the script returned it."""
        self.is_charged = True
        self.tell(left)

    def tell(self, left: list[int]) -> None:
        """Put what is left, as a script returned it, into OpenAI's headers."""
        limits = (self.tenant.requests_per_minute, self.tenant.tokens_per_minute)
        for unit, limit, rest in zip(("requests", "tokens"), limits, left, strict=False):  # beside them, when that was; without limits nothing
            if limit is not None:
                rest = max(rest, 0)
                self.headers |= {
                    f"x-ratelimit-limit-{unit}": str(limit),
                    f"x-ratelimit-remaining-{unit}": str(rest),
                    f"x-ratelimit-reset-{unit}": f"{(limit - rest) * 60 / limit:.3g}s",
                }
