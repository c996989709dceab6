"""URLs of a Redis whose primary is looked up: with Sentinels, or with the nodes of a cluster.

    redis+sentinel://USER:PASSWORD@HOST1:26379,HOST2:26379,HOST3:26379/SERVICE/0
    redis+cluster://USER:PASSWORD@HOST1:6379,HOST2:6379,HOST3:6379/CELL

Each new connection asks which server is the primary: of the service that the Sentinels know, or of
the cell's slot (cells.py). rediss+sentinel, rediss+cluster: with TLS, to Sentinels and nodes as to
the primary. Options are those of a redis:// URL; a Sentinel's own are sentinel_username and
sentinel_password.
"""

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.connection import SSLConnection, parse_url

SCHEMES = {f"redis{tls}+{kind}": (f"redis{tls}", kind) for tls in ("", "s") for kind in ("sentinel", "cluster")}
DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}
CELL = re.compile(r"[a-z0-9-]{1,16}")
ASKING_S = 1.0  # for a reply about the primary; then the next address is asked


@dataclass(frozen=True, slots=True)
class DiscoveryUrl:
    """The parts of a URL by which the primary is looked up."""

    addresses: tuple[tuple[str, int], ...]  # of Sentinels, or of nodes
    service: str  # the Sentinels' name for the primary and its replicas; empty in a cluster
    cell: str  # in a cluster; else empty
    options: dict[str, Any]  # of a connection to the primary, as redis-py takes them
    own_options: dict[str, Any]  # the same, of one to a Sentinel or node
    has_tls: bool

    @property
    def prefix(self) -> str:
        """The beginning of every key: a hash tag, so that all of a cell's keys have one slot."""
        return f"{{{self.cell}}}:" if self.cell else ""


def wrong_url(url: str, error: ValueError) -> str:
    """A text that says what is wrong with a URL, and holds no part of its password."""
    if "@" not in url:
        return str(error)
    return (
        "its scheme, host, port or path is none, or a special character of its password is not written as %XX (/ is "
        "%2F)"
    )


def parse_named(url: str) -> DiscoveryUrl | None:
    """The parts of the URL; None for one that names the server itself. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        return None
    plain_scheme, kind = SCHEMES[parts.scheme]
    user, at, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.lstrip("/").partition("/")
    if not name:
        example = "name that the Sentinels have for the primary, as in redis+sentinel://HOST:26379/mymaster/0"
        raise ValueError(
            f"it ends with the {example if kind == 'sentinel' else 'name of a cell, as in redis+cluster://HOST:6379/a'}"
        )
    if kind == "cluster" and (database or not CELL.fullmatch(name)):
        raise ValueError(f"{parts.path[1:]!r} is no name of a cell: up to 16 small letters, digits and hyphens are")
    if database and not database.isdecimal():
        raise ValueError(f"{database!r} is no number of a database")
    query = dict(parse_qsl(parts.query))
    asking = {
        field: query.pop(f"sentinel_{field}") for field in ("username", "password") if f"sentinel_{field}" in query
    }
    has_tls = plain_scheme == "rediss"
    # redis-py reads what a plain URL has, too
    plain = f"{plain_scheme}://{user}{at}host/{database}?{urlencode(query)}"
    options: dict[str, Any] = dict(parse_url(plain))  # type: ignore[no-untyped-call]
    del options["host"]
    if has_tls:
        assert options.pop("connection_class") is SSLConnection
        asking |= {field: value for field, value in options.items() if field.startswith("ssl_")} | {"ssl": True}
    if kind == "cluster":  # nodes are asked with the user of the primary
        asking |= {field: options[field] for field in ("username", "password") if field in options}
    times = {"socket_timeout": ASKING_S, "socket_connect_timeout": ASKING_S}
    addresses = tuple(_address(each, DEFAULT_PORTS[kind]) for each in hosts.split(","))
    named = unquote(name)
    return DiscoveryUrl(
        addresses,
        named if kind == "sentinel" else "",
        named if kind == "cluster" else "",
        options,
        asking | times,
        has_tls,
    )


def _address(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no address: HOST:PORT is")
    return parts.hostname, parts.port or default_port
