"""Ranks on several hosts: rank 0 listens, and the others connect, each twice."""

import errno
import socket
import time

from services.compute.ranks.group.channel import Channel
from services.compute.ranks.group.identity import (
    COMMANDS,
    WATCH,
    Hello,
    HelloReply,
    answer_hello,
    hear_hello,
    hello_of,
    refuse,
    say_hello,
)
from services.compute.ranks.group.peer import Peer, name_of
from shared.process.errors import Invalid, StartupError, Unready
from shared.process.group_settings import split_address
from shared.process.settings import ComputeSettings
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

HELLO_S = 2.0  # within which a process that connects says which rank it is
RETRY_S = 0.3


def gather_ranks(settings: ComputeSettings) -> list[Peer]:
    """Listen at --master until all ranks have come. Raises StartupError: for one that does not fit
    in, or that does not come."""
    ours = hello_of(settings, 0)
    deadline = time.monotonic() + settings.group_wait_s
    joined: dict[int, dict[str, socket.socket]] = {}
    hellos: dict[int, Hello] = {}
    try:
        with _listen(settings.master) as listener:
            log.info("waiting for the other ranks", master=settings.master, num_ranks=settings.num_ranks)
            while len(joined) < settings.num_ranks - 1 or any(len(each) < 2 for each in joined.values()):
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                connection, _ = listener.accept()
                _hear(connection, ours, settings, joined, hellos)
    except BaseException as error:
        for each in joined.values():
            for connection in each.values():
                connection.close()
        if isinstance(error, TimeoutError):
            missing = [rank for rank in range(1, settings.num_ranks) if len(joined.get(rank, ())) < 2]
            who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
            raise Unready(
                f"{who} of {settings.num_ranks} did not come to {settings.master} within --group-wait-s "
                f"{settings.group_wait_s:g}"
            ) from None
        raise
    return [
        Peer(rank, settings.num_ranks, hellos[rank].host, hellos[rank].pid, Channel(each[COMMANDS]), each[WATCH])
        for rank, each in sorted(joined.items())
    ]


def _listen(master: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(*split_address(master), type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        hint = "; rank 0 listens at an address of its own host" if error.errno == errno.EADDRNOTAVAIL else ""
        raise StartupError(f"--master {master}: {error.strerror or error}{hint}") from None


def _hear(
    connection: socket.socket,
    ours: Hello,
    settings: ComputeSettings,
    joined: dict[int, dict[str, socket.socket]],
    hellos: dict[int, Hello],
) -> None:
    """Take a connection in. Raises StartupError for a rank that does not fit in: it would come again
    and again."""
    try:
        hello = hear_hello(connection, time.monotonic() + HELLO_S)
        name = name_of(hello.rank, settings.num_ranks, hello.host, hello.pid)
        if refusal := refuse(name, hello, ours):
            answer_hello(connection, refusal)
            raise StartupError(refusal)
        if refusal := _refuse_place(hello, settings.num_ranks, joined, hellos):
            # the process that has the place may leave
            answer_hello(connection, refusal, passes=0 < hello.rank < settings.num_ranks)
            raise Invalid(refusal)
        answer_hello(connection)
    except (EOFError, OSError, Invalid) as error:
        log.warning("a connection is not from a rank of this group", reason=error)
        connection.close()
        return
    except StartupError:
        connection.close()
        raise
    prepare(connection)
    if hello.use == COMMANDS:
        for old in joined.pop(hello.rank, {}).values():
            old.close()
        hellos[hello.rank] = hello
    joined.setdefault(hello.rank, {})[hello.use] = connection


def _refuse_place(
    hello: Hello, num_ranks: int, joined: dict[int, dict[str, socket.socket]], hellos: dict[int, Hello]
) -> str:
    """Why this place in the group is not its; empty: it is. Another process may take the place of
    one that has gone."""
    if not 0 < hello.rank < num_ranks:
        return f"--rank {hello.rank}: the ranks that come to rank 0 are 1 to {num_ranks - 1}"
    here, holder = joined.get(hello.rank, {}), hellos.get(hello.rank)
    if hello.use == COMMANDS and COMMANDS in here and holder is not None and _is_open(here[COMMANDS]):
        return f"--rank {hello.rank} is taken: {name_of(holder.rank, num_ranks, holder.host, holder.pid)} has it"
    if hello.use == WATCH and (holder is None or WATCH in here or (holder.host, holder.pid) != (hello.host, hello.pid)):
        return "a watch without its rank"
    return ""


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def connect_to_first(settings: ComputeSettings, rank: int) -> Peer:
    """Rank 0, once it is there. Raises StartupError: for its refusal, or if it does not come."""
    address = split_address(settings.master)
    deadline = time.monotonic() + settings.group_wait_s
    connections: list[socket.socket] = []
    while True:
        try:
            for use in (COMMANDS, WATCH):
                connections.append(socket.create_connection(address, timeout=HELLO_S))
                answer = _introduce(connections[-1], hello_of(settings, rank, use), deadline)
            return Peer(0, settings.num_ranks, answer.host, answer.pid, Channel(connections[0]), connections[1])
        except (OSError, EOFError, Invalid) as error:
            _close(connections)
            if time.monotonic() > deadline:
                reason = getattr(error, "strerror", None) or error  # without its number
                raise Unready(
                    f"--master {settings.master}: rank 0 did not answer within --group-wait-s "
                    f"{settings.group_wait_s:g}: {reason}"
                ) from None
            time.sleep(RETRY_S)
        except BaseException:
            _close(connections)
            raise


def _introduce(connection: socket.socket, hello: Hello, deadline: float) -> HelloReply:
    answer = say_hello(connection, hello, max(time.monotonic() + HELLO_S, deadline))  # rank 0 may be busy with others
    prepare(connection)
    return answer


def _close(connections: list[socket.socket]) -> None:
    while connections:
        connections.pop().close()


def prepare(connection: socket.socket) -> None:
    """Small messages go at once. The connection has no time limit of its own: a rank does not read
    commands during a step, however long, and the watch sees a rank that is cut off."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
