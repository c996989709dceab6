"""A stream as a client sees it, line by line, over a real connection."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.deployment import Deployment
from tests.gateway.backstage import NAME
from tests.waiting import wait_until

BODY = {"model": NAME, "prompt": "The", "max_tokens": 100, "stream": True, "stream_options": {"include_position": True}}


class Stream:
    """Reads in a thread, so that the test can write tokens meanwhile."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.lines: list[str] = []
        self.is_over = False
        self.was_cut = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self.response.iter_lines():
                self.lines.append(line)
        except (httpx.HTTPError, httpx.StreamError):
            self.was_cut = True
        self.is_over = True

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(line.removeprefix("data: ")) for line in list(self.lines) if line.startswith("data: {")]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for chunk in self.chunks for choice in chunk.get("choices", ()))

    @property
    def error(self) -> Any:
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)

    @property
    def finish_reasons(self) -> list[str]:
        return [
            choice["finish_reason"]
            for chunk in self.chunks
            for choice in chunk.get("choices", ())
            if choice["finish_reason"]
        ]

    @property
    def last_id(self) -> str:
        return [line.removeprefix("id: ") for line in self.lines if line.startswith("id: ")][-1]

    def wait(self, text: str) -> None:
        wait_until(lambda: self.text == text, description=f"the text is {text!r}, it is {self.text!r}")

    def wait_end(self, timeout_s: float = 60) -> None:
        wait_until(lambda: self.is_over, description=f"the stream ends: {self.lines[-3:]}", timeout_s=timeout_s)


@contextmanager
def streaming(
    deployment: Deployment,
    *,
    resume: str = "",
    last_id: str = "",
    gateway: str | None = None,
    headers: dict[str, str] | None = None,
    **body: Any,
) -> Iterator[Stream]:
    """A stream of completions, new or resumed."""
    if resume:
        headers = (headers or {}) | ({"Last-Event-ID": last_id} if last_id else {})
        context = httpx.stream(
            "GET", deployment.url(gateway) + f"/v1/streams/{resume}", headers=headers, timeout=60, trust_env=False
        )
    else:
        context = httpx.stream(
            "POST",
            deployment.url(gateway) + "/v1/completions",
            json=BODY | body,
            headers=headers,
            timeout=60,
            trust_env=False,
        )
    with context as response:
        assert response.status_code == 200, response.read()
        yield Stream(response)


@contextmanager
def begun(
    deployment: Deployment, backstage: Any, *positions: int, gateway: str | None = None, **body: Any
) -> Iterator[tuple[Stream, Any]]:
    """A new stream of one sequence that has had tokens at these positions, and its request."""
    posted: list[Any] = []

    def feed() -> None:
        [request] = backstage.take()
        posted.append(request)
        backstage.write(request, *positions)

    feeder = threading.Thread(target=feed)
    feeder.start()
    with streaming(deployment, gateway=gateway, **body) as stream:
        feeder.join()
        stream.wait("".join(f"{position} " for position in positions))
        yield stream, posted[0]
