"""A group's processes: they come up together, and end together within seconds, with one line that
says why. They run no model.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.compute.ranks.group.identity import Hello, hello_of
from services.compute.ranks.group.remote import connect_to_first, gather_ranks
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.deployment import free_port
from tests.stages.group_rank import COMMAND, WORD
from tests.waiting import wait_until

TIMEOUT_S = 2.0  # of silence
SLOW_S = 60.0  # a machine that does much else
FEW_CORES = "the threads of all ranks are more than the cores"


class Rank:
    """A process of group_rank.py."""

    def __init__(self, log: Path, *flags: str, **environment: str) -> None:
        self.log = log
        variables = {
            "PENSTOCK_GROUP_TIMEOUT_S": str(TIMEOUT_S),
            "PENSTOCK_GROUP_WAIT_S": str(SLOW_S),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*COMMAND, *flags],
                env={**os.environ, **variables, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def hear(self) -> list[str]:
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words, f"it ended instead: {self.lines()}"
        return words

    def lines(self) -> list[str]:
        """The log, without the warning of a machine with few cores."""
        return [line for line in self.log.read_text().splitlines() if FEW_CORES not in line]

    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return found

    def ends(self) -> int:
        return self.process.wait(SLOW_S)


@contextmanager
def running(*ranks: Rank) -> Iterator[None]:
    """However the test goes, none of the processes is left."""
    try:
        yield
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                for child in rank.children():
                    child.kill()
            rank.process.kill()
            rank.process.communicate()


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def test_ranks_share_commands_and_memory_and_end_when_the_group_closes(tmp_path: Path) -> None:
    head = Rank(tmp_path / "log", "--tensor-parallel-size", "3")
    with running(head):
        ready, *pids, num_threads = head.hear()
        children = head.children()
        assert ready == "ready" and [int(pid) for pid in pids] == [each.pid for each in children]
        assert int(num_threads) == max(1, len(os.sched_getaffinity(0)) // 3)
        head.say("step")
        assert head.hear() == ["stepped", *[WORD.decode().replace(" ", "_")] * 2]
        head.say("close")
        assert head.ends() == 0 and are_gone(children)
    assert head.lines() == []


def kill(number: signal.Signals, rank: int) -> Callable[[Rank], None]:
    return lambda head: os.kill([head.process, *head.children()][rank].pid, number)


def kill_while_asleep(head: Rank) -> None:
    head.say("sleep")
    time.sleep(0.2)
    kill(signal.SIGKILL, 2)(head)


FAULTS: dict[str, tuple[Callable[[Rank], None], str]] = {
    "a rank is killed": (kill(signal.SIGKILL, 1), r"reason='rank 1 of 3 \(pid \d+\) died: signal 9 \(SIGKILL\)'"),
    "a rank makes a mistake": (
        lambda head: head.say("break"),
        r"the group ends reason=\"rank 1 of 3 \(pid \d+\): RuntimeError\('a mistake'\)\"",
    ),
    "rank 0 is killed": (kill(signal.SIGKILL, 0), ""),
    "a rank is stopped": (
        kill(signal.SIGSTOP, 2),
        r"reason='rank 2 of 3 \(pid \d+\) has been silent for \d\.\d s: it is stopped, or cut off",
    ),
    "a rank's step hangs": (
        lambda head: head.say("hang"),
        r"reason='rank 1 of 3 \(pid \d+\): its RunStep takes longer than --step-timeout-s 0.5'",
    ),
    "a rank is killed while rank 0 is in native code": (
        kill_while_asleep,
        r"reason='rank 2 of 3 \(pid \d+\) died: signal 9",
    ),
    "rank 0 is stopped": (
        kill(signal.SIGSTOP, 0),
        r"of rank 2: the group ends reason='rank 0 of 3 \(pid \d+\) has been silent for \d\.\d s",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_dies_or_hangs_ends_its_group_with_one_line(name: str, tmp_path: Path) -> None:
    fault, line = FAULTS[name]
    head = Rank(tmp_path / "log", "--tensor-parallel-size", "3", GROUP_STEP_TIMEOUT_S="0.5")
    with running(head):
        head.hear()
        children = head.children()
        began_at = time.monotonic()
        fault(head)
        wait_until(lambda: are_gone(children), description=f"no rank is left: {head.lines()}", timeout_s=SLOW_S)
        assert time.monotonic() - began_at < TIMEOUT_S + SLOW_S / 4
        if name == "rank 0 is stopped":
            os.kill(head.process.pid, signal.SIGCONT)
        assert head.ends() == (-9 if name == "rank 0 is killed" else 1)
        found = [each for each in head.lines() if re.search(line, each)]
        assert len(found) == 1 or not line, head.lines()
        assert (head.lines().count("RuntimeError: a mistake") == 1) == (name == "a rank makes a mistake"), (
            "its traceback is written"
        )


@pytest.mark.more
def test_a_pause_of_the_whole_group_ends_nothing(tmp_path: Path) -> None:
    head = Rank(tmp_path / "log", "--tensor-parallel-size", "3")
    with running(head):
        head.hear()
        ranks = [head.process.pid, *(each.pid for each in head.children())]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in ranks:
                os.kill(pid, number)
            time.sleep(2.5 * TIMEOUT_S if number == signal.SIGSTOP else TIMEOUT_S)
        head.say("step")
        assert head.hear()[0] == "stepped"
        head.say("close")
        assert head.ends() == 0
    assert head.lines() == []


def test_ranks_that_start_end_with_rank_0_and_say_nothing(tmp_path: Path) -> None:
    """There are more of them than cores, and rank 0 says so."""
    num_cores = len(os.sched_getaffinity(0))
    head = Rank(tmp_path / "log", "--tensor-parallel-size", str(num_cores + 4))
    with running(head):
        children = wait_until(head.children, description="ranks")
        kill(signal.SIGKILL, 0)(head)
        assert head.ends() == -9
        wait_until(lambda: are_gone(children), description="no rank is left")
        assert (
            head.lines() == []
            and f"{FEW_CORES}: each step waits for the slowest threads={num_cores + 4} cores={num_cores}"
            in head.log.read_text()
        )


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        ("GROUP_FAILS=1", r"penstock: rank 1 of 3 \(pid \d+\): the weights are too large"),
        ("GROUP_FAILS=0", r"penstock: the weights are too large"),
        (
            "GROUP_OTHER=2",
            r"penstock: rank 2 of 3 \(pid \d+\) has the fingerprint fp_other, and rank 0 has fp_same: the ranks of a "
            r"group must have the same",
        ),
    ],
)
@pytest.mark.more
def test_a_rank_that_can_not_load_ends_its_group_in_one_line(variable: str, line: str, tmp_path: Path) -> None:
    name, value = variable.split("=")
    head = Rank(tmp_path / "log", "--tensor-parallel-size", "3", **{name: value})
    with running(head):
        children = wait_until(lambda: len(found := head.children()) == 2 and found, description="ranks")
        assert head.ends() == 2
        assert len(head.lines()) == 1 and re.fullmatch(line, head.lines()[0]), head.lines()
        wait_until(lambda: are_gone(children), description="no rank is left")


class Wire:
    """TCP to rank 0, through which nothing passes any more once it is cut."""

    def __init__(self, port: int) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.master = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.is_cut = False
        self._port = port
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.server.accept()
                try:
                    onward = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    client.close()
                    continue
                self._connections += [client, onward]
                for source, sink in ((client, onward), (onward, client)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_cut:
                    sink.sendall(data)
            if not self.is_cut:
                sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in (self.server, *self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def two_hosts(tmp_path: Path, wire: Wire, port: int, **environment: str) -> tuple[Rank, Rank]:
    sizes = ("--pipeline-parallel-size", "2")
    head = Rank(tmp_path / "head", *sizes, "--rank", "0", "--master", f"127.0.0.1:{port}", **environment)
    return head, Rank(
        tmp_path / "other", *sizes, "--rank", "1", "--world-size", "2", "--master", wire.master, **environment
    )


def test_ranks_on_two_hosts_end_when_they_are_cut_off_from_each_other(tmp_path: Path) -> None:
    port = free_port()
    wire = Wire(port)
    head, other = two_hosts(tmp_path, wire, port)
    with running(head, other):
        assert head.hear() == ["ready", str(other.process.pid), str(len(os.sched_getaffinity(0)))]
        head.say("step")
        assert head.hear() == ["stepped", "nothing"]
        wire.is_cut = True
        assert head.ends() == other.ends() == 1
        for rank, line in (
            (head, rf"rank 1 of 2 \(pid {other.process.pid}\)"),
            (other, rf"of rank 1: the group ends reason='rank 0 of 2 \(pid {head.process.pid}\)"),
        ):
            assert re.search(
                rf"{line} has been silent for \d\.\d s: it is stopped, or cut off \(--group-timeout-s 2\)",
                rank.lines()[-1],
            )
    wire.close()


@pytest.mark.more
def test_ranks_on_two_hosts_refuse_another_model_on_both_sides(tmp_path: Path) -> None:
    port = free_port()
    wire = Wire(port)
    head, other = two_hosts(tmp_path, wire, port, GROUP_OTHER="1")
    with running(head, other):
        assert head.ends() == other.ends() == 2
        for rank in (head, other):
            assert re.search(
                r"rank 1 of 2 \(pid \d+\) has the fingerprint fp_other, and rank 0 has fp_same: ", rank.lines()[-1]
            )
    wire.close()


@pytest.mark.more
@pytest.mark.parametrize("what", ["hang", "trip"])
def test_a_rank_of_another_host_that_is_in_a_step_when_the_group_closes_ends_with_0(what: str, tmp_path: Path) -> None:
    """Also if the step fails: whom it waits for may have ended."""
    port = free_port()
    wire = Wire(port)
    head, other = two_hosts(tmp_path, wire, port)
    with running(head, other):
        head.hear()
        head.say(what)
        head.say("close")
        assert head.ends() == other.ends() == 0
        assert not any("the group ends" in line or "silent" in line for line in (*head.lines(), *other.lines()))
    wire.close()


def told_to_stop(rank: Rank) -> bool:
    return any("a rank was asked to stop" in line for line in rank.lines())


@pytest.mark.more
def test_a_rank_on_another_host_that_is_told_to_stop_stops_the_group(tmp_path: Path) -> None:
    port = free_port()
    wire = Wire(port)
    head, other = two_hosts(tmp_path, wire, port)
    with running(head, other):
        head.hear()
        other.process.terminate()
        assert head.ends() == -signal.SIGTERM  # this head catches no signal
        assert other.ends() == 1
        assert told_to_stop(head)
    wire.close()


def join(settings: ComputeSettings, rank: int, errors: list[str]) -> threading.Thread:
    def connect() -> None:
        try:
            connect_to_first(settings, rank).close()
        except StartupError as error:
            errors.append(str(error))

    thread = threading.Thread(target=connect)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"version": "0.0.9"},
            r"rank 1 of 2 \(pid \d+\) has version 0\.0\.9, and rank 0 has \S+: the ranks of a group must have the same",
        ),
        (
            {"protocol": "00aa"},
            r"rank 1 of 2 \(pid \d+\) has protocol 00aa, and rank 0 has \S+: the ranks of a group must have the same",
        ),
        (
            {"settings": {"dtype": "float32"}},
            r"rank 1 of 2 \(pid \d+\) has --dtype float32, and rank 0 has auto: the ranks of a group must have the "
            r"same",
        ),
        (
            {"settings": {"later": "1"}},
            r"rank 1 of 2 \(pid \d+\) has --later 1, and rank 0 has none: the ranks of a group must have the same",
        ),
    ],
)
def test_a_rank_of_another_kind_is_refused_on_both_sides_before_it_loads(
    change: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ComputeSettings(tensor_parallel_size=2, rank=0, master=f"127.0.0.1:{free_port()}", group_wait_s=SLOW_S)
    ours = hello_of(settings, 1)

    changed = change | {"settings": ours.settings | change.get("settings", {})}

    def other_hello(settings: ComputeSettings, rank: int, use: str = "commands") -> Hello:
        return replace(ours, rank=rank, use=use, **(changed if rank else {}))

    monkeypatch.setattr("services.compute.ranks.group.remote.hello_of", other_hello)
    errors: list[str] = []
    thread = join(settings, 1, errors)
    with pytest.raises(StartupError, match=line):
        gather_ranks(settings)
    thread.join()
    assert len(errors) == 1 and re.fullmatch(line, errors[0])


def test_whoever_is_no_rank_does_not_disturb_those_that_come(tmp_path: Path) -> None:
    port = free_port()
    settings = ComputeSettings(tensor_parallel_size=3, rank=0, master=f"127.0.0.1:{port}", group_wait_s=SLOW_S)
    errors: list[str] = []

    def arrive() -> None:
        wait_until(lambda: connects(port, b"GET / HTTP/1.1\r\n\r\n"), description="rank 0 listens")
        connects(port, b"\x05\0\0\0hello")
        join(settings, 7, errors).join()
        for thread in [join(settings, rank, errors) for rank in (2, 1)]:
            thread.join()

    thread = threading.Thread(target=arrive)
    thread.start()
    peers = gather_ranks(settings)
    thread.join()
    assert [peer.rank for peer in peers] == [1, 2]
    assert errors == ["--rank 7: the ranks that come to rank 0 are 1 to 2"]
    for peer in peers:
        peer.close()


def connects(port: int, data: bytes) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=SLOW_S) as connection:
        connection.sendall(data)
        return True
    return False


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    settings = ComputeSettings(tensor_parallel_size=3, rank=0, master=f"127.0.0.1:{free_port()}", group_wait_s=0.2)
    with pytest.raises(
        StartupError, match=re.escape(f"ranks 1, 2 of 3 did not come to {settings.master} within --group-wait-s 0.2")
    ):
        gather_ranks(settings)
    with pytest.raises(
        StartupError,
        match=rf"--master {settings.master}: rank 0 did not answer within --group-wait-s 0.2: Connection refused",
    ):
        connect_to_first(settings, 1)
    with pytest.raises(StartupError, match="rank 0 listens at an address of its own host"):
        gather_ranks(settings.model_copy(update={"master": "192.0.2.1:29400"}))


@pytest.mark.more
def test_a_rank_that_can_not_be_run_is_said(tmp_path: Path) -> None:
    begin = (
        "from services.compute.ranks.group.ends import *; from shared.wire.stage import run_stage; settings = "
        "ComputeSettings(tensor_parallel_size=2); "
    )
    for command, code, line in (
        ("['sh', '-c', 'exit 2']", 2, r"penstock: rank 1 of 2 \(pid \d+\) died while it started: exit code 2"),
        (
            "['sh', '-c', 'kill -9 $$']",
            1,
            r"the group ends reason='rank 1 of 2 \(pid \d+\) died while it started: signal 9 \(SIGKILL\)'",
        ),
        ("['/nowhere']", 2, r"penstock: rank 1 of 2 can't be started: .*No such file or directory.*"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", f"{begin} run_stage(lambda: open_group(settings, {command}))"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == code and re.fullmatch(line, ended.stderr.strip()), ended.stderr
