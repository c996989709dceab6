"""HTTP/1.1 over asyncio's sockets: a client that sees a connection break where it breaks, and
repeats nothing by itself.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

CONNECT_TIMEOUT_S = 10.0
MAX_LINE = 1 << 22  # bytes; a chunk of a stream with many logprobs


class Broken(Exception):
    """The connection was refused, or ended before the reply did."""


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; without data it was a comment."""

    data: str | None
    event_id: str | None = None


@dataclass(slots=True)
class Reply:
    """A reply whose head is in. Close it."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    async def body(self) -> bytes:
        """All of it. Raises Broken."""
        return b"".join([piece async for piece in self._pieces()])

    async def json(self) -> Any:
        """The body as JSON, or a made-up error that shows what it was. Raises Broken."""
        body = await self.body()
        try:
            return json.loads(body)
        except ValueError:
            return {"error": {"message": f"not JSON: {body[:200]!r}", "code": None}}

    async def events(self) -> AsyncIterator[Event]:
        """Server-sent events, and comments, up to the end of the body. Raises Broken; of a broken
        event nothing is seen.
        """
        rest, event_id, data = b"", None, None
        async for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for raw in lines:
                line = raw.decode().rstrip("\r")
                if line.startswith(":"):
                    yield Event(None)
                elif line.startswith("id:"):
                    event_id = line[3:].strip()
                elif line.startswith("data:"):
                    data = (data or "") + line[5:].removeprefix(" ")
                elif not line and data is not None:
                    yield Event(data, event_id)
                    event_id = data = None

    def close(self) -> None:
        """Drop the connection at once."""
        self._writer.transport.abort()

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                while size := int(await self._reader.readuntil(b"\r\n"), 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
            elif "content-length" in self.headers:
                yield await self._reader.readexactly(int(self.headers["content-length"]))
            else:
                while piece := await self._reader.read(65536):
                    yield piece
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise Broken(f"in the body: {error!r}") from None


async def ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Reply:
    """Send a request; returns when the reply's head is in. Raises Broken."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection("127.0.0.1", port, limit=MAX_LINE), CONNECT_TIMEOUT_S
        )
    except (OSError, TimeoutError) as error:
        raise Broken(f"connecting: {error!r}") from None
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in head[1:] if ":" in line)
        return Reply(int(head[0].split()[1]), {name.lower(): value.strip() for name, value in pairs}, reader, writer)
    except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
        writer.transport.abort()
        raise Broken(f"before the reply: {error!r}") from None
    except asyncio.CancelledError:
        writer.transport.abort()
        raise
