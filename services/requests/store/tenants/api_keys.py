"""API keys: a JSON file that `penstock keys` writes and gateways read, again whenever it changes.
It holds hashes: a key is shown once, when it is made.

A key has 256 random bits, so one round of SHA-256 suffices: there is nothing to guess that a slow
hash would protect.
"""

import fcntl
import hashlib
import ipaddress
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.requests.store.tenants.tenant import MAX_PRIORITY, Tenant
from shared.process.errors import StartupError
from shared.process.settings import GatewaySettings

PREFIX = "sk-penstock-"
MIN_KEY_LENGTH = 16  # of one that an operator makes up


class ApiKey(BaseModel):
    """One entry of the file: a tenant, and the hash of its key."""

    # a limit that is misspelt must not be no limit
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")
    tenant_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created_at: float = 0.0  # wall clock, s
    is_admin: bool = False
    requests_per_minute: int | None = Field(None, gt=0)
    tokens_per_minute: int | None = Field(None, gt=0)
    max_concurrency: int | None = Field(None, gt=0)
    models: tuple[str, ...] | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)

    @property
    def tenant(self) -> Tenant:
        return Tenant(**self.model_dump(exclude={"sha256", "created_at"}))


class KeyFile(BaseModel):
    """The file's content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[ApiKey, ...] = ()


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Raises StartupError if the file can't be read, may be written by other users, or is no file of
    keys; FileNotFoundError if it does not exist."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise StartupError(f"every user of this machine may write to {path}, and so add a key: chmod 600 it")
            keys = KeyFile.model_validate_json(file.read()).keys
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StartupError(f"the keys in {path} can't be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise StartupError(f"{path} is no file of keys: {place + ': ' if place else ''}{first['msg']}") from None
    for what, values in (("name", [key.name for key in keys]), ("sha256", [key.sha256 for key in keys])):
        if len(set(values)) < len(values):
            raise StartupError(f"{path} is no file of keys: two have the same {what}")
    return keys


def add_key(path: Path, name: str, **limits: object) -> str:
    """Make a key of a new tenant; limits: further fields of ApiKey. Returns the key, which is not
    stored. Raises StartupError."""
    with _changing(path) as keys:
        if any(each.name == name for each in keys):
            raise StartupError(f"there is a key called {name!r} already: revoke it first, or rotate it")
        secret = _new_secret()
        try:
            made = {"name": name, "tenant_id": secrets.token_hex(8), "sha256": digest_of(secret).hex()}
            keys.append(ApiKey.model_validate({**made, "created_at": time.time(), **limits}))
        except ValidationError as error:
            first = error.errors()[0]
            raise StartupError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}") from None
        return secret


def rotate_key(path: Path, name: str) -> str:
    """Give the tenant another key; the old one is invalid at once. Returns the new one. Raises
    StartupError."""
    with _changing(path) as keys:
        number = _find(keys, name, path)
        secret = _new_secret()
        keys[number] = keys[number].model_copy(update={"sha256": digest_of(secret).hex(), "created_at": time.time()})
        return secret


def revoke_key(path: Path, name: str) -> None:
    """Raises StartupError."""
    with _changing(path) as keys:
        del keys[_find(keys, name, path)]


def _new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _find(keys: list[ApiKey], name: str, path: Path) -> int:
    for number, each in enumerate(keys):
        if each.name == name:
            return number
    raise StartupError(f"no key called {name!r} in {path}")


@contextmanager
def _changing(path: Path) -> Iterator[list[ApiKey]]:
    """The keys, to be changed: one process at a time, and written whole or not at all. Readers see
    the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(path.name + ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                keys = list(read_keys(path))
            except FileNotFoundError:
                keys = []
            yield keys
            written = path.with_name(path.name + ".new")
            written.unlink(missing_ok=True)
            with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(KeyFile(keys=tuple(keys)).model_dump_json(indent=2, exclude_defaults=True) + "\n")
                file.flush()
                os.fsync(file.fileno())
            written.replace(path)
    except OSError as error:
        raise StartupError(f"the keys in {path} can't be written: {error.strerror or error}") from None


def wants_keys(settings: GatewaySettings) -> bool:
    """Whether a gateway with these settings asks for a key: one is set, or a file of keys exists, even an
    empty one. Raises StartupError."""
    return settings.auth and (bool(settings.api_key) or _is_there(settings.keys_file))


def _is_there(path: Path) -> bool:
    """Whether the file exists. Raises StartupError if that can't be known: it must not count as no keys."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StartupError(f"the keys in {path} can't be read: {error.strerror}") from None
    return True


def check_exposure(settings: GatewaySettings) -> None:
    """Raises StartupError if users of other machines could ask without a key, and --no-auth is not
    given."""
    if not settings.auth or wants_keys(settings):
        return
    try:
        found = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise StartupError(f"--host {settings.host}: {error.strerror or error}") from None
    if not all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found):
        raise StartupError(
            f"without API keys the gateway listens on loopback only, not on {settings.host or 'every interface'}: "
            "make a key (penstock keys add NAME), or say --no-auth (PENSTOCK_AUTH=false) if every client that reaches "
            "it may use it"
        )
