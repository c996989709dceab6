"""The gateway's part of a trace: the span of the HTTP request, under which all stages' spans are,
and its children `admission` and `stream`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from shared.process.tracing import Attributes, Tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span

MAX_TRACEPARENT = 128  # characters: 55 of version 00, and what a later one may append
MAX_TRACESTATE = 512  # characters, as many as W3C asks for: every span of the trace would hold them


@dataclass(frozen=True, slots=True)
class Root:
    """The span of an HTTP request that is being answered."""

    tracer: Tracer
    span: "Span"
    started_at: float  # wall clock, s
    traceparent: str  # of the span; empty: it is not sampled

    def record(
        self, name: str, started_at: float, ended_at: float, attributes: Attributes, *, parent: str = ""
    ) -> None:
        """A child that has ended; parent: of another trace, if it belongs there."""
        if joined := parent or self.traceparent:
            self.tracer.record(name, joined, started_at, ended_at, attributes)


_root: ContextVar[Root | None] = ContextVar("root", default=None)


def current_root() -> Root | None:
    """The span of the HTTP request that this task answers. None: spans are off."""
    return _root.get()


def trace_headers(headers: Headers) -> dict[str, str]:
    """The client's trace headers, as far as they are taken: one traceparent, and a tracestate of
    bounded length. Empty: the request begins a trace."""
    parents, state = headers.getlist("traceparent"), ",".join(headers.getlist("tracestate"))
    if len(parents) != 1 or len(parents[0]) > MAX_TRACEPARENT:
        return {}
    return {"traceparent": parents[0]} | ({"tracestate": state} if 0 < len(state) <= MAX_TRACESTATE else {})


@contextmanager
def rooted(tracer: Tracer, name: str, headers: dict[str, str], attributes: Attributes) -> Iterator["Span"]:
    """A root for what happens within, and in tasks that begin there."""
    started_at = time.time()
    span = tracer.start(name, headers, started_at, attributes)
    token = _root.set(Root(tracer, span, started_at, tracer.traceparent(span)))
    try:
        yield span
    finally:
        _root.reset(token)
        span.end()


@contextmanager
def admission_span(num_sequences: int) -> Iterator[None]:
    """`admission`: from the request's first byte until Redis has it: its body, its checks, its
    grammar's too."""
    root, error_type = current_root(), ""
    try:
        yield
    except BaseException as error:
        error_type = type(error.__cause__ or error).__name__  # Redis' own word for what came of it
        raise
    finally:
        if root is not None:
            attributes: dict[str, str | int] = {"penstock.num_sequences": num_sequences}
            root.record(
                "admission",
                root.started_at,
                time.time(),
                attributes | ({"error.type": error_type} if error_type else {}),
            )
