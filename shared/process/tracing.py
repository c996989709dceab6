"""Traces, by OpenTelemetry: what each stage did for a request, sent by OTLP over HTTP where the
standard variables name an endpoint.

Without one nothing of OpenTelemetry is imported, and a stage's `tracer` is None. A request carries
the trace that it belongs to through every stage, as a W3C `traceparent`: its messages outlive their
replicas, so a replica that takes over a dead one's work continues the same trace. Spans are recorded
when they have ended, from times that the stages keep; a killed replica loses those that it has not
sent.
"""

import atexit
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from shared.process.errors import StartupError
from shared.process.telemetry import get_logger

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
CLOSE_TIMEOUT_S = 3.0  # for the last spans, at the end of a process
COMPLAIN_EVERY_S = 60.0
MAX_COMPLAINTS, MAX_COMPLAINT = 100, 300  # kinds that are remembered; characters of one

log = get_logger("penstock.tracing")

Attributes = Mapping[str, str | int | float | bool]


def first_of(names: tuple[str, ...]) -> str:
    """The first of these variables that is set and not empty, as OpenTelemetry reads them; empty:
    none."""
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


def open_tracer(stage: str, replica_id: str) -> "Tracer | None":
    """The tracer that sends the replica's spans; None if no endpoint is set. Raises
    StartupError."""
    endpoint = first_of(ENDPOINTS)
    is_disabled = (
        os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or os.environ.get("OTEL_TRACES_EXPORTER", "").lower() == "none"
    )
    if not endpoint or is_disabled:
        return None
    if re.match(r"https?://[^/\s]", endpoint) is None:
        raise StartupError(f"{ENDPOINTS[1]}: expected a URL as http://127.0.0.1:4318, got {endpoint!r}")
    if (protocol := first_of(PROTOCOLS) or PROTOCOL) != PROTOCOL:
        raise StartupError(f"{PROTOCOLS[1]}: only {PROTOCOL} is spoken (a collector's port 4318), got {protocol!r}")
    try:
        return Tracer(stage, replica_id)
    except ImportError as error:
        raise StartupError(
            f"{ENDPOINTS[1]} is set, and {error.name} is not installed: pip install 'penstock[tracing]', or unset it"
        ) from None


class Complaints(logging.Handler):
    """Messages of OpenTelemetry's own loggers, as events of ours: each kind once a minute. OpenTelemetry
    logs one for every span that it drops."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logged_at: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        kind, now = (record.name, str(record.msg)), time.monotonic()
        if kind in self._logged_at and now < self._logged_at[kind] + COMPLAIN_EVERY_S:
            return
        if len(self._logged_at) >= MAX_COMPLAINTS:
            self._logged_at.clear()
        self._logged_at[kind] = now
        log.warning(
            "trouble with spans",
            said=record.getMessage()[:MAX_COMPLAINT],
            error=record.exc_info[1] if record.exc_info else None,
        )


def hear_complaints() -> None:
    """Send OpenTelemetry's warnings to our log."""
    logger = logging.getLogger("opentelemetry")
    if not logger.handlers:
        logger.addHandler(Complaints())
    logger.propagate = False
    # warnings about clients' headers do not belong in our log
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)


class Tracer:
    """Owns OpenTelemetry's provider, and its thread that sends spans in batches. Spans beyond its
    bound are dropped: no stage waits for a collector."""

    def __init__(self, stage: str, replica_id: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        hear_complaints()
        own = {
            "service.namespace": "penstock",
            "service.instance.id": replica_id,
            "service.version": version("penstock"),
        }
        resource = Resource.create(own)
        # OpenTelemetry's variables name no service
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": f"penstock-{stage}"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter())
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("penstock", version("penstock"))
        self._scope = InstrumentationScope("penstock", version("penstock"))
        self._propagator = TraceContextTextMapPropagator()
        self._closing, self._closed = threading.Event(), threading.Event()
        # at exit no thread can begin, and none may wait for ever
        threading.Thread(target=self._close, name="tracer-close", daemon=True).start()
        atexit.register(self._at_exit)

    def start(self, name: str, headers: Mapping[str, str], started_at: float, attributes: Attributes) -> "Span":
        """A server's span that has just begun, in the trace that a client's headers name, or in one
        of its own."""
        from opentelemetry.trace import SpanKind

        context, begin = self._propagator.extract(headers), int(started_at * 1e9)
        return self._tracer.start_span(
            name, context=context, kind=SpanKind.SERVER, start_time=begin, attributes=dict(attributes)
        )

    def record(self, name: str, parent: str, started_at: float, ended_at: float, attributes: Attributes) -> str:
        """A span that has ended. parent: a traceparent; times: wall clock, s. Returns the span's
        own traceparent, for its children."""
        begin = int(started_at * 1e9)
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract({"traceparent": parent}),
            start_time=begin,
            attributes=dict(attributes),
        )
        span.end(max(begin, int(ended_at * 1e9)))
        return self.traceparent(span)

    def trace_of(self, key: str) -> str:
        """The traceparent of a root whose ids are a function of the key, 32 hexadecimal digits that
        are evenly distributed; empty: it is not sampled."""
        from opentelemetry.sdk.trace.sampling import Decision

        is_sampled = (
            self._provider.sampler.should_sample(None, int(key, 16), key).decision is Decision.RECORD_AND_SAMPLE
        )
        return f"00-{key}-{key[:16]}-01" if is_sampled else ""

    def record_root(
        self, name: str, traceparent: str, started_at: float, ended_at: float, attributes: Attributes, *, link: str
    ) -> None:
        """The root of `trace_of`, which has ended; link: the traceparent of what it was done for.
        Each recorder makes the same span."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Link, SpanKind

        begin = int(started_at * 1e9)
        span = ReadableSpan(
            name,
            self._context_of(traceparent),
            resource=self._provider.resource,
            attributes=dict(attributes),
            links=[Link(self._context_of(link))],
            kind=SpanKind.CONSUMER,
            start_time=begin,
            end_time=max(begin, int(ended_at * 1e9)),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    def _context_of(self, traceparent: str) -> "SpanContext":
        from opentelemetry.trace import get_current_span

        return get_current_span(self._propagator.extract({"traceparent": traceparent})).get_span_context()

    def traceparent(self, span: "Span") -> str:
        """The header that joins others to the span's trace; empty for one that is not sampled."""
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01" if context.trace_flags.sampled else ""

    def _close(self) -> None:
        self._closing.wait()
        self._provider.shutdown()
        self._closed.set()

    def _at_exit(self) -> None:
        self._closing.set()
        self._closed.wait(CLOSE_TIMEOUT_S)
