"""The requests of today's clients are taken: their forms as `make verify SUITE=clients
ARGS=--record` kept them, with other content.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.scripted.pipeline import MODEL
from tests.deployment import Deployment

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
CALLS = [
    pytest.param(call, id=f"{file.stem} {call['method']} {call['path']} {number}")
    for file in RECORDED
    for number, call in enumerate(json.loads(file.read_text())["calls"])
]


@pytest.mark.parametrize("call", CALLS)
def test_what_a_client_sends_is_taken(scripted: Deployment, call: dict[str, Any]) -> None:
    body = call["body"] | {"model": MODEL} if "model" in (call["body"] or {}) else call["body"]
    answer = httpx.request(call["method"], scripted.url() + call["path"], json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    events = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    assert all(each.get("type") not in ("error", "response.failed") and not each.get("error") for each in events), (
        answer.text
    )
