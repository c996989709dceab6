"""Tenants and their rights: a tenant is all clients that use one API key. What it stores and
streams is its own, and so are the prefixes that it caches."""

from dataclasses import dataclass

MAX_PRIORITY = 100  # that a tenant may be ahead of others, or behind


@dataclass(frozen=True, slots=True)
class Tenant:
    """`tenant_id` owns what is kept; None among the limits: no such limit."""

    tenant_id: str  # made once, never used again; empty: there are no keys
    name: str
    # may read /metrics and whatever else shows what others do, and may end it
    is_admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output, estimated
    max_concurrency: int | None = None  # requests in the pipeline
    models: tuple[str, ...] | None = None  # that it may use, by any of their names; None: all
    priority: int = 0  # added to that of each request; smaller is sooner

    @property
    def has_limits(self) -> bool:
        return any(limit is not None for limit in (self.requests_per_minute, self.tokens_per_minute, self.max_concurrency))

    @property
    def sees_all(self) -> bool:
        """Whether other tenants' batches and responses are there for it. Where there are no keys,
        everybody administers, and sees what has no tenant."""
        return self.is_admin and bool(self.tenant_id)

    def sees(self, owner: str) -> bool:
        """Whether what belongs to that tenant is there for it."""
        return owner == self.tenant_id or self.sees_all

    def may_use(self, names: tuple[str, ...]) -> bool:
        """Whether it may use the model of these names."""
        return self.models is None or not set(self.models).isdisjoint(names)

    def salted(self, cache_salt: str) -> str:
        """The salt of a request's cached prefixes: how fast a prompt is must not tell a tenant what
        another has asked."""
        return f"{self.tenant_id}\0{cache_salt}" if self.tenant_id else cache_salt


EVERYBODY = Tenant("", "-", is_admin=True)  # where there are no keys
NOBODY = Tenant("nobody", "-", models=())  # a client without a key, where keys are required
