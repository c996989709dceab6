"""Tenants and their rights: a tenant is all users of one API key. Its stored data and its streams are
its own, and so are the prefixes that it caches."""

from dataclasses import dataclass

MAX_PRIORITY = 100  # how far a tenant may be ahead of others, or behind


@dataclass(frozen=True, slots=True)
class Tenant:
    """`tenant_id` owns what is stored. A limit of None is no limit."""

    tenant_id: str  # made once, never used again; empty: there are no keys
    name: str
    # may read /metrics and other tenants' data, and end their requests
    is_admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output, estimated
    max_concurrency: int | None = None  # requests in the pipeline
    models: tuple[str, ...] | None = None  # that it may use, by any of their names; None: all
    priority: int = 0  # added to that of each request; smaller is sooner

    @property
    def limits(self) -> tuple[int | None, int | None, int | None]:
        return self.requests_per_minute, self.tokens_per_minute, self.max_concurrency

    @property
    def has_limits(self) -> bool:
        return any(limit is not None for limit in self.limits)

    @property
    def sees_all(self) -> bool:
        """Whether it may read other tenants' batches and responses. Without keys every client is an
        administrator, and reads what has no tenant."""
        return self.is_admin and bool(self.tenant_id)

    def sees(self, owner: str) -> bool:
        """Whether it may read what belongs to that tenant."""
        return owner == self.tenant_id or self.sees_all

    def may_use(self, names: tuple[str, ...]) -> bool:
        """Whether it may use the model with these names."""
        return self.models is None or not set(self.models).isdisjoint(names)

    def salted(self, cache_salt: str) -> str:
        """The salt of a request's cached prefixes: the time that a prompt takes must not tell a tenant
        what another has asked."""
        return f"{self.tenant_id}\0{cache_salt}" if self.tenant_id else cache_salt


EVERYBODY = Tenant("", "-", is_admin=True)  # without keys
NOBODY = Tenant("nobody", "-", models=())  # the client has sent no key, though keys are required
