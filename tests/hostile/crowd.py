"""`python -m tests.hostile.crowd URL KEY PATH COUNT`: for each line of standard input, so many
requests at once; then a line with what came of them.

A process of its own, so that the times that others measure meanwhile are a gateway's, and not of
the program that measures.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from urllib.parse import urlsplit


async def ask(host: str, port: int, content: bytes, together: asyncio.Barrier) -> tuple[str, int]:
    """The status, and the bytes of the answer."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        await together.wait()
        writer.write(content)
        found = await reader.read(1 << 16)
        status, length = found[9:12].decode(), len(found)
        while found := await reader.read(1 << 16):
            length += len(found)
        return status, length
    finally:
        writer.close()


async def rush(host: str, port: int, content: bytes, count: int) -> dict[str, object]:
    together = asyncio.Barrier(count + 1)
    tasks = [asyncio.create_task(ask(host, port, content, together)) for _ in range(count)]
    await together.wait()
    began = time.monotonic()
    print("sent", flush=True)
    found = await asyncio.gather(*tasks)
    took_s = time.monotonic() - began
    return {
        "took_s": round(took_s, 2),
        "statuses": Counter(status for status, _ in found),
        "bytes": sum(length for _, length in found),
    }


def main() -> None:
    url, key, path, count = sys.argv[1:]
    parts = urlsplit(url)
    content = (
        f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
    ).encode()
    for _ in sys.stdin:
        print(json.dumps(asyncio.run(rush(str(parts.hostname), parts.port or 80, content, int(count)))), flush=True)


if __name__ == "__main__":
    main()
