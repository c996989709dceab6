"""Telemetry of the pipeline as far as it needs none: lines of the log, timelines, and tracing that
is off or misconfigured.
"""

import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.gateway.telemetry.timeline import Timeline
from shared.process.errors import StartupError
from shared.process.telemetry import JsonFormatter, get_logger
from shared.process.tracing import CLOSE_TIMEOUT_S, open_tracer
from shared.wire.messages import Moments
from tests.collector import Collector
from tests.deployment import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent


def line_of(formatter: logging.Formatter, event: str, **values: object) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLogger("penstock.test")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        try:
            raise ValueError("bad\nthing")
        except ValueError:
            get_logger("penstock.test").exception(event, **values) if values.pop("fails", False) else get_logger(
                "penstock.test"
            ).info(event, **values)
    finally:
        logger.removeHandler(handler)
    return stream.getvalue()


def test_a_line_for_people_keeps_to_one_line_whatever_is_in_it() -> None:
    line = line_of(
        logging.Formatter("%(message)s"), "done 100%", path="/a b\x1b[2J\n", seconds=0.123456789, none=None, empty=""
    )
    assert line == "done 100% path='/a b\\x1b[2J\\n' seconds=0.123457 none=- empty=''\n"


def test_a_line_for_machines_is_an_object_whose_own_fields_nobody_overwrites() -> None:
    line = line_of(
        JsonFormatter(),
        "done 100%",
        path="é\n",
        seconds=0.5,
        none=None,
        level="none",
        error=ValueError("x"),
        fails=True,
    )
    said = json.loads(line)
    assert (
        line.count("\n") == 1
        and said["event"] == "done 100%"
        and said["level"] == "error"
        and said["logger"] == "penstock.test"
    )
    assert (said["path"], said["seconds"], said["none"], said["error"]) == ("é\n", 0.5, None, "x")
    assert "ValueError: bad" in said["exception"] and re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"]
    )


def test_other_libraries_lines_are_objects_too() -> None:
    record = logging.LogRecord("uvicorn.error", logging.WARNING, "x.py", 1, "100%", (), None)
    assert json.loads(JsonFormatter().format(record))["event"] == "100%"


def test_a_timeline_says_what_is_known() -> None:
    timeline = Timeline(submitted_at=10.0)
    timeline.note(Moments("r", 1, 11.0, 13.0, 17.0, "compute-1", "sampler-1"))
    assert (timeline.tokenize_s, timeline.queue_s, timeline.prefill_s, timeline.decode_s, timeline.inference_s) == (
        1.0,
        2.0,
        4.0,
        None,
        4.0,
    )
    timeline.note(Moments("r", 9, 11.0, 20.0, 25.0, "compute-2", "sampler-1"))  # by another, which took it over
    assert (timeline.queue_s, timeline.decode_s, timeline.inference_s, timeline.compute_id) == (
        2.0,
        8.0,
        12.0,
        "compute-2",
    )
    resumed = Timeline()
    resumed.note(Moments("r", 9, 11.0, 20.0, 25.0, "compute-2"))
    assert (resumed.tokenize_s, resumed.queue_s, resumed.prefill_s, resumed.decode_s) == (None, None, None, None)
    early = Timeline(submitted_at=12.0)
    early.note(Moments("r", 1, 11.0, 10.0, 17.0, "compute-1"))
    assert (early.tokenize_s, early.queue_s) == (0.0, 0.0), "clocks may disagree"


def test_without_an_endpoint_nothing_is_loaded_that_could_send_spans() -> None:
    """(redis-py looks by itself whether OpenTelemetry's SDK is there.)"""
    code = (
        "import sys; from shared.wire.stage import Stage; from shared.process.stage_settings import StageSettings; "
        "import services.gateway.app, services.sampler.service; "
        "assert Stage('sampler', StageSettings(redis_url='unix:///nowhere')).tracer is None; "
        "sys.exit(any(name.startswith(('opentelemetry.exporter', 'opentelemetry.sdk.trace')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"},
            "expected a URL as http://127.0.0.1:4318, got 'collector:4318'",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "only http/protobuf is spoken",
        ),
    ],
)
def test_what_cannot_be_sent_to_is_said_in_one_line(
    variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=reason):
        open_tracer("sampler", "sampler-1")


