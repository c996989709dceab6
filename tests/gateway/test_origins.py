"""Pages of other origins: whoever's browser shows them, they use no gateway that did not name them."""

import httpx
import pytest

from shared.wire.streams import requests
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways

PLAIN = {"Content-Type": "text/plain"}  # which a page may send without asking first
FOREIGN = (
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "https://evil.example"},
    {"Origin": "http://localhost:9", "Sec-Fetch-Site": "same-site"},
    {"Origin": "null", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},  # of an <img>, which has no Origin
    {"Sec-Fetch-Site": "same-site"},
)
POSTS = {
    "/v1/completions": {"model": NAME, "prompt": "Hi"},
    "/v1/chat/completions": {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"model": NAME, "input": "Hi"},
    "/v1/messages": {"model": NAME, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
    "/api/generate": {"model": NAME, "prompt": "Hi"},
    "/tokenize": {"model": NAME, "prompt": "Hi"},
    "/v1/batches": {},
    "/nowhere": {},
}
GETS = ("/v1/models", "/v1/files", "/v1/batches", "/v1/streams/resp_x", "/v1/responses/resp_x", "/live", "/metrics", "/api/tags")


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_origin_gets_nothing_done(gateways: Deployment, backstage: Backstage, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=gateways.url(), timeout=60, trust_env=False) as client:
        before = backstage.client.xlen(requests(NAME).key)
        answers = [client.post(path, json=body, headers=headers | PLAIN) for path, body in POSTS.items()]
        answers.append(client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}, headers=headers))
        answers += [client.get(path, headers=headers) for path in GETS]
        answers.append(client.delete("/v1/files/file-x", headers=headers))
        assert [(each.url.path, each.status_code) for each in answers if each.status_code != 403] == []
        assert all("origin" in each.text for each in answers)
        assert backstage.client.xlen(requests(NAME).key) == before and not backstage.client.keys("file:*")
        assert client.get("/health", headers=headers).status_code == 200 and client.get("/", headers=headers).status_code == 200


def test_the_own_page_the_user_and_programs_are_let_in(gateways: Deployment) -> None:
    own = gateways.url()
    with httpx.Client(base_url=own, timeout=60, trust_env=False) as client:
        for headers in (
            {},
            {"Origin": own},
            {"Origin": own, "Sec-Fetch-Site": "same-origin"},
            {"Sec-Fetch-Site": "same-origin"},
            {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
            {"Origin": "chrome-extension://abcdefgh", "Sec-Fetch-Site": "none"},
            {"Origin": own.replace("http:", "https:")},  # behind a proxy that speaks TLS
        ):
            assert client.get("/v1/models", headers=headers).status_code == 200, headers
            assert client.post("/v1/completions", json={}, headers=headers).status_code == 400, headers


def test_origins_that_the_operator_named_are_let_in(deployment: Deployment, own: Backstage) -> None:
    start_gateways(deployment, allow_origin="https://chat.example,null")
    for headers, status in (
        ({"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}, 200),
        ({"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 200),
        ({"Origin": "https://chat.example.evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://chat.example"}, 403),
    ):
        answer = httpx.get(deployment.url() + "/v1/models", headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == status, headers
        assert ("access-control-allow-origin" in answer.headers) == (status == 200)
