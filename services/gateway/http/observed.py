"""Observes each HTTP request: its status, counted, and the span that its trace begins
with. Plain ASGI, as middleware.py."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.traces import rooted, trace_headers
from services.requests.errors import CLIENT_CLOSED
from shared.process.tracing import Tracer

TRACED_GETS = ("/v1/streams/", "/v1/responses/")  # those that may stream; of the others only what is POSTed is traced
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")


class Observed:
    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: Tracer | None) -> None:
        self.app = app
        self.metrics = metrics
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = CLIENT_CLOSED  # unless an answer begins

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        try:
            if self.tracer is None or not (method == "POST" or scope["path"].startswith(TRACED_GETS)):
                return await self.app(scope, receive, send_observed)
            with rooted(self.tracer, method, trace_headers(Headers(scope=scope)), {"http.request.method": method}) as span:
                try:
                    await self.app(scope, receive, send_observed)
                finally:
                    span.update_name(f"{method} {route_of(scope)}")
                    span.set_attributes({"http.route": route_of(scope), "http.response.status_code": status})
        finally:
            self.metrics.http_requests.labels(method, route_of(scope), str(status)).inc()


def route_of(scope: Scope) -> str:
    """The path as the application declares it, so that there are as many as routes."""
    return str(getattr(scope.get("route"), "path", "other"))
