"""What clients of today send is taken: the forms of their requests as `make clients ARGS=--record` kept them, with other content."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.scripted.pipeline import MODEL, start_scripted
from tests.conftest import running_redis

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
CALLS = [
    pytest.param(call, id=f"{file.stem} {call['method']} {call['path']} {number}")
    for file in RECORDED
    for number, call in enumerate(json.loads(file.read_text())["calls"])
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[str]:
    """In front of a model with a window that agents' requests fit in."""
    folder = tmp_path_factory.mktemp("scripted")
    script = folder / "script.json"
    script.write_text(json.dumps({"tasks": [], "otherwise": "Understood."}))
    with running_redis(folder / "redis", redis_binary) as url:
        deployment = start_scripted(url, folder, script)
        yield deployment.url()
        deployment.stop()


@pytest.mark.parametrize("call", CALLS)
def test_what_a_client_sends_is_taken(gateway: str, call: dict[str, Any]) -> None:
    body = call["body"] if call["body"] is None else call["body"] | ({"model": MODEL} if "model" in call["body"] else {})
    answer = httpx.request(call["method"], gateway + call["path"], json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    if call["method"] == "POST":
        assert "Understood." in answer.text or "error" not in answer.text, answer.text
