"""The embedded Redis on a TCP port, which every user of the machine reaches: it wants the password
of the data folder.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from services.operator.cli import redis_of
from services.operator.lifeline import REDIS_PASSWORD
from services.operator.redis_server import password_for, password_of, socket_path, start_server, url_of
from shared.process.errors import StartupError
from shared.wire.job_queue import make_queue, send_batch
from shared.wire.transport import connect
from tests.deployment import free_port
from tests.waiting import wait_until


def test_the_embedded_redis_wants_a_password_where_it_listens_on_a_port(
    tmp_path: Path, redis_binary: Path | None
) -> None:
    port, password, path = free_port(), password_of(tmp_path), tmp_path / "redis-password"
    assert password == password_of(tmp_path) == path.read_text() and path.stat().st_mode & 0o777 == 0o600
    process = start_server(tmp_path, port=port, password=password, binary=redis_binary)
    url = url_of(tmp_path)
    assert password in url
    try:

        def is_up() -> bool:
            try:
                with connect(url) as client:
                    return bool(client.ping())
            except redis.ConnectionError:
                return False

        wait_until(is_up, description="Redis answers who says the password")
        for given in (None, "another"):
            with redis.Redis(port=port, password=given) as client, pytest.raises(redis.AuthenticationError):
                client.set("a", 1)
        assert redis_of(None, tmp_path) == url, "as penstock status finds it"
        with redis.Redis(port=port, password=password) as client:
            assert client.set("a", 1)
        assert password not in Path(f"/proc/{process.pid}/cmdline").read_text()
        queue = make_queue(url)
        with connect(url) as client:
            assert send_batch(queue, client, "batch_a") and client.llen("celery:jobs") == 1, "Celery says it, too"
        queue.close()
        watchman = [sys.executable, "-m", "services.operator.lifeline", str(socket_path(tmp_path))]
        subprocess.run(watchman, stdin=subprocess.DEVNULL, env={**os.environ, REDIS_PASSWORD: password}, check=True)
        assert process.wait(60) == 0, "and so does the watchman, who ends it"
    finally:
        process.kill()
        process.wait()


def test_a_password_that_somebody_wrote_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "redis-password").write_text("x\nuser eve on nopass ~* +@all\n")
    with pytest.raises(StartupError, match="remove it"):
        password_of(tmp_path)
    assert password_for(tmp_path, 0) == "" and not (tmp_path / "redis-password").exists(), (
        "a Redis without a port wants none"
    )
    assert url_of(tmp_path) == f"unix://{socket_path(tmp_path)}"


@pytest.mark.usefixtures("redis_url")
def test_what_the_embedded_redis_keeps_is_for_nobody_else(tmp_path: Path) -> None:
    """It is what was asked and answered."""
    kept = [path for path in (tmp_path / "redis").rglob("*") if not path.is_socket()]
    assert kept and [path.name for path in kept if path.stat().st_mode & 0o077] == []
