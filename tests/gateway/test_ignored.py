"""Fields that ask for what is not done: named in a header, or refused."""

from typing import Any

import httpx
import pytest

from services.requests.bodies.ignored import HEADER, MAX_NAMES
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.test_answers import answering

QUESTION: list[Any] = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": NAME, "messages": QUESTION},
    "/v1/completions": {"model": NAME, "prompt": "Hi"},
    "/v1/responses": {"model": NAME, "input": "Hi"},
    "/v1/messages": {"model": NAME, "messages": QUESTION, "max_tokens": 9},
    "/api/chat": {"model": NAME, "messages": QUESTION},
    "/api/generate": {"model": NAME, "prompt": "Hi"},
}


def answered(deployment: Deployment, backstage: Backstage, path: str, body: dict[str, Any]) -> httpx.Response:
    thread, _ = answering(backstage, ["ok"])
    answer = deployment.post(path, body)
    thread.join()
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [True, False])
def test_a_field_that_nobody_knows_is_taken_and_named_in_a_header(
    gateways: Deployment, backstage: Backstage, path: str, stream: bool
) -> None:
    plain = answered(gateways, backstage, path, ASKED[path] | {"stream": stream})
    assert HEADER not in plain.headers
    told = answered(
        gateways,
        backstage,
        path,
        ASKED[path] | {"stream": stream, "tempratur": 1, "thread": {"id": 2}, "nothing": None, "none": []},
    )
    assert told.headers[HEADER] == "tempratur, thread"


def test_the_header_names_what_is_deep_and_is_short_ascii(gateways: Deployment, backstage: Backstage) -> None:
    deep = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "mood": "good"}], "mood": "bad"}]}
    chat = answered(gateways, backstage, "/v1/chat/completions", ASKED["/v1/chat/completions"] | deep)
    assert chat.headers[HEADER] == "messages[0].mood, messages[0].content[0].mood"
    many = {f"é, \r\n{number}{'x' * 1000}": 1 for number in range(1000)}
    header = answered(gateways, backstage, "/v1/completions", ASKED["/v1/completions"] | many).headers[HEADER]
    assert len(header) < 4096 and header.isascii() and header.startswith("?? ??0xxx")
    few = answered(
        gateways, backstage, "/v1/completions", ASKED["/v1/completions"] | {f"f{number}": 1 for number in range(100)}
    ).headers[HEADER]
    assert few.split(", ") == [*(f"f{number}" for number in range(MAX_NAMES)), "..."]


def test_a_field_of_a_long_body_is_named_too(gateways: Deployment, backstage: Backstage) -> None:
    asked = ASKED["/v1/chat/completions"] | {"messages": [{"role": "user", "content": "x" * (1 << 20), "mood": 1}]}
    assert answered(gateways, backstage, "/v1/chat/completions", asked).headers[HEADER] == "messages[0].mood"


def test_what_would_change_the_answer_is_refused_by_name(gateways: Deployment) -> None:
    for path, field in (
        ("/v1/chat/completions", {"audio": {"voice": "alloy"}}),
        ("/v1/chat/completions", {"modalities": ["text", "audio"]}),
        ("/v1/completions", {"tools": [{}]}),
        ("/v1/chat/completions", {"mirostat": 2}),
    ):
        refused = gateways.post(path, ASKED[path] | field | {"tempratur": 1})
        [name] = field
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name) and HEADER not in refused.headers


def test_strict_fields_refuses_what_would_be_passed_over(deployment: Deployment, own: Backstage) -> None:
    start_gateways(deployment, strict_fields=True)
    for path, body in ASKED.items():
        refused = deployment.post(path, body | {"tempratur": 1, "mood": 2, "metadata": None})
        assert (
            refused.status_code == 400
            and "unknown or unsupported field: tempratur; unknown or unsupported field: mood" in refused.text
        )
    chat = deployment.post("/v1/chat/completions", ASKED["/v1/chat/completions"] | {"tempratur": 1})
    assert (chat.json()["error"]["param"], chat.json()["error"]["code"]) == ("tempratur", "unknown_parameter")
    assert deployment.post("/v1/embeddings", {"model": NAME, "input": "x", "nonsense": 1}).status_code == 400
