"""An OpenTelemetry collector for tests: OTLP over HTTP, as protobuf, kept in memory, and printed as
the tree that a trace is.
"""

import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """Times are wall clock, s."""

    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    name: str
    service: str
    replica_id: str
    started_at: float
    ended_at: float
    said: dict[str, Any]
    links: tuple[str, ...]  # ids of other traces


@dataclass
class Collector:
    """Listens on a free loopback port from `start` to `stop`."""

    spans: list[Span] = field(default_factory=list)

    def start(self) -> "Collector":
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.spans += list(
                    spans_of(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                )
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Nothing: a test's output is its own."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Makes processes send their spans here, at once."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def of(self, trace_id: str) -> list[Span]:
        """The trace's spans, by their beginnings."""
        return sorted(
            (span for span in list(self.spans) if span.trace_id == trace_id), key=lambda span: span.started_at
        )

    def tree(self, trace_id: str) -> str:
        spans = self.of(trace_id)
        known, begin = {span.span_id for span in spans}, spans[0].started_at

        def lines(parent: str, depth: int) -> Iterator[str]:
            for span in spans:
                if span.parent_id == parent or (not depth and span.parent_id not in known):
                    said = " ".join(
                        f"{key.removeprefix('penstock.')}={value}"
                        for key, value in span.said.items()
                        if not key.endswith("request_id")
                    )
                    times = (
                        f"{1000 * (span.started_at - begin):8.1f} +{1000 * (span.ended_at - span.started_at):8.1f} ms"
                    )
                    yield f"{times}  {'  ' * depth}{span.name} [{span.replica_id}] {said}"
                    yield from lines(span.span_id, depth + 1)

        return "\n".join(lines("", 0))


def spans_of(body: bytes) -> Iterator[Span]:
    request = ExportTraceServiceRequest.FromString(body)
    for group in request.resource_spans:
        resource = {each.key: each.value.string_value for each in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                said = {
                    each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
                    for each in span.attributes
                }
                yield Span(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    resource["service.name"],
                    resource["service.instance.id"],
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    said,
                    tuple(each.trace_id.hex() for each in span.links),
                )
