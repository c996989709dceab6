"""Fetching an image by its URL, from hosts that the operator allows.

A server that fetches what strangers name can be made to reach what they can't (server-side request
forgery). So: no host but those allowed, no redirect, no address that is not public, and what was
resolved and checked is what is connected to.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpx

from shared.model.vision.pixels import MAX_BYTES
from shared.process.errors import Invalid

TIMEOUT_S = 10.0  # of the whole
PORTS = {"http": 80, "https": 443}
# prefixes behind which an IPv4 address stands, whichever that is, and addresses of a site
TRANSLATED = tuple(
    map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96", "fec0::/10"))
)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        if any(found in network for network in TRANSLATED):
            return False
        found = found.ipv4_mapped or found
    return found.is_global and not found.is_multicast


class ImageFetcher:
    def __init__(self, hosts: Sequence[str], is_allowed: Callable[[str], bool] = is_public) -> None:
        """hosts: names that may be fetched from; is_allowed: whether an address may be connected to."""
        self.hosts = frozenset(host.lower() for host in hosts)
        self.is_allowed = is_allowed

    async def fetch(self, url: str) -> bytes:
        """The file. Raises Invalid."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._fetch(url)
        except TimeoutError:
            raise Invalid(f"the image could not be fetched within {TIMEOUT_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise Invalid(f"the image could not be fetched: {type(error).__name__}") from None

    async def _fetch(self, url: str) -> bytes:
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            raise Invalid("the image's URL can't be read") from None
        if parts.scheme not in PORTS:
            raise Invalid(
                "an image is a data URL (data:image/png;base64,...), a file_id, or an http(s) URL of a host that this "
                "server's operator allows"
            )
        if host not in self.hosts or parts.username is not None:
            allowed = ", ".join(sorted(self.hosts)) or "none (--image-host allows some)"
            raise Invalid(
                f"images are not fetched from this host; allowed: {allowed}. Send the image itself: "
                "data:image/png;base64,..."
            )
        address = await self._resolve(host, port or PORTS[parts.scheme])
        target = httpx.URL(url).copy_with(host=address)
        headers = {
            "Host": host if port is None else f"{host}:{port}",
            "Accept": "image/*",
            "Accept-Encoding": "identity",
        }
        async with (
            httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=TIMEOUT_S) as client,
            client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as response,
        ):
            if response.status_code != 200:
                raise Invalid(f"the image's host answered {response.status_code}; redirects are not followed")
            data = bytearray()
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > MAX_BYTES:
                    raise Invalid(
                        f"an image's file has at most {MAX_BYTES >> 20} MiB, and the one at this URL is longer"
                    )
            return bytes(data)

    async def _resolve(self, host: str, port: int) -> str:
        """An address of the host, if all of them may be connected to. Raises Invalid."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        if not addresses or not all(self.is_allowed(address) for address in addresses):
            raise Invalid("the image's host has an address that is not public: nothing is fetched from there")
        return addresses[0]
