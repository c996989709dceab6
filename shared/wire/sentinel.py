"""URLs of a Redis whose primary is named by Sentinels.

    redis+sentinel://USER:PASSWORD@HOST1:26379,HOST2:26379,HOST3:26379/SERVICE/0

Each new connection asks them which server is the primary. rediss+sentinel: with TLS, to the Sentinels
as to the servers. Options are those of a redis:// URL, and sentinel_username and sentinel_password.
"""

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from redis.connection import SSLConnection, parse_url

SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
DEFAULT_PORT = 26379
ASKING_S = 1.0  # for a Sentinel to answer: then the next is asked


@dataclass(frozen=True, slots=True)
class Sentinels:
    """A URL, taken apart."""

    addresses: tuple[tuple[str, int], ...]  # of the Sentinels
    service: str  # their name for the primary and its replicas
    options: dict[str, Any]  # of a connection to the primary, as redis-py takes them
    own_options: dict[str, Any]  # the same, of one to a Sentinel
    has_tls: bool


def is_sentinel_url(url: str) -> bool:
    return urlsplit(url).scheme in SCHEMES


def parse_sentinel_url(url: str) -> Sentinels:
    """Raises ValueError."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.lstrip("/").partition("/")
    if not service:
        raise ValueError("it ends with the name that the Sentinels have for the primary, as in redis+sentinel://HOST:26379/mymaster/0")
    if database and not database.isdecimal():
        raise ValueError(f"{database!r} is no number of a database")
    query = dict(parse_qsl(parts.query))
    own = {name: query.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in query}
    has_tls = SCHEMES[parts.scheme] == "rediss"
    # redis-py reads what a plain URL has, too
    plain = f"{SCHEMES[parts.scheme]}://{user}{at}host/{database}?{urlencode(query)}"
    options: dict[str, Any] = dict(parse_url(plain))  # type: ignore[no-untyped-call]
    del options["host"]
    if has_tls:
        assert options.pop("connection_class") is SSLConnection
        own |= {name: value for name, value in options.items() if name.startswith("ssl_")} | {"ssl": True}
    times = {"socket_timeout": ASKING_S, "socket_connect_timeout": ASKING_S}
    return Sentinels(tuple(_address(each) for each in hosts.split(",")), unquote(service), options, own | times, has_tls)


def broker_of(url: str) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """Celery's way to write it: the URL, options of its transport, and options of TLS."""
    found = parse_sentinel_url(url)
    user = "".join(quote(found.options.get(name, ""), safe="") + mark for name, mark in (("username", ":"), ("password", "@")))
    database = found.options.get("db", 0)
    urls = [f"sentinel://{user if len(user) > 2 else ''}{_bracketed(host)}:{port}/{database}" for host, port in found.addresses]
    tls = None  # kombu takes an empty dict for none, too
    if found.has_tls:
        tls = {"ssl_cert_reqs": "required"} | {name: value for name, value in found.options.items() if name.startswith("ssl_")}
    return ";".join(urls), {"master_name": found.service, "sentinel_kwargs": found.own_options}, tls


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no address of a Sentinel: HOST:PORT is")
    return parts.hostname, parts.port or DEFAULT_PORT


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
