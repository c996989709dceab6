"""Context: the objects that a gateway's routes work with, built once at the start; and who asks, of
each request its own.

Making requests of bodies takes a part of them, which the workers of batches have, too.
"""

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request

from services.gateway.generation.generation import Pipeline
from services.gateway.generation.places import Reading
from services.gateway.http.auth import KeyRing
from services.gateway.http.bodies import BodyReader
from services.gateway.http.disconnect import unless_gone
from services.gateway.telemetry.metrics import Metrics
from services.requests.admission.admission import served_names
from services.requests.batches.jobs import Jobs
from services.requests.batches.store import BatchStore
from services.requests.bodies.body import Body
from services.requests.files.store import FileStore
from services.requests.record import ResponseRecord
from services.requests.responses.conversation import ConversationContext
from services.requests.tenants.limits import Caller
from services.requests.tenants.tenant import Tenant
from shared.process.errors import Invalid
from shared.process.settings import GatewaySettings
from shared.process.telemetry import get_logger
from shared.wire.replica import Replica

T = TypeVar("T")
B = TypeVar("B", bound=Body)

log = get_logger("penstock.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(ConversationContext):
    settings: GatewaySettings
    bodies: BodyReader
    pipeline: Pipeline
    metrics: Metrics
    keys: KeyRing
    files: FileStore
    batches: BatchStore
    reading: Reading
    jobs: Jobs
    request: Request | None = None  # a request's own: see context_of

    async def while_wanted(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises ClientDisconnect, having cancelled the work, if the client goes away."""
        return await (work if self.request is None else unless_gone(self.request, work))

    def served_names(self) -> dict[str, Replica]:
        """Every name that the caller may use, and a replica of its model: compute's, if one is
        alive or can be waited for."""
        return served_names(self.registry, self.tenant)

    async def read(self, request: Request, kind: type[B] | Mapping[str, type[B]]) -> B:
        """The request's body, which names a model: the only one, if the client left it out. Raises Invalid, Rejected."""
        body = await self.bodies.read(request, kind)
        if getattr(body, "model", None) == "" and not getattr(body, "name", ""):
            return body.model_copy(update={"model": self.only_model()})
        return body

    def only_model(self) -> str:
        """The name of the model that is served, if it is one. Raises Invalid, Rejected (503) while
        there is none."""
        names = {replica.model: None for replica in self.served_names().values() if replica.model is not None}
        if len(names) > 1:
            reason = f"missing required parameter: model; several are served, name one: {', '.join(sorted(names))}"
            raise Invalid(reason, param="model", code="missing_required_parameter")
        return next(iter(names), None) or self.resolve("")

    def served(self, name: str) -> Replica:
        """A compute replica of the model that the caller calls so, live or to be waited for. Raises
        Rejected (503) while it has none, Invalid (404)."""
        replica = self.served_names().get(name)
        return replica if replica is not None and replica.stage == "compute" else self.registry.of("compute", self.resolve(name))[0]

    def log_submitted(self, record: ResponseRecord, user: str | None, request_id: str) -> None:
        log.info(
            "request submitted", response_id=record.response_id, kind=record.kind, num_sequences=record.num_prompts * record.n,
            x_request_id=request_id, user=(user or "-")[:128], tenant=self.tenant.name,
        )  # fmt: skip


def context_of(request: Request) -> Context:
    """The gateway's objects, for this request's caller."""
    context: Context = request.app.state.context
    return replace(context, caller=request.state.caller, request=request)


def tenant_of(request: Request) -> Tenant:
    """The tenant that sent this request."""
    caller: Caller = request.state.caller
    return caller.tenant
