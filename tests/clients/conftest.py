"""The scripted model behind a gateway, for tests of what clients send."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.scripted.pipeline import start_scripted
from tests.conftest import check_keys, running_redis
from tests.deployment import Deployment

SECRET = "word-4711"
SCRIPT = {
    "tasks": [
        {
            "phrase": "Read the file",
            "turns": [{"call": "read", "arguments": {"path": "a.txt"}}, {"say": "It says {found}."}],
            "find": SECRET,
        }
    ],
    "otherwise": "Understood.",
}


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Deployment]:
    """It has a window that agents' requests fit in."""
    folder = tmp_path_factory.mktemp("scripted")
    script = folder / "script.json"
    script.write_text(json.dumps(SCRIPT))
    with running_redis(folder / "redis", redis_binary) as url:
        deployment = start_scripted(url, folder, script)
        yield deployment
        deployment.stop()
        check_keys(url)