@pytest.mark.parametrize(
    "variables", [{"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}]
)
def test_what_turns_traces_off_turns_them_off(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"} | variables).items():
        monkeypatch.setenv(name, value)
    assert open_tracer("sampler", "sampler-1") is None


SEND = """
import atexit, time
from shared.process.telemetry import setup_logging
from shared.process.tracing import open_tracer
atexit.register(lambda: print(waited_s, time.monotonic() - recorded_at, flush=True))  # the last thing: what opens later is closed before
setup_logging("info")
tracer = open_tracer("sampler", "sampler-1")
waited_s = 0.0
for number in range(6000):
    began_at = time.monotonic()
    assert tracer.record("sample", "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", 1.0, 2.0, {"penstock.num_tokens": number})
    waited_s = max(waited_s, time.monotonic() - began_at)
    if not number % 1000:
        time.sleep(0.05)  # for whoever sends
recorded_at = time.monotonic()
"""  # noqa: E501


def test_a_collector_that_is_away_costs_spans_and_nothing_else() -> None:
    """Recording does not wait, what waits is bounded, the log has a line or two, and the process ends in its time."""
    with away("refuses") as refusing, away("is silent") as silent, away("fails slowly") as failing:
        senders = [
            subprocess.Popen(
                [sys.executable, "-c", SEND],
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={
                    **os.environ,
                    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                    "OTEL_BSP_SCHEDULE_DELAY": "50",
                },
            )
            for port in (refusing, silent, failing)
        ]
        for sender in senders:
            out, errors = sender.communicate(timeout=200)
            waited_s, closing_s = map(float, out.split())
            assert sender.returncode == 0 and waited_s < 10.0, "an export that times out takes as long"
            assert closing_s < CLOSE_TIMEOUT_S + 10.0
            lines = errors.splitlines()
            assert (
                "Queue full" in errors
                and len(lines) < 6
                and all("penstock.tracing: trouble with spans" in line for line in lines)
            ), errors


@contextmanager
def away(answer: str) -> Iterator[int]:
    """The port of a collector that is none. A connection waits in the kernel until somebody takes
    it: nobody does, or to fail after a second.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        port: int = server.getsockname()[1]
        if answer == "refuses":
            port = free_port()
        elif answer == "fails slowly":
            threading.Thread(target=fail_slowly, args=(server,), daemon=True).start()
        yield port


def fail_slowly(server: socket.socket) -> None:
    with suppress(OSError):  # the test is over
        while True:
            with server.accept()[0] as connection:
                time.sleep(1.0)
                connection.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def test_a_root_is_the_same_span_whoever_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector().start()
    try:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        key, link = "0123456789abcdef" * 2, f"00-{'ab' * 16}-{'cd' * 8}-01"
        for replica_id in ("jobs-1", "jobs-2"):
            tracer = open_tracer("jobs", replica_id)
            assert tracer is not None and tracer.trace_of(key) == f"00-{key}-{key[:16]}-01"
            tracer.record("admission", tracer.trace_of(key), 1.0, 2.0, {})
            tracer.record_root(
                "batch line", tracer.trace_of(key), 1.0, 3.0, {"penstock.outcome": "completed"}, link=link
            )
        wait_until(lambda: len(collector.of(key)) == 4, description="its spans")
        roots = [span for span in collector.of(key) if span.name == "batch line"]
        assert {(span.span_id, span.parent_id, span.links) for span in roots} == {(key[:16], "", (link[3:35],))}
        assert {span.parent_id for span in collector.of(key) if span.name == "admission"} == {key[:16]}
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        unsampled = open_tracer("jobs", "jobs-3")
        assert unsampled is not None and unsampled.trace_of(key) == ""
    finally:
        collector.stop()
