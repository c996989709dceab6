"""Ranks of several hosts meet: whoever else connects holds nobody up, and a rank that comes too early may come again."""

import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import astuple, replace
from typing import Any

import msgpack
import pytest

from services.compute.group.channel import FRAME, send_frame
from services.compute.group.identity import LONGEST_HELLO, MAGIC, hello_of
from services.compute.group.remote import HELLO_S, connect_to_head, gather_ranks
from shared.process.errors import StartupError, Unready
from shared.process.settings import ComputeSettings
from tests.deployment import free_port
from tests.waiting import wait_until

SLOW_S = 60.0  # a machine that does much else


def settings_of(num_ranks: int = 2, wait_s: float = SLOW_S) -> ComputeSettings:
    return ComputeSettings(tensor_parallel_size=num_ranks, rank=0, master=f"127.0.0.1:{free_port()}", group_wait_s=wait_s)


def connected(settings: ComputeSettings) -> socket.socket:
    """A connection to rank 0, once it listens."""
    found: list[socket.socket] = []

    def connect() -> bool:
        with suppress(OSError):
            found.append(socket.create_connection(("127.0.0.1", int(settings.master.rpartition(":")[2])), timeout=SLOW_S))
        return bool(found)

    wait_until(connect, description="rank 0 listens")
    return found[0]


def arriving(arrive: Any) -> threading.Thread:
    thread = threading.Thread(target=arrive)
    thread.start()
    return thread


def test_whoever_sends_a_byte_at_times_does_not_hold_rank_0() -> None:
    settings = settings_of()
    held_s: list[float] = []

    def drip() -> None:
        began_at = time.monotonic()
        with connected(settings) as connection, suppress(OSError):
            connection.sendall(FRAME.pack(LONGEST_HELLO))
            while time.monotonic() < began_at + SLOW_S:
                connection.sendall(b"\1")
                time.sleep(0.1)
        held_s.append(time.monotonic() - began_at)
        connect_to_head(settings, 1).close()

    thread = arriving(drip)
    for peer in gather_ranks(settings):
        peer.close()
    thread.join()
    assert held_s[0] < 5 * HELLO_S


@pytest.mark.parametrize("change", [{"use": "tea"}, {"use": ["commands"]}, {"rank": "1"}, {"settings": {"dtype": 1}}, {"version": 3}, {"host": None}])
def test_a_hello_of_another_form_is_no_rank(change: dict[str, Any]) -> None:
    settings = settings_of()

    def say() -> None:
        hello = replace(hello_of(settings, 1), **change)
        with connected(settings) as connection:
            send_frame(connection, msgpack.packb([MAGIC, *astuple(hello)]))
            assert connection.recv(1) == b""
        connect_to_head(settings, 1).close()

    thread = arriving(say)
    for peer in gather_ranks(settings):
        peer.close()
    thread.join()


def test_a_rank_whose_place_is_taken_may_come_again() -> None:
    """And one that no group has may not."""
    settings, errors = settings_of(3), list[StartupError]()

    def join() -> None:
        connected(settings).close()
        first = connect_to_head(settings, 1)
        for rank in (1, 7):
            with pytest.raises(StartupError) as error:
                connect_to_head(settings, rank)
            errors.append(error.value)
        connect_to_head(settings, 2).close()
        first.close()

    thread = arriving(join)
    for peer in gather_ranks(settings):
        peer.close()
    thread.join()
    assert [(type(each), each.exit_code) for each in errors] == [(Unready, 1), (StartupError, 2)]
    assert re.fullmatch(r"--rank 1 is taken: rank 1 of 3 \(pid \d+\) has it", str(errors[0]))


def test_ranks_that_do_not_come_in_time_may_come_again() -> None:
    settings = settings_of(wait_s=0.1)
    for meet in (lambda: gather_ranks(settings), lambda: connect_to_head(settings, 1)):
        with pytest.raises(Unready):
            meet()
