"""The launcher is killed: what it started ends by itself, in order, nothing is lost, and the next
launcher goes on from the logs.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from shared.wire.stage import LIFELINE
from tests.deployment import free_port
from tests.pipeline.up import Up
from tests.waiting import wait_until

BODY = {
    "model": "penstock-demo",
    "prompt": "The",
    "max_tokens": 400,
    "temperature": 0.9,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
}
BODY["stream_options"] = {"include_position": True}
FLAGS = ("--dtype", "float32")


def chunks(lines: list[str]) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def text_of(lines: list[str]) -> str:
    return "".join(choice["text"] for chunk in chunks(lines) for choice in chunk.get("choices", ()))


def last_id_of(lines: list[str]) -> str:
    return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")][-1]


def stream(up: Up, *, kill: bool = False) -> list[str]:
    """The lines of the stream; the launcher is killed in the middle of it, which compute waits for."""
    lines: list[str] = []
    [compute] = [child for child in up.children() if "services.compute" in child.cmdline()]
    try:
        with httpx.stream("POST", f"{up.url}/v1/completions", json=BODY, timeout=60, trust_env=False) as response:
            for line in response.iter_lines():
                lines.append(line)
                if kill and line.startswith("id: ") and int(line.removeprefix("id: ")) >= 20:
                    compute.send_signal(signal.SIGSTOP)
                    up.process.kill()
                    up.process.wait()
                    kill = False
        return lines
    finally:
        compute.send_signal(signal.SIGCONT)


@pytest.mark.more
def test_a_launcher_that_is_killed_mid_stream_loses_nothing_and_starts_no_second_redis(tmp_path: Path) -> None:
    """The second one goes on where the first was. It is killed too, and its Redis does not end: the third names it."""
    first = Up(tmp_path, *FLAGS)
    children = first.children()
    try:
        whole = text_of(stream(first))
        received = stream(first, kill=True)
        assert chunks(received)[-1]["error"]["code"] == "gateway_draining"  # as with SIGTERM
    finally:
        first.end()
    second = Up(tmp_path, *FLAGS)  # waits for the rest of the first
    try:
        assert not [child for child in children if child.is_running()]
        redis = [child for child in second.children() if "valkey" in child.name()]
        assert len(redis) == 1
        answer_id = next(chunk["id"] for chunk in chunks(received) if "id" in chunk)
        headers = {"Last-Event-ID": last_id_of(received)}
        resumed = httpx.get(f"{second.url}/v1/streams/{answer_id}", headers=headers, timeout=60, trust_env=False)
        assert resumed.status_code == 200, resumed.text
        assert len(text_of(received)) < len(whole)
        assert text_of(received) + text_of(resumed.text.splitlines()) == whole
        check_that_its_redis_is_named(second, redis[0])
    finally:
        second.end()


def check_that_its_redis_is_named(up: Up, redis: psutil.Process) -> None:
    others = [child for child in up.children() if child != redis]
    try:
        redis.send_signal(signal.SIGSTOP)
        up.process.kill()
        up.process.wait()
        code = (
            "import sys; from services.operator import cli, lifeline; lifeline.REST_TIMEOUT_S = 1.0; "
            "sys.exit(cli.main())"
        )
        arguments = [
            "up",
            "--model",
            "demo",
            "--port",
            str(free_port()),
            "--data-dir",
            str(up.data_dir),
            "--log-level",
            "error",
        ]
        second = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
        assert second.returncode == 2
        assert f"redis (process {redis.pid})" in second.stderr and len(second.stderr.splitlines()) == 1, second.stderr
    finally:
        redis.send_signal(signal.SIGCONT)
        wait_until(lambda: not any(each.is_running() for each in [redis, *others]), description="all have ended")


def test_a_stage_that_hangs_does_not_outlive_its_launcher() -> None:
    code = """
import signal, sys, time
import shared.wire.stage
shared.wire.stage.STOP_TIMEOUT_S = 0.2
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
shared.wire.stage.run_stage(lambda: time.sleep(60))
"""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command,
        env={**os.environ, LIFELINE: str(reader)},
        pass_fds=(reader,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(reader)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    os.close(writer)  # what the kernel does when the launcher dies
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and b"the launcher is gone" in errors
