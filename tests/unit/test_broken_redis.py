"""An embedded Redis that can't read its own data: the launcher says why, and what to do, and gives up."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from services.operator.launcher import REDIS, Child, Launcher
from services.operator.lifeline import Lifeline
from services.operator.redis_server import start_server, url_of, why_it_ended
from shared.process.errors import StartupError
from shared.process.settings import UpSettings
from tests.waiting import wait_until


def answers(data_dir: Path) -> bool:
    with redis.Redis.from_url(url_of(data_dir)) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


@pytest.fixture
def lifeline(tmp_path: Path) -> Iterator[Lifeline]:
    """A launcher's, which the end of its process would close."""
    lifeline = Lifeline(tmp_path)
    yield lifeline
    for file in (lifeline._own, lifeline._shared):
        file.close()
    for descriptor in (
        lifeline._launcher_lives,
        lifeline._only_launcher_writes,
        lifeline._anyone_lives,
        lifeline._launcher_and_stages_write,
    ):
        os.close(descriptor)


def test_a_broken_append_only_file_is_named_with_the_command_that_mends_it(lifeline: Lifeline, tmp_path: Path) -> None:
    process = start_server(tmp_path)
    wait_until(lambda: answers(tmp_path), description="it answers")
    with redis.Redis.from_url(url_of(tmp_path)) as client:
        for number in range(100):
            client.set(f"key-{number}", "value" * 20)
    process.terminate()
    process.wait()
    [log] = (tmp_path / "appendonlydir").glob("*.incr.aof")
    content = bytearray(log.read_bytes())
    content[6000:6040] = b"garbage!" * 5
    log.write_bytes(content)

    launcher = Launcher(UpSettings(data_dir=tmp_path))
    launcher.lifeline = lifeline
    launcher.servers = [Child(REDIS, partial(start_server, tmp_path, inherited=lifeline.of_redis))]
    ends_at = time.monotonic() + 60
    with pytest.raises(
        StartupError, match="the embedded Redis can't start: Bad file format reading the append only file"
    ) as raised:
        while time.monotonic() < ends_at:
            launcher._keep_alive()
            time.sleep(0.02)
    told = str(raised.value)
    assert "\n" not in told and launcher.servers[0].num_failures == 3

    command = re.search(r"all after it: (bash -c .*)$", told)
    assert command is not None
    subprocess.run(command[1], shell=True, input=b"y\n", check=True, stdout=subprocess.DEVNULL)
    process = start_server(tmp_path)
    wait_until(lambda: answers(tmp_path), description="what the message says helps")
    with redis.Redis.from_url(url_of(tmp_path)) as client:
        assert 0 < client.dbsize() < 100, "what was written before the break is there"
    process.terminate()
    process.wait()


def test_other_last_words_are_told_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "redis.log").write_text(
        "1:M 1 Jan * starting\n1:M 1 Jan # Failed listening on port 1, aborting.\n1:M 1 Jan * bye\n"
    )
    assert why_it_ended(tmp_path) == "Failed listening on port 1, aborting."
    (tmp_path / "redis.log").write_text("")
    assert why_it_ended(tmp_path).endswith("redis.log says more")
