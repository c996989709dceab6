"""Authentication: each request's key becomes its caller before any route sees it. Plain ASGI, so
that streams pass untouched.

A path that is not named here wants a key. Routes have the caller from `context_of(request)`, or his
tenant from `tenant_of(request)`.
"""

import asyncio
import hmac
import ipaddress
import time
from collections import Counter, deque
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.errors import error_response
from services.requests.store.tenants.api_keys import MIN_KEY_LENGTH, digest_of, read_keys, wants_keys
from services.requests.store.tenants.limits import Caller
from services.requests.store.tenants.tenant import EVERYBODY, NOBODY, Tenant
from shared.process.errors import Invalid, StartupError
from shared.process.settings import GatewaySettings
from shared.process.telemetry import get_logger

log = get_logger("penstock.gateway")

# Open to everyone: paths that load balancers ask, and pages without data of requests
OPEN = frozenset({"/", "/health", "/v1/health", "/ready", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})
OPEN_FOLDERS = ("/static-offline-docs/", "/playground/")
# For administrators: what shows the work of all tenants
ADMIN = frozenset({"/metrics", "/live"})
ADMIN_FOLDERS = ("/live/",)
CHECK_EVERY_S = 1.0  # at the file of keys, whether it has changed
MAX_KEY_LENGTH = 512
OF_ENVIRONMENT = Tenant("environment", "environment", is_admin=True)


class KeyRing:
    """The keys that are good at the moment."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises StartupError for keys that can't be read."""
        self.path: Path | None = settings.keys_file if settings.auth else None
        self.is_open = not wants_keys(settings)
        self._own: dict[bytes, tuple[bytes, Tenant]] = {}
        self._checked_at = time.monotonic()
        self._version = self._version_of_file()  # of the keys that were read
        self._failed: tuple[int, ...] | None = ()  # the version that a log line has named as unreadable
        if settings.auth and settings.api_key:
            key = settings.api_key.get_secret_value()
            if len(key) < MIN_KEY_LENGTH:
                raise StartupError(
                    f"PENSTOCK_API_KEY has {len(key)} characters: at least {MIN_KEY_LENGTH}, and random ones"
                )
            self._own = _table([(digest_of(key), OF_ENVIRONMENT)])
        self._tenants = self._own | self._read() if self._version is not None else self._own

    @property
    def is_local(self) -> bool:
        """Whether it is the loopback address that keeps others out: then a page whose name a
        browser was told to be this machine must not get in."""
        return self.is_open and self.path is not None

    def tenant_of(self, key: str) -> Tenant | None:
        """The tenant with this key, or None."""
        self._reload()
        if self.is_open:
            return EVERYBODY
        if not key or len(key) > MAX_KEY_LENGTH:
            return None
        digest = digest_of(key)
        whole, tenant = self._tenants.get(digest[:8], (b"", NOBODY))
        return tenant if hmac.compare_digest(whole, digest) else None

    def _read(self) -> dict[bytes, tuple[bytes, Tenant]]:
        assert self.path is not None
        return _table([(bytes.fromhex(each.sha256), each.tenant) for each in read_keys(self.path)])

    def _version_of_file(self) -> tuple[int, ...] | None:
        """Changes with the file; None: there is none, or none is to be read."""
        if self.path is None:
            return None
        try:
            status = self.path.stat()
        except OSError:
            return None
        return (
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_size,
            status.st_ino,
        )  # ctime: of who may read or write it

    def _reload(self) -> None:
        """Read the keys again if their file has changed. What can't be read, or is gone, leaves
        them as they are: nothing opens by a mistake."""
        if self.path is None or (now := time.monotonic()) - self._checked_at < CHECK_EVERY_S:
            return
        self._checked_at = now
        if (version := self._version_of_file()) == self._version:
            return
        try:
            self._tenants, self.is_open = self._own | self._read(), False
        except (StartupError, OSError) as error:  # it is tried again, for this may pass
            if version != self._failed:
                what = "missing" if version is None else "unreadable"
                log.error(f"key file {what}; keeping the last loaded keys", path=str(self.path), error=error)
            self._failed = version
            return
        self._version, self._failed = version, ()
        log.info("read the API keys", path=str(self.path), num_keys=len(self._tenants))


def _table(digests: list[tuple[bytes, Tenant]]) -> dict[bytes, tuple[bytes, Tenant]]:
    """Index tenants by the start of the key's hash, which is no secret. The rest is compared in
    constant time."""
    return {digest[:8]: (digest, tenant) for digest, tenant in digests}


class Auth:
    """401 without a key that is good, 403 where it does not suffice; else the request has its
    caller, and the answer what is left of his limits."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self.app = app
        self.keys = keys
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path, headers = scope["path"], Headers(scope=scope)
        key = key_of(headers)
        tenant = self.keys.tenant_of(key)
        is_open = is_public(path)
        if self.keys.is_local and not is_open and not is_loopback(headers.get("host", "")):
            message = (
                "Without API keys this gateway is for its own machine, under a loopback name. Behind a proxy, make "
                "keys, or start it with --no-auth."
            )
            return await error_response(scope, 403, message, None, "host_not_allowed")(scope, receive, send)
        if tenant is None and not is_open:
            message = (
                "Incorrect API key provided."
                if key
                else "You didn't provide an API key: send it as Authorization: Bearer, or as x-api-key."
            )
            refusal = error_response(
                scope, 401, message, None, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
            return await refusal(scope, receive, send)
        caller = Caller(tenant or NOBODY)
        if not caller.tenant.is_admin and (path in ADMIN or path.startswith(ADMIN_FOLDERS)):
            refusal = error_response(
                scope,
                403,
                "this key may not do that: use the key of an administrator",
                None,
                "insufficient_permissions",
            )
            return await refusal(scope, receive, send)
        scope.setdefault("state", {})["caller"] = caller
        await self.turns.take(caller.tenant.tenant_id)
        if not caller.tenant.has_limits:
            return await self.app(scope, receive, send)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(caller.headers)
            await send(message)

        await self.app(scope, receive, send_with_limits)


def check_sees_all(tenant: Tenant) -> None:
    """Raises Invalid (403) for whom other tenants' work is not there."""
    if not tenant.sees_all:
        raise Invalid(
            "this key may not do that: use the key of an administrator", code="insufficient_permissions", status=403
        )


def is_public(path: str) -> bool:
    """Whether the path needs no key: it has no data of requests."""
    return path in OPEN or path.startswith(OPEN_FOLDERS)


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine; an empty one, or HTTP/1.0's that is missing, comes
    from no browser."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return name in ("", "localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def key_of(headers: Headers) -> str:
    """The key that a request shows: OpenAI's header, else Anthropic's; empty: none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


A_ROUND = 2  # requests of one tenant


class Turns:
    """In each round of the event loop, a few of a tenant's requests begin. So another tenant's
    request waits for a few of them, and not for all."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()  # in this round, by tenant
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant

    async def take(self, tenant_id: str) -> None:
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next_round)
        if self._begun[tenant_id] < A_ROUND:
            self._begun[tenant_id] += 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(tenant_id, deque()).append(turn)
        await turn

    def _next_round(self) -> None:
        self._begun.clear()
        for tenant_id, waiting in [*self._waiting.items()]:
            while waiting and self._begun[tenant_id] < A_ROUND:
                if not (turn := waiting.popleft()).done():
                    turn.set_result(None)
                    self._begun[tenant_id] += 1
            if not waiting:
                del self._waiting[tenant_id]
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_round)
