"""Images by URL: from hosts that the operator allows, at public addresses, without redirects, and within bounds."""

import asyncio
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest
from PIL import Image as Pillow

from services.requests.dialects.openai.messages import Message
from services.requests.store.files.store import FileStore
from services.requests.workers.images import fetch
from services.requests.workers.images.fetch import ImageFetcher, is_public
from services.requests.workers.images.reader import ImageReader
from shared.process.errors import Invalid


def black() -> bytes:
    content = io.BytesIO()
    Pillow.new("RGB", (3, 2)).save(content, "PNG")
    return content.getvalue()


IMAGE = b"\x89PNG and so on"
BLACK = black()


class Handler(BaseHTTPRequestHandler):
    seen: list[str] = []

    def do_GET(self) -> None:
        self.seen.append(f"{self.headers['Host']} {self.path}")
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
            return
        if self.path == "/hang":
            threading.Event().wait(5)
            return
        data = {"/a.png": IMAGE, "/black.png": BLACK, "/long": b"x" * (fetch.MAX_BYTES + 1)}.get(self.path)
        self.send_response(200 if data is not None else 404)
        self.end_headers()
        if data is not None:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def fetched(url: str, *, hosts: tuple[str, ...] = ("localhost",), local: bool = True) -> bytes:
    fetcher = ImageFetcher(hosts, (lambda _: True) if local else is_public)
    return asyncio.run(fetcher.fetch(url))


def test_an_allowed_host_s_image_comes(port: int) -> None:
    assert fetched(f"http://localhost:{port}/a.png") == IMAGE
    assert Handler.seen[-1] == f"localhost:{port} /a.png"


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/redirect", "answered 302"), ("/none", "answered 404"), ("/long", "at most 20 MiB")],
)
def test_answers_that_are_no_image_are_said_so(port: int, path: str, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        fetched(f"http://localhost:{port}{path}")


def test_a_slow_host_is_given_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.3)
    with pytest.raises(Invalid, match="could not be fetched"):
        fetched(f"http://localhost:{port}/hang")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/a.png",
        "http://other.example/a.png",
        "http://localhost@127.0.0.1:{port}/a.png",
        "http://me:word@localhost:{port}/a.png",
        "http://localhost.example/a.png",
        "http:///a.png",
        "http://[::1]:{port}/a.png",
    ],
)
def test_other_hosts_are_not_asked(port: int, url: str) -> None:
    before = len(Handler.seen)
    with pytest.raises(Invalid, match="not fetched from this host"):
        fetched(url.format(port=port))
    assert len(Handler.seen) == before


@pytest.mark.parametrize(
    "url",
    [
        "ftp://localhost/a.png",
        "file:///etc/passwd",
        "gopher://localhost/",
        "javascript:1",
        "//localhost/a.png",
        "http://[bad",
        "x",
    ],
)
def test_other_urls_are_not_understood(url: str) -> None:
    with pytest.raises(Invalid, match="data URL|can't be read"):
        fetched(url)


def test_a_host_at_a_private_address_is_not_asked(port: int) -> None:
    before = len(Handler.seen)
    with pytest.raises(Invalid, match="not public"):
        fetched(f"http://localhost:{port}/a.png", local=False)
    assert len(Handler.seen) == before


def test_addresses_that_are_public() -> None:
    assert all(map(is_public, ("8.8.8.8", "2606:4700::1111")))
    private = (
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "172.16.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "100.64.0.1",
        "224.0.0.1",
        "::1",
        "fe80::1",
        "fc00::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "2002:a9fe:a9fe::",
        "::127.0.0.1",
        "fec0::1",
    )
    assert not any(map(is_public, private))


def read_urls(urls: list[str], max_bytes: int = 1 << 20) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = Message.model_validate({"role": "user", "content": parts})

    async def read() -> Any:
        reader = ImageReader(cast(FileStore, None), ImageFetcher(("localhost",), lambda _: True), max_bytes)
        try:
            return await reader.read([message], "")
        finally:
            await reader.helpers.stop()

    return asyncio.run(read())


def test_a_url_is_fetched_once_a_request_however_often_it_stands_there(port: int) -> None:
    Handler.seen.clear()
    urls = [f"http://localhost:{port}/black.png", f"http://localhost:{port}/black.png?2"]
    with pytest.raises(Invalid):
        read_urls([*urls, urls[0]])  # the second is not there
    Handler.seen.clear()
    [message], files = read_urls(urls[:1] * 6)
    assert Handler.seen == [f"localhost:{port} /black.png"]
    assert len(files) == 1 and [part.image.width for part in message.parts] == [3] * 6


def test_images_by_url_have_one_bound_together(port: int) -> None:
    with pytest.raises(Invalid, match="at most 0 MiB") as refused:
        read_urls([f"http://localhost:{port}/black.png"], max_bytes=10)
    assert refused.value.code == "request_exceeds_limit"
