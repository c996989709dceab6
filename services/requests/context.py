"""RequestContext: the objects that turn a body into requests, in the gateway and in the workers of
batches."""

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis
import redis.asyncio

from services.requests.store.admission.admission import Admission
from services.requests.store.tenants.limits import Caller
from services.requests.store.tenants.tenant import NOBODY, Tenant
from services.requests.workers.grammars.checker import GrammarChecker
from services.requests.workers.images.reader import ImageReader
from shared.process.settings import RequestSettings
from shared.wire.registry import Registry
from shared.wire.stage import Stage

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The objects that turn a body into requests, and who asks."""

    settings: RequestSettings
    stage: Stage
    client: "redis.asyncio.Redis"  # of the pipeline's Redis
    home: "redis.asyncio.Redis"  # of that of what belongs to no pipeline
    grammars: GrammarChecker
    images: ImageReader
    admission: Admission
    mark: str = ""  # that the ids of responses end with, where there are several cells
    caller: Caller = field(default_factory=lambda: Caller(NOBODY))  # a request's own: see context_of

    @property
    def tenant(self) -> Tenant:
        return self.caller.tenant

    @property
    def registry(self) -> Registry:
        """The replicas that requests are made for."""
        return self.admission.registry

    async def while_wanted(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. Subclasses cancel it when the client goes away."""
        return await work

    def resolve(self, name: str) -> str:
        """The served model that the caller calls so. Raises Rejected, Invalid."""
        return self.admission.resolve(name, self.tenant)
