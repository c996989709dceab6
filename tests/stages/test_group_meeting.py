"""Ranks of several hosts meet: whoever else connects holds nobody up, and a rank that comes too
early may come again.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import astuple, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from services.compute.models.architectures import read_config
from services.compute.ranks.group.channel import FRAME, Channel, send_frame
from services.compute.ranks.group.commands import Rendezvous
from services.compute.ranks.group.ends import Group, Member
from services.compute.ranks.group.identity import LONGEST_HELLO, MAGIC, hello_of
from services.compute.ranks.group.peer import Peer
from services.compute.ranks.group.remote import HELLO_S, connect_to_first, gather_ranks
from services.compute.ranks.parallel.distributed import LOOPBACK, listen, refuse_shared_device
from services.compute.ranks.parallel.stage import PipelineStage
from services.compute.ranks.place import Placement, connect
from services.compute.weights.fingerprint import with_drafts
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError, Unready
from shared.process.settings import ComputeSettings
from tests.deployment import free_port
from tests.waiting import wait_until

SLOW_S = 60.0  # a machine that does much else


def settings_of(num_ranks: int = 2, wait_s: float = SLOW_S) -> ComputeSettings:
    return ComputeSettings(
        tensor_parallel_size=num_ranks, rank=0, master=f"127.0.0.1:{free_port()}", group_wait_s=wait_s
    )


def connected(settings: ComputeSettings) -> socket.socket:
    """A connection to rank 0, once it listens."""
    found: list[socket.socket] = []

    def connect() -> bool:
        with suppress(OSError):
            found.append(
                socket.create_connection(("127.0.0.1", int(settings.master.rpartition(":")[2])), timeout=SLOW_S)
            )
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
        connect_to_first(settings, 1).close()

    thread = arriving(drip)
    for peer in gather_ranks(settings):
        peer.close()
    thread.join()
    assert held_s[0] < 5 * HELLO_S


@pytest.mark.parametrize(
    "change",
    [{"use": "tea"}, {"use": ["commands"]}, {"rank": "1"}, {"settings": {"dtype": 1}}, {"version": 3}, {"host": None}],
)
def test_a_hello_of_another_form_is_no_rank(change: dict[str, Any]) -> None:
    settings = settings_of()

    def say() -> None:
        hello = replace(hello_of(settings, 1), **change)
        with connected(settings) as connection:
            send_frame(connection, msgpack.packb([MAGIC, *astuple(hello)]))
            assert connection.recv(1) == b""
        connect_to_first(settings, 1).close()

    thread = arriving(say)
    for peer in gather_ranks(settings):
        peer.close()
    thread.join()


def test_a_rank_whose_place_is_taken_may_come_again() -> None:
    """And one that no group has may not."""
    settings, errors = settings_of(3), list[StartupError]()

    def join() -> None:
        connected(settings).close()
        first = connect_to_first(settings, 1)
        for rank in (1, 7):
            with pytest.raises(StartupError) as error:
                connect_to_first(settings, rank)
            errors.append(error.value)
        connect_to_first(settings, 2).close()
        first.close()

    thread = arriving(join)
    for peer in gather_ranks(settings):
        peer.close()
    thread.join()
    assert [(type(each), each.exit_code) for each in errors] == [(Unready, 1), (StartupError, 2)]
    assert re.fullmatch(r"--rank 1 is taken: rank 1 of 3 \(pid \d+\) has it", str(errors[0]))


def test_ranks_that_do_not_come_in_time_may_come_again() -> None:
    settings = settings_of(wait_s=0.1)
    for meet in (lambda: gather_ranks(settings), lambda: connect_to_first(settings, 1)):
        with pytest.raises(Unready):
            meet()


MEET = """
import sys
from datetime import timedelta
import psutil, torch, torch.distributed
from services.compute.ranks.parallel.distributed import choose_interface, join, listen, meet_at
rank, port, device, wait = int(sys.argv[1]), int(sys.argv[2]), torch.device("cpu"), timedelta(seconds=float(sys.argv[3]))
choose_interface("127.0.0.1")
store = join("127.0.0.1", port, wait) if rank else listen("127.0.0.1", wait)
print(store.port, flush=True)
group = meet_at(store, rank, 2, device, wait)
if rank == 0:
    print(*{each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"}, flush=True)
found = torch.full((1,), rank)
torch.distributed.broadcast(found, 1, group=group)
print(found.item(), flush=True)
"""  # noqa: E501


def start(rank: int, port: int, wait_s: float) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    command = [sys.executable, "-c", MEET, str(rank), str(port), str(wait_s)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.more
def test_ranks_meet_at_the_address_that_they_were_given_and_no_other() -> None:
    head = start(0, 0, SLOW_S)
    assert head.stdout is not None
    other = start(1, int(head.stdout.readline()), SLOW_S)
    assert head.communicate(timeout=SLOW_S)[0].split() == ["127.0.0.1", "1"]
    assert other.communicate(timeout=SLOW_S)[0].split()[1:] == ["1"]


def head_that_waits_alone() -> None:
    settings = ComputeSettings(tensor_parallel_size=2, group_wait_s=0.5, group_timeout_s=SLOW_S)
    ours, theirs = socket.socketpair()
    watch, their_watch = socket.socketpair()
    with (
        theirs,
        their_watch,
        Group(settings, [Peer(1, 2, socket.gethostname(), os.getpid(), Channel(ours), watch)], None, 1) as group,
    ):
        began_at = time.monotonic()
        with pytest.raises(
            Unready, match=r"the ranks did not meet within --group-wait-s 0\.5, at a port of 127\.0\.0\.1: "
        ):
            connect(settings, torch.device("cpu"), group)
        assert time.monotonic() - began_at < SLOW_S / 2
        rendezvous = Channel(theirs).receive()
        assert isinstance(rendezvous, Rendezvous) and rendezvous.device == "cpu"


def test_a_head_whose_ranks_do_not_meet_it_says_so_in_time() -> None:
    """In a process of its own: torch counts the group that it has begun, and would look for those
    after it by another name than their other ranks.
    """
    call = f"from {__name__} import head_that_waits_alone; head_that_waits_alone()"
    subprocess.run([sys.executable, "-c", call], check=True, timeout=2 * SLOW_S)


def test_a_rank_with_another_device_does_not_meet() -> None:
    settings = ComputeSettings(tensor_parallel_size=2)
    ours, theirs = socket.socketpair()
    watch, their_watch = socket.socketpair()
    with (
        theirs,
        their_watch,
        Member(settings, 1, Peer(0, 2, socket.gethostname(), os.getpid(), Channel(ours), watch), None, 1) as member,
    ):
        Channel(theirs).send(Rendezvous(1, "cuda"))
        with pytest.raises(
            StartupError,
            match="rank 1 has the device cpu, and rank 0 has cuda: the ranks of a group must have the same",
        ):
            connect(settings, torch.device("cpu"), member)


def test_two_ranks_with_one_gpu_are_refused_in_one_line() -> None:
    store = listen(LOOPBACK, timedelta(seconds=10))
    refuse_shared_device(store, 0, "a GPU-1")
    refuse_shared_device(store, 1, "a GPU-2")
    with pytest.raises(
        StartupError,
        match=(
            "rank 2 has the same GPU as rank 0: with --master, give each rank of a host its own by CUDA_VISIBLE_DEVICES"
        ),
    ):
        refuse_shared_device(store, 2, "a GPU-1")


def test_more_stages_than_layers_are_refused_in_one_line() -> None:
    config = read_config(open_model("demo").config, 64)
    place = Placement(stage=PipelineStage(0, config.num_layers + 1, None))
    with pytest.raises(
        StartupError,
        match=rf"--pipeline-parallel-size {config.num_layers + 1}: the model has {config.num_layers} layers",
    ):
        place.stage_of(config)


def drafted_by(folder: Path) -> ComputeSettings:
    return ComputeSettings(speculate="draft", draft_model=str(folder))


def test_ranks_compare_the_models_that_draft(tmp_path: Path) -> None:
    settings = drafted_by(DEMO_MODEL)
    assert with_drafts("fp_1", settings, ("lookup",)) == with_drafts("fp_1", ComputeSettings(), ("self",)) == "fp_1"
    other = tmp_path / "other"
    shutil.copytree(DEMO_MODEL, other)
    names = [with_drafts("fp_1", drafted_by(path), ("draft",)) for path in (DEMO_MODEL, other)]
    assert names[0] == names[1] != "fp_1"
    with next(other.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    assert with_drafts("fp_1", drafted_by(other), ("draft",)) != names[0]
