"""Context: the objects that a gateway's routes work with, built once at the start; and who asks, of
each request its own.

Making requests of bodies takes a part of them, which the workers of batches have, too.
"""

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request

from services.gateway.cells import Cells
from services.gateway.generation.generation import Pipeline
from services.gateway.generation.places import Reading
from services.gateway.http.auth import KeyRing
from services.gateway.http.bodies import BodyReader
from services.gateway.http.disconnect import unless_gone
from services.gateway.telemetry.metrics import Metrics
from services.requests.bodies.body import Body
from services.requests.dialects.responses.conversation import ConversationContext
from services.requests.store.admission.admission import served_names
from services.requests.store.batches.jobs import Jobs
from services.requests.store.batches.store import BatchStore
from services.requests.store.files.store import FileStore
from services.requests.store.record import ResponseRecord
from services.requests.store.tenants.limits import Caller
from services.requests.store.tenants.tenant import Tenant
from shared.process.errors import Invalid
from shared.process.settings import GatewaySettings
from shared.process.telemetry import get_logger
from shared.wire.replica import Replica

T = TypeVar("T")
B = TypeVar("B", bound=Body)

log = get_logger("penstock.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext(ConversationContext):
    settings: GatewaySettings
    bodies: BodyReader
    pipeline: Pipeline
    metrics: Metrics
    keys: KeyRing
    files: FileStore
    batches: BatchStore
    reading: Reading
    jobs: Jobs
    cells: "Cells[GatewayContext]"
    cell: str  # its name
    request: Request | None = None  # a request's own: see context_of

    async def while_wanted(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises ClientDisconnect, having cancelled the work, if the client goes away."""
        return await (work if self.request is None else unless_gone(self.request, work))

    def served_names(self) -> dict[str, Replica]:
        """Every name that the caller may use, in any cell, and a replica of its model: compute's, if
        one is alive or can be waited for."""
        replicas: dict[str, Replica] = {}
        for context in self.cells.contexts:
            for name, replica in served_names(context.registry, self.tenant).items():
                if name not in replicas or replicas[name].stage != "compute":
                    replicas[name] = replica
        return replicas

    async def read(self, request: Request, kind: type[B] | Mapping[str, type[B]]) -> "tuple[GatewayContext, B]":
        """The request's body, and the context of the cell that is to answer it. It names a model: the
        only one, if the client left it out. Raises Invalid, Rejected."""
        body = await self.bodies.read(request, kind)
        if getattr(body, "model", None) == "" and not getattr(body, "name", ""):
            body = body.model_copy(update={"model": self.only_model()})
        return self.within(self.cells.choose(body, self.tenant)), body

    def within(self, cell: "GatewayContext") -> "GatewayContext":
        """The cell's context, of this request."""
        return self if cell.mark == self.mark else replace(cell, caller=self.caller, request=self.request)

    @property
    def everywhere(self) -> "list[GatewayContext]":
        """The contexts of all cells, of this request."""
        return [self.within(cell) for cell in self.cells.contexts]

    def serving(self, model: str) -> "GatewayContext":
        """The context of a cell that serves the caller's model; home, if none does."""
        return next((each for each in self.everywhere if model in served_names(each.registry, self.tenant)), self)

    def only_model(self) -> str:
        """The name of the model that is served, if it is one. Raises Invalid, Rejected (503) while
        there is none."""
        names = {replica.model: None for replica in self.served_names().values() if replica.model is not None}
        if len(names) > 1:
            reason = f"missing required parameter: model; several are served, name one: {', '.join(sorted(names))}"
            raise Invalid(reason, param="model", code="missing_required_parameter")
        return next(iter(names), None) or self.resolve("")

    def named(self, model: str | None) -> "tuple[GatewayContext, str]":
        """The context of a cell that serves the model (None: the only one), and its own name. Raises
        as `only_model`."""
        name = model or self.only_model()
        context = self.serving(name)
        return context, context.resolve(name)

    def served(self, name: str) -> Replica:
        """A compute replica of the model that the caller calls so, live or to be waited for. Raises
        Rejected (503) while it has none, Invalid (404)."""
        replica = self.served_names().get(name)
        if replica is not None and replica.stage == "compute":
            return replica
        context = self.serving(name)
        return context.registry.of("compute", context.resolve(name))[0]

    def log_submitted(self, record: ResponseRecord, user: str | None, request_id: str) -> None:
        log.info(
            "request submitted",
            response_id=record.response_id,
            kind=record.kind,
            num_sequences=record.num_prompts * record.n,
            x_request_id=request_id,
            user=(user or "-")[:128],
            tenant=self.tenant.name,
        )


def context_of(request: Request) -> GatewayContext:
    """The gateway's objects, for this request's caller: of the cell of the response that the path
    names, else home's."""
    cells: Cells[GatewayContext] = request.app.state.cells
    return replace(cells.of(request.path_params.get("response_id", "")), caller=request.state.caller, request=request)


def tenant_of(request: Request) -> Tenant:
    """The tenant that sent this request."""
    caller: Caller = request.state.caller
    return caller.tenant
