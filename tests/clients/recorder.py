"""A proxy between a client and the gateway. It passes everything on as it is, and keeps what was
asked: the form of each request, without its content.
"""

import http.client
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

CONNECTION = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host")
)  # headers of one connection, not of the request
TIMEOUT_S = 300.0
# Words of a protocol: names, types, models. Anything longer, or with a space, is content; so is what looks like an id
WORD = re.compile(r"(?![0-9a-f-]*\d[0-9a-f-]*$)[A-Za-z$_][A-Za-z0-9_.:-]{0,47}")
RANDOM = re.compile(r"[0-9a-f]{8,}|[A-Za-z0-9]{20,}")
CONTENT = frozenset(
    (
        "text",
        "content",
        "instructions",
        "system",
        "description",
        "output",
        "input",
        "user",
        "user_id",
        "title",
        "prompt",
        "thinking",
        "signature",
    )
)
EXACT = frozenset(
    ("$schema", "$ref", "pattern", "format", "grammar", "guided_grammar", "regex", "guided_regex")
)  # schemas and grammars
NAMES = frozenset(("type", "name", "enum", "required"))  # never ids


@dataclass(frozen=True, slots=True)
class Call:
    """A request's form, and the status of its answer."""

    method: str
    path: str
    headers: tuple[str, ...]  # their names
    body: Any  # its outline; None: none was sent
    status: int


def outline(value: Any, key: str = "") -> Any:
    """The value with its content replaced by words of how long it is. Names, numbers and JSON schemas stay."""
    if isinstance(value, dict):
        return {
            name if WORD.fullmatch(name) else f"({len(name)} characters)": outline(each, name)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [outline(each, key) for each in value]
    if not isinstance(value, str) or key in EXACT:
        return value
    if value.startswith("{"):  # arguments of a call, as JSON in a string
        try:
            return json.dumps(outline(json.loads(value)))
        except ValueError:
            return f"({len(value)} characters)"
    is_word = (
        key not in CONTENT and WORD.fullmatch(value) is not None and (key in NAMES or RANDOM.search(value) is None)
    )
    return value if is_word or not value else f"({len(value)} characters)"


class Recorder:
    """Calls that passed, in order."""

    def __init__(self, gateway: str) -> None:
        self.gateway = urlsplit(gateway)
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def keep(self, call: Call) -> None:
        with self._lock:
            self.calls.append(call)

    @property
    def refused(self) -> list[Call]:
        """Calls that the gateway refused."""
        return [call for call in self.calls if call.status >= 400]

    def forms(self) -> list[dict[str, Any]]:
        """One call of each form, in order: the same fields, of the same kinds."""
        found: dict[str, dict[str, Any]] = {}
        for call in self.calls:
            said = {name: value for name, value in asdict(call).items() if name != "status"}
            found.setdefault(form_of(said), said)
        return list(found.values())


def form_of(said: dict[str, Any]) -> str:
    """The paths of all fields of a call, and the words at those named type or role."""

    def walk(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict):
            for name, each in value.items():
                if name in ("type", "role") and isinstance(each, str):
                    yield f"{path}.{name}={each}"
                yield from walk(each, f"{path}.{name}")
        elif isinstance(value, list):
            for each in value:
                yield from walk(each, f"{path}[]")
        else:
            yield path

    return " ".join((said["method"], said["path"], *sorted(set(walk(said["body"], "")))))


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up says nothing about the server; what else is wrong is printed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def recording(gateway: str) -> Iterator[tuple[str, Recorder]]:
    """Yields the proxy's URL and its recorder."""
    recorder = Recorder(gateway)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in CONNECTION}
            upstream = http.client.HTTPConnection(recorder.gateway.netloc, timeout=TIMEOUT_S)
            try:
                upstream.request(self.command, self.path, body or None, headers)
                answer = upstream.getresponse()
                names = tuple(sorted({name.lower() for name in self.headers}))
                recorder.keep(Call(self.command, self.path, names, outline(parsed(body)), answer.status))
                self.answer(answer)
            except BrokenPipeError:  # the client has heard enough
                self.close_connection = True
            finally:
                upstream.close()

        def answer(self, answer: http.client.HTTPResponse) -> None:
            """Piece by piece, as they come."""
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in CONNECTION:
                    self.send_header(name, value)
            is_chunked = answer.getheader("Content-Length") is None and self.command != "HEAD" and answer.status != 204
            if is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while piece := answer.read1(65536):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
                self.wfile.flush()
            if is_chunked:
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_HEAD = do_DELETE = do_OPTIONS = pass_on

        def log_message(self, format: str, *args: Any) -> None:
            """Quietly."""

    proxy = Proxy(("127.0.0.1", 0), Handler)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}", recorder
    finally:
        proxy.shutdown()
        proxy.server_close()


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return f"({len(body)} bytes)"
