"""Pages of other origins: no page of the web uses a gateway whose operator did not name its origin."""

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
    {"Origin": "http://localhost.evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://127.0.0.1.evil.example:80"},
    {"Origin": "https://app.evil.example"},
    {"Origin": "chrome-extension://abcdefgh", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "file://"},
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
GETS = (
    "/v1/models",
    "/v1/files",
    "/v1/batches",
    "/v1/streams/resp_x",
    "/v1/responses/resp_x",
    "/live",
    "/metrics",
    "/api/tags",
)


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_origin_gets_nothing_done(
    gateways: Deployment, backstage: Backstage, headers: dict[str, str]
) -> None:
    with httpx.Client(base_url=gateways.url(), timeout=60, trust_env=False) as client:
        before = backstage.client.xlen(requests(NAME).key)
        answers = [client.post(path, json=body, headers=headers | PLAIN) for path, body in POSTS.items()]
        answers.append(client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}, headers=headers))
        answers += [client.get(path, headers=headers) for path in GETS]
        answers.append(client.delete("/v1/files/file-x", headers=headers))
        assert [(each.url.path, each.status_code) for each in answers if each.status_code != 403] == []
        assert all("origin" in each.text for each in answers)
        assert backstage.client.xlen(requests(NAME).key) == before and not backstage.client.keys("file:*")
        assert (
            client.get("/health", headers=headers).status_code == 200
            and client.get("/", headers=headers).status_code == 200
        )


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
            {"Origin": own.replace("http:", "https:"), "X-Forwarded-Proto": "https"},  # behind a proxy that speaks TLS
        ):
            assert client.get("/v1/models", headers=headers).status_code == 200, headers
            assert client.post("/v1/completions", json={}, headers=headers).status_code == 400, headers


APPLICATIONS = (
    "app://obsidian.md",
    "tauri://localhost",
    "http://tauri.localhost",
    "https://tauri.localhost",
    "capacitor://localhost",
    "ionic://localhost",
    "vscode-webview://0a1b2c",
    "vscode-file://vscode-app",
)
THIS_MACHINE = (
    "http://localhost:3000",
    "https://localhost",
    "http://127.0.0.1:8080",
    "http://[::1]:9",
    "http://localhost:1420",
)


def status_of(url: str, origin: str, **headers: str) -> int:
    """Ask for the models as a page of this origin. It may read the answer unless it is refused."""
    answer = httpx.get(
        url + "/v1/models",
        headers=headers | {"Origin": origin, "Sec-Fetch-Site": "cross-site"},
        timeout=60,
        trust_env=False,
    )
    assert (answer.headers.get("access-control-allow-origin") == origin) == (answer.status_code != 403)
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
        "Access-Control-Request-Private-Network": "true",  # as a page of the web asks for a server on this machine
    }
    preflight = httpx.options(url + "/v1/models", headers=asked, timeout=60, trust_env=False)
    is_let_in = answer.status_code != 403
    assert (preflight.status_code == 200) == is_let_in == ("access-control-allow-origin" in preflight.headers)
    assert ("access-control-allow-private-network" in preflight.headers) == is_let_in
    return answer.status_code


@pytest.mark.parametrize("origin", APPLICATIONS + THIS_MACHINE)
def test_desktop_applications_and_pages_of_this_machine_are_let_in(
    gateways: Deployment, backstage: Backstage, origin: str
) -> None:
    assert status_of(gateways.url(), origin) == 200


def test_pages_of_the_user_s_machine_don_t_use_a_server_for_everybody(deployment: Deployment, own: Backstage) -> None:
    """Other machines reach it, and no key keeps a page of theirs out."""
    start_gateways(deployment, host="0.0.0.0", auth=False)
    assert {status_of(deployment.url(), each) for each in APPLICATIONS} == {200}
    assert {status_of(deployment.url(), each) for each in THIS_MACHINE} == {403}


def test_with_keys_they_need_one(deployment: Deployment, own: Backstage) -> None:
    key = "k" * 40
    start_gateways(deployment, host="0.0.0.0", api_key=key)
    for origin in (*APPLICATIONS, *THIS_MACHINE):
        assert status_of(deployment.url(), origin) == 401
        assert status_of(deployment.url(), origin, Authorization=f"Bearer {key}") == 200


def test_the_same_host_over_another_scheme_is_another_origin(gateways: Deployment, backstage: Backstage) -> None:
    for origin, told, status in (
        ("https://chat.example", {}, 403),
        ("https://chat.example", {"X-Forwarded-Proto": "http"}, 403),
        ("http://chat.example", {"X-Forwarded-Proto": "https"}, 403),
        ("http://chat.example", {}, 403),  # and then no loopback name
        ("https://chat.example", {"X-Forwarded-Proto": "https, http"}, 403),
    ):
        answer = httpx.get(
            gateways.url() + "/v1/models",
            headers={"Host": "chat.example", "Origin": origin} | told,
            timeout=60,
            trust_env=False,
        )
        code = answer.json()["error"]["code"]
        is_own = origin.partition(":")[0] == told.get("X-Forwarded-Proto", "http").partition(",")[0]
        assert (answer.status_code, code) == (status, "host_not_allowed" if is_own else "origin_not_allowed")


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
        assert status_of(deployment.url(), headers["Origin"]) == status
