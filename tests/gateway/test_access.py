"""Access: keys, tenants and their limits, over all gateways; and what is one tenant's is nobody else's."""

import json
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from select import select
from typing import Any

import httpx
import pytest
import trustme
from pydantic import SecretStr

from services.gateway.answering.infill import SPELLINGS
from services.gateway.api.files.routes import MAX_UPLOADS, MAX_UPLOADS_OF_ONE
from services.gateway.http import auth
from services.gateway.http.auth import KeyRing
from services.gateway.http.server import check_tls
from services.operator import cli
from services.requests.store.batches.store import MAX_RUNNING
from services.requests.store.tenants.api_keys import KeyFile, add_key, check_exposure, read_keys, revoke_key, rotate_key
from shared.process.errors import StartupError
from shared.process.settings import GatewaySettings
from shared.wire.streams import quota_key, running_key
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.gateway.backstage import ALIAS, NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.streams import BODY, streaming
from tests.waiting import wait_until

WHOLE = BODY | {"stream": False, "stream_options": None}
OWN_KEY = "an-operator-made-this-up"


class Site:
    """Two gateways that ask for keys, and a pipeline that the test plays."""

    def __init__(self, deployment: Deployment, backstage: Backstage, path: Path) -> None:
        self.deployment = deployment
        self.backstage = backstage
        self.path = path
        self.first, self.second = deployment.ports
        self.http = httpx.Client(timeout=60, trust_env=False)

    def key(self, name: str, **limits: Any) -> str:
        """A new key that both gateways know."""
        return self._known(add_key(self.path, name, **limits))

    def _known(self, key: str) -> str:
        for gateway in (self.first, self.second):
            wait_until(
                lambda gateway=gateway: self.get("/v1/models", key, gateway).status_code == 200,
                description=f"{gateway} has read the key",
            )
        return key

    def get(self, path: str, key: str = "", gateway: str = "", **headers: str) -> httpx.Response:
        return self.http.get(self.deployment.url(gateway or self.first) + path, headers=bearer(key) | headers)

    def post(self, path: str, body: Any, key: str = "", gateway: str = "", **headers: str) -> httpx.Response:
        return self.http.post(
            self.deployment.url(gateway or self.first) + path, json=body, headers=bearer(key) | headers
        )

    def background(self, key: str, **fields: Any) -> httpx.Response:
        """A response that stays in the pipeline until the test ends it."""
        return self.post(
            "/v1/responses", {"model": NAME, "input": "x", "background": True, "max_output_tokens": 10} | fields, key
        )

    def end(self, count: int) -> None:
        """The next so many requests."""
        for request in self.backstage.take(count):
            self.backstage.end(request)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("access")
    path = folder / "keys.json"
    with running_redis(folder / "redis", redis_binary) as url:
        deployment, backstage = Deployment(url, folder), Backstage(url)
        try:
            add_key(path, "somebody")
            start_gateways(deployment, 2, keys_file=path, api_key=OWN_KEY)
            site = Site(deployment, backstage, path)
            yield site
            site.http.close()
        finally:
            deployment.stop()
            backstage.close()


def error_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def test_only_a_key_that_is_good_opens_anything_but_health(site: Site) -> None:
    key = site.key("reader")
    for path in ("/health", "/health/", "/v1/health", "/ready", "/"):
        assert site.get(path).status_code in (200, 503), path
    every = site.get("/openapi.json").json()["paths"]
    closed = [path for path in every if path not in ("/health", "/v1/health", "/ready", "/")]
    assert {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/tokenize",
        "/metrics",
        "/v1/models",
    } <= set(closed)
    for path in [*closed, "/no/such/path", "//metrics", "/HEALTH"]:
        for wrong in ("", "sk-penstock-wrong", key[:-1], key + "x", "é" * 40, "x" * 2000):
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                shown = {"authorization": b"Bearer " + wrong.encode()} if wrong else {}
                reply = site.http.request(method, site.deployment.url() + path, headers=shown)
                assert reply.status_code == 401 and reply.headers["WWW-Authenticate"] == "Bearer", (method, path, wrong)
            if wrong and wrong.isascii():
                break
    assert error_of(site.get("/v1/models", "wrong")) == (401, "invalid_api_key")
    anthropic = site.post("/v1/messages", {"model": NAME})
    assert anthropic.json()["error"]["type"] == "authentication_error" and anthropic.json()["type"] == "error"
    assert site.get("/v1/models", key).status_code == 200 == site.get("/v1/models", **{"x-api-key": key}).status_code
    assert site.get("/v1/models", **{"x-api-key": "wrong"}).status_code == 401
    assert site.get("/v1/models", Authorization=f"bearer {key}").status_code == 200
    assert site.get("/v1/models", Authorization=f"Basic {key}").status_code == 401


def test_what_shows_all_tenants_takes_an_administrator(site: Site) -> None:
    user = site.key("user")
    assert (
        error_of(site.get("/metrics", user)) == error_of(site.get("/live", user)) == (403, "insufficient_permissions")
    )
    assert (
        error_of(site.post("/live/kill", {}, user)) == (403, "insufficient_permissions")
        and site.get("/playground/modules/main.js").status_code == 200
    )
    assert (
        site.get("/metrics", site.key("root", is_admin=True)).status_code
        == 200
        == site.get("/metrics", OWN_KEY).status_code
    )


def test_a_key_that_is_revoked_or_rotated_is_worth_nothing_at_every_gateway(site: Site) -> None:
    key = site.key("leaver")
    tenant_id = {each.name: each.tenant_id for each in read_keys(site.path)}["leaver"]
    rotated = site._known(rotate_key(site.path, "leaver"))
    assert {each.name: each.tenant_id for each in read_keys(site.path)}["leaver"] == tenant_id
    for gateway in (site.first, site.second):
        assert site.get("/v1/models", key, gateway).status_code == 401
    revoke_key(site.path, "leaver")
    for gateway in (site.first, site.second):
        wait_until(
            lambda gateway=gateway: site.get("/v1/models", rotated, gateway).status_code == 401,
            description="the key is worth nothing",
        )


def test_a_broken_or_missing_file_opens_nothing_and_closes_nothing(site: Site) -> None:
    key, good = site.key("steady"), site.path.read_text()
    try:
        for content in ("{", '{"keys": [{"name": "x", "rpm": 1}]}', ""):
            site.path.write_text(content)
            time.sleep(1.1)
            assert (site.get("/v1/models", key).status_code, site.get("/v1/models", "x").status_code) == (200, 401)
        site.path.write_text(KeyFile().model_dump_json())
        site.path.chmod(0o666)
        time.sleep(1.1)
        assert site.get("/v1/models", key).status_code == 200, "what everybody may write was read"
        site.path.chmod(0o600)  # as the log asks for
        wait_until(
            lambda: site.get("/v1/models", key).status_code == 401,
            description="the file is read, though only its mode has changed",
        )
        site.path.write_text(good)
        wait_until(lambda: site.get("/v1/models", key).status_code == 200, description="the key is good again")
        site.path.unlink()
        time.sleep(1.1)
        assert (site.get("/v1/models", key).status_code, site.get("/v1/models").status_code) == (200, 401)
    finally:
        site.path.write_text(good)
        site.path.chmod(0o600)
    assert (
        "every user of this machine may write" in site.deployment.logs()
        and "key file unreadable" in site.deployment.logs()
        and key not in site.deployment.logs()
        and key not in good
    )


def test_a_key_is_revoked_though_its_file_could_not_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the gateway has no descriptor left, for a moment."""
    monkeypatch.setattr(auth, "CHECK_EVERY_S", 0.0)
    path = tmp_path / "keys.json"
    key, other = add_key(path, "revoked"), add_key(path, "other")
    ring = KeyRing(GatewaySettings(keys_file=path))
    assert ring.tenant_of(key) is not None
    revoke_key(path, "revoked")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with path.open() as file:  # the next has a higher number
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno(), hard))
        try:
            assert ring.tenant_of(key) is not None and ring.tenant_of(other) is not None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ring.tenant_of(key) is None and ring.tenant_of(other) is not None


def test_a_tenant_sees_and_uses_its_models_only(site: Site) -> None:
    other = Backstage(site.deployment.redis_url, "stone", ())
    try:
        site.deployment.wait_live("compute-of-stone")
        key, all_models = site.key("modest", models=[ALIAS]), site.key("any")
        wait_until(
            lambda: len(site.get("/v1/models", all_models).json()["data"]) == 3, description="both models are served"
        )
        assert {card["id"] for card in site.get("/v1/models", key).json()["data"]} == {NAME, ALIAS}
        assert {card["name"] for card in site.get("/api/tags", key).json()["models"]} == {NAME, ALIAS}
        for path, body in (
            ("/v1/completions", WHOLE | {"model": "stone"}),
            ("/v1/chat/completions", {"model": "stone", "messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"model": "stone", "input": "x"}),
            ("/v1/embeddings", {"model": "stone", "input": "x"}),
            ("/tokenize", {"model": "stone", "prompt": "x"}),
        ):
            refused = site.post(path, body, key)
            assert (
                error_of(refused) == (404, "model_not_found")
                and "stone" not in refused.json()["error"]["message"].split("served:")[1]
            ), path
        assert (
            site.post(
                "/v1/messages", {"model": "stone", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}, key
            ).status_code
            == 404
        )
        assert (
            site.post("/api/chat", {"model": "stone", "messages": [{"role": "user", "content": "x"}]}, key).status_code
            == 404
        )
        assert (
            site.post("/api/show", {"model": "stone"}, key).status_code
            == 404
            == site.get("/v1/models/stone", key).status_code
        )
    finally:
        other.close()


def test_requests_a_minute_are_bounded_over_all_gateways_and_told_in_headers(site: Site) -> None:
    key, body = site.key("slow", requests_per_minute=3), {"model": NAME, "input": "x", "background": True}
    told, began_at = [], time.monotonic()
    for gateway in (site.first, site.second, site.first):
        reply = site.post("/v1/responses", body, key, gateway)
        assert reply.status_code == 200
        told.append((reply.headers["x-ratelimit-limit-requests"], reply.headers["x-ratelimit-remaining-requests"]))
    assert told == [("3", "2"), ("3", "1"), ("3", "0")]
    refused = site.post("/v1/responses", body, key, site.second)
    assert error_of(refused) == (429, "rate_limit_exceeded") and refused.json()["error"]["type"] == "rate_limit_error"
    passed_s = time.monotonic() - began_at  # in which a part of the next request's share has come
    assert (
        20 - passed_s <= int(refused.headers["retry-after"]) <= 20
        and refused.headers["x-ratelimit-remaining-requests"] == "0"
    )
    assert refused.headers["x-ratelimit-reset-requests"] == "60s"
    assert site.get("/v1/models", key).status_code == 200  # what computes nothing costs nothing
    assert site.post("/v1/responses", {"model": NAME}, key).status_code == 400
    assert "x-ratelimit-limit-requests" not in site.post("/v1/responses", body, site.key("fast")).headers
    site.end(4)


def test_limits_fill_again_though_the_clock_of_redis_went_back(site: Site) -> None:
    key = site.key("out-of-time", requests_per_minute=120)
    tenant_id = {each.name: each.tenant_id for each in read_keys(site.path)}["out-of-time"]
    with site.deployment.redis() as client:
        client.hset(
            quota_key(tenant_id), mapping={"requests": 0, "tokens": "", "at": (int(client.time()[0]) + 3600) * 1000}
        )
    assert error_of(site.background(key)) == (429, "rate_limit_exceeded")
    wait_until(lambda: site.background(key).status_code == 200, description="half a second's share is there")
    site.end(1)


def test_tokens_a_minute_are_bounded_and_a_request_that_never_fits_is_told_so(site: Site) -> None:
    key = site.key("frugal", tokens_per_minute=100)
    never = site.post("/v1/completions", WHOLE | {"max_tokens": 100}, key)
    assert error_of(never) == (400, "request_exceeds_limit") and never.json()["error"]["param"] == "max_tokens"
    began_at = time.monotonic()
    assert site.background(key, max_output_tokens=60).headers["x-ratelimit-remaining-tokens"] == "39"
    refused = site.background(key, max_output_tokens=60)
    passed_s = time.monotonic() - began_at  # in which some of the 22 that are wanting have come
    assert (
        error_of(refused) == (429, "rate_limit_exceeded")
        and 13.2 - passed_s <= int(refused.headers["retry-after"]) <= 14
    )
    assert site.background(key, max_output_tokens=30).status_code == 200
    site.end(2)


def test_places_of_a_tenant_come_back_as_its_requests_end_whoever_ends_them(site: Site) -> None:
    key, other = site.key("narrow", max_concurrency=2), site.key("beside", max_concurrency=2)
    (tenant_id,) = (each.tenant_id for each in read_keys(site.path) if each.name == "narrow")
    assert error_of(site.post("/v1/completions", WHOLE | {"n": 3}, key)) == (400, "request_exceeds_limit")
    assert site.background(key).status_code == 200 == site.background(key).status_code
    for gateway in (site.first, site.second):
        assert error_of(site.post("/v1/completions", WHOLE, key, gateway)) == (429, "rate_limit_exceeded")
    assert site.background(other).status_code == 200
    first, second, third = site.backstage.take(3)
    site.backstage.end(first)
    assert site.background(key).status_code == 200
    assert site.background(key).status_code == 429
    site.backstage.end(second)
    assert (
        site.backstage.client.hlen(running_key(tenant_id)) == 2
        and site.backstage.client.ttl(running_key(tenant_id)) > 0
    )
    site.backstage.end(third)
    site.end(1)


def test_what_a_gateway_asks_of_the_tokenizer_fits_in_few_places(site: Site) -> None:
    """An infill looks for the model's tokens: a key of two places has two of these questions at once."""
    key = site.key("infilling", max_concurrency=2)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(site.post, "/v1/completions", {"model": NAME, "prompt": "a", "suffix": "b"}, key)
        for _ in range((len(SPELLINGS) * 4) // 2):  # three tokens a spelling, and how a prompt begins
            for question in site.backstage.take(2):
                assert question.task == "tokenize"
                site.backstage.write(question, 1, text='{{"tokens": [5, 6]}}', finish=1)  # none of them is one token
        assert error_of(asking.result()) == (400, "model_not_supported")


def test_what_is_stored_and_streamed_is_the_tenants_own(site: Site) -> None:
    owner, other, root = site.key("owner"), site.key("other"), site.key("admin", is_admin=True)
    response_id = site.background(owner).json()["id"]
    absent = "resp_" + "0" * 32
    goes_on = [
        ("POST", "/v1/responses", {"model": NAME, "input": "x", "previous_response_id": "{}"}),
        ("GET", "/v1/streams/{}", None),
    ]
    is_seen = [
        ("GET", "/v1/responses/{}", None),
        ("GET", "/v1/responses/{}?stream=true", None),
        ("GET", "/v1/responses/{}/input_items", None),
        ("POST", "/v1/responses/{}/cancel", None),
        ("DELETE", "/v1/responses/{}", None),
    ]
    for key, routes in ((other, [*is_seen, *goes_on]), (root, goes_on)):  # an administrator sees it, and may end it
        for method, path, body in routes:
            seen = [
                site.http.request(
                    method,
                    site.deployment.url() + path.format(each),
                    headers=bearer(key),
                    json=json.loads(json.dumps(body).replace("{}", each)) if body else None,
                )
                for each in (response_id, absent)
            ]
            assert [reply.status_code for reply in seen] == [404 if body is None else 400] * 2, (method, path)
            assert seen[0].text == seen[1].text.replace(absent, response_id), (
                "what is another's looks like what is not there"
            )
    assert site.get(f"/v1/responses/{response_id}", owner, site.second).json()["status"] in ("queued", "in_progress")
    with streaming(site.deployment, headers=bearer(owner)) as stream:
        background, request = site.backstage.take(2)
        site.backstage.write(request, 1)
        stream.wait("1 ")
        streamed = request.request_id.rpartition(".")[0]
        assert site.get(f"/v1/streams/{streamed}", other).status_code == 404 and not stream.is_over
        site.backstage.write(request, 2, finish=2)
        stream.wait_end()
    assert "2 " in site.get(f"/v1/streams/{streamed}", owner, site.second).text
    site.backstage.end(background)


def test_files_and_batches_are_the_tenants_own(site: Site) -> None:
    owner, other, root = site.key("files-owner"), site.key("files-other"), site.key("files-admin", is_admin=True)
    upload = site.http.post(
        site.deployment.url() + "/v1/files",
        files={"file": ("x.jsonl", b"{}")},
        data={"purpose": "batch"},
        headers=bearer(owner),
    )
    file_id = upload.json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = site.post("/v1/batches", body, owner).json()["id"]
    for key in (other, root):
        assert [site.get(path, key).json()["data"] for path in ("/v1/files", "/v1/batches")] == [[], []]
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
            assert site.get(path, key).status_code == 404
        assert site.http.delete(site.deployment.url() + f"/v1/files/{file_id}", headers=bearer(key)).status_code == 404
        assert error_of(site.post("/v1/batches", body, key)) == (400, "file_not_found")
    assert (
        site.get(f"/v1/batches/{batch_id}", other).status_code
        == 404
        == site.post(f"/v1/batches/{batch_id}/cancel", {}, other).status_code
    )
    assert site.get(f"/v1/files/{file_id}/content", owner, site.second).content == b"{}"
    assert site.get("/v1/batches", owner, site.second).json()["data"][0]["id"] == batch_id
    assert site.post(f"/v1/batches/{batch_id}/cancel", {}, owner).json()["status"] == "cancelling"


def test_slow_uploads_of_one_tenant_leave_room_for_another(site: Site) -> None:
    slow, other = site.key("slow-uploads"), site.key("other-uploads")
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        f"Content-Length: 9999\r\nAuthorization: Bearer {slow}\r\n\r\n--x\r\n"
    )

    def upload(key: str) -> int:
        reply = site.http.post(
            site.deployment.url(site.first) + "/v1/files",
            files={"file": ("x", b"{}")},
            data={"purpose": "batch"},
            headers=bearer(key),
        )
        return reply.status_code

    with ExitStack() as stack:
        address = "127.0.0.1", site.deployment.ports[site.first]
        connections = [stack.enter_context(socket.create_connection(address)) for _ in range(MAX_UPLOADS)]
        for connection in connections:
            connection.sendall(head.encode())
        wait_until(
            lambda: len(select(connections, [], [], 0)[0]) == MAX_UPLOADS - MAX_UPLOADS_OF_ONE,
            description="the others are refused",
        )
        assert (upload(slow), upload(other)) == (503, 200)
    wait_until(lambda: upload(slow) == 200, description="connections that are gone make room")


def test_no_more_than_a_hundred_batches_of_a_tenant_run_however_they_are_asked_for(site: Site) -> None:
    owner = site.key("many-batches")
    upload = site.http.post(
        site.deployment.url() + "/v1/files",
        files={"file": ("x.jsonl", b"{}")},
        data={"purpose": "batch"},
        headers=bearer(owner),
    )
    body = {"input_file_id": upload.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    with ThreadPoolExecutor(16) as pool:
        gateways = [(site.first, site.second)[number % 2] for number in range(MAX_RUNNING + 15)]
        replies = list(pool.map(lambda gateway: site.post("/v1/batches", body, owner, gateway), gateways))
    assert Counter(each.status_code for each in replies) == {200: MAX_RUNNING, 429: 15}
    found: list[str] = []
    while True:
        page = site.get(f"/v1/batches?limit=30{f'&after={found[-1]}' if found else ''}", owner).json()
        found += [each["id"] for each in page["data"]]
        if not page["has_more"]:
            break
    assert sorted(found) == sorted(each.json()["id"] for each in replies if each.status_code == 200)
    assert site.get("/v1/batches?after=batch_of_nobody", owner).status_code == 400
    site.post(f"/v1/batches/{found[0]}/cancel", {}, owner)
    assert site.post("/v1/batches", body, owner).status_code == 429, "it is ended by a worker, and there is none"


def test_cached_prefixes_and_priorities_are_by_tenant(site: Site) -> None:
    """Two tenants' requests are never found in one cache: their salts differ, whatever they give,
    and nobody can spell another's.
    """
    keys = {name: site.key(name, priority=priority) for name, priority in (("urgent", -5), ("patient", 7))}
    ids = {each.name: each.tenant_id for each in read_keys(site.path)}
    salts = set()
    for name, priority in (("urgent", -5), ("patient", 7)):
        for salt in (None, "mine", f"{ids['urgent']}\0", f"{ids['urgent']}\0mine"):
            assert site.background(keys[name], cache_salt=salt, priority=1).status_code == 200
            [request] = site.backstage.take()
            site.backstage.end(request)
            assert request.scheduling.priority == priority + 1
            salts.add(request.scheduling.cache_salt)
    assert len(salts) == 8


def test_keys_are_made_and_shown_at_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "keys.json"
    file = ["--keys-file", str(path)]
    assert cli.main(["keys", "add", "team", "--rpm", "60", "--models", "a,b", "--admin", *file]) == 0
    secret = capsys.readouterr().out.strip()
    assert (
        secret.startswith("sk-penstock-")
        and len(secret) > 50
        and secret not in path.read_text()
        and path.stat().st_mode & 0o777 == 0o600
    )
    for wrong, said in (
        (["add", "team"], "already"),
        (["add", "a b"], "name"),
        (["revoke", "nobody"], "no key"),
    ):
        assert cli.main(["keys", *wrong, *file]) == 2
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    assert cli.main(["keys", "list", *file]) == 0
    listed = capsys.readouterr().out
    assert "team" in listed and "60" in listed and "a,b" in listed and "other" not in listed
    monkeypatch.setenv("PENSTOCK_KEYS_FILE", str(path))  # as gateways have it
    assert cli.main(["keys", "revoke", "team"]) == 0 and read_keys(path) == ()
    path.write_text('{"keys": 1}')
    assert cli.main(["keys", "list", *file]) == 2


def test_without_keys_a_gateway_listens_on_loopback_only(
    deployment: Deployment, tmp_path: Path, own: Backstage
) -> None:
    absent = tmp_path / "none.json"
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(GatewaySettings(host=host, keys_file=absent))
    for host in ("0.0.0.0", "::", "", "192.0.2.1"):
        with pytest.raises(StartupError, match="loopback only"):
            check_exposure(GatewaySettings(host=host, keys_file=absent))
        check_exposure(GatewaySettings(host=host, keys_file=absent, auth=False))
        check_exposure(GatewaySettings(host=host, keys_file=absent, api_key=SecretStr(OWN_KEY)))
    with pytest.raises(StartupError, match="at least 16"):
        KeyRing(GatewaySettings(keys_file=absent, api_key=SecretStr("short")))
    refused = deployment.start("gateway", host="0.0.0.0", keys_file=absent)
    assert deployment.processes.pop(refused).wait(200) == 2
    assert (
        deployment.logs().count("penstock: without API keys the gateway listens on loopback only") == 1
        and "Traceback" not in deployment.logs()
    )
    deployment.ports.clear()
    start_gateways(deployment, host="0.0.0.0", keys_file=absent, auth=False)
    add_key(absent, "late")
    time.sleep(1.2)
    assert deployment.get("/v1/models").status_code == 200


def test_keys_that_are_made_while_a_gateway_serves_everybody_close_it(
    deployment: Deployment, tmp_path: Path, own: Backstage
) -> None:
    start_gateways(deployment, keys_file=tmp_path / "keys.json")
    assert deployment.get("/metrics").status_code == 200
    for host, status in (
        ("localhost:80", 200),
        ("[::1]:80", 200),
        ("127.0.0.2", 200),
        ("rebound.example", 403),
        ("[fe80::1]", 403),
        ("127.0.0.1.example", 403),
    ):
        assert (
            httpx.get(deployment.url() + "/v1/models", headers={"Host": host}, timeout=60, trust_env=False).status_code
            == status
        ), host
    assert httpx.get(
        deployment.url() + "/ready", headers={"Host": "rebound.example"}, timeout=60, trust_env=False
    ).status_code in (200, 503)
    key = add_key(tmp_path / "keys.json", "first")
    wait_until(lambda: deployment.get("/metrics").status_code == 401, description="the gateway asks for a key")
    revoke_key(tmp_path / "keys.json", "first")
    wait_until(
        lambda: (
            httpx.get(deployment.url() + "/v1/models", headers=bearer(key), timeout=60, trust_env=False).status_code
            == 401
        ),
        description="no key is left",
    )
    assert deployment.get("/v1/models").status_code == 401


def test_a_certificate_that_clients_will_refuse_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = trustme.CA()
    for number, (not_after, said) in enumerate(
        ((datetime.now(UTC) - timedelta(days=1), "certificate has expired"), (None, ""))
    ):
        path = tmp_path / f"{number}.pem"
        authority.issue_cert("localhost", not_after=not_after).private_key_and_cert_chain_pem.write_to_path(path)
        path.chmod(0o600)
        caplog.clear()
        check_tls(GatewaySettings(tls_certificate=path))
        assert said in caplog.text and bool(caplog.text) == bool(said)


@pytest.mark.parametrize(
    ("mode", "said"),
    [(0o600, ""), (0o640, ""), (0o444, "everybody on this machine may read"), (0o666, None), (0o660, None)],
)
def test_a_tls_key_is_nobody_elses(
    mode: int, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "own.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(path)
    path.chmod(mode)
    if said is None:
        with pytest.raises(StartupError, match="others may write it; chmod 600"):
            check_tls(GatewaySettings(tls_certificate=path))
    else:
        check_tls(GatewaySettings(tls_certificate=path))
        assert said in caplog.text and bool(caplog.text) == bool(said)


def test_a_gateway_with_a_certificate_speaks_https_only(deployment: Deployment, tmp_path: Path, own: Backstage) -> None:
    certificate, key = tmp_path / "gateway.crt", tmp_path / "gateway.key"
    authority = trustme.CA()
    made = authority.issue_cert("localhost")
    made.private_key_pem.write_to_path(key)
    made.cert_chain_pems[0].write_to_path(certificate)
    other = tmp_path / "other.key"
    authority.issue_cert("localhost").private_key_pem.write_to_path(other)
    for wrong, said in (
        ({"tls_certificate": tmp_path / "none.crt"}, "No such file"),
        ({"tls_certificate": certificate}, "not PEM"),
        ({"tls_certificate": key, "tls_key": key}, "not PEM"),
        ({"tls_key": key}, "needs --tls-certificate"),
        ({"tls_certificate": certificate, "tls_key": other}, "not this certificate's"),
        ({"tls_certificate": certificate, "tls_key": tmp_path / "none.key"}, "--tls-key .*No such file"),
    ):
        with pytest.raises(StartupError, match=said):
            check_tls(GatewaySettings(**wrong))
    gateway = deployment.start("gateway", tls_certificate=certificate, tls_key=key)
    deployment.wait_live(gateway)
    url = f"localhost:{deployment.ports[gateway]}/v1/models"
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with httpx.Client(verify=context, timeout=60, trust_env=False) as client:
        wait_until(lambda: client.get(f"https://{url}").json()["data"], description="it answers over TLS")
        with pytest.raises(httpx.HTTPError):
            client.get(f"http://{url}")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://{url}", timeout=60, trust_env=False)


def test_an_administrator_sees_and_ends_what_a_revoked_key_began(site: Site) -> None:
    gone, admin, curious = site.key("gone"), site.key("ender", is_admin=True), site.key("curious")
    [tenant] = [each.tenant_id for each in read_keys(site.path) if each.name == "gone"]
    response = site.background(gone).json()["id"]
    upload = {"purpose": (None, "batch"), "file": ("lines.jsonl", b"{}")}
    file = site.http.post(site.deployment.url(site.first) + "/v1/files", files=upload, headers=bearer(gone)).json()[
        "id"
    ]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = site.post("/v1/batches", body, gone).json()["id"]
    with streaming(site.deployment, gateway=site.first, headers=bearer(gone)) as stream:
        begun = site.backstage.take(2)
        revoke_key(site.path, "gone")
        wait_until(lambda: site.get("/v1/models", gone).status_code == 401, description="the key is worth nothing")
        running = {each["id"]: each for each in site.get("/v1/responses", admin).json()["data"]}
        [completion] = {each.request_id.removesuffix(".0") for each in begun} - {response}
        assert (
            running[response]["tenant_id"] == running[completion]["tenant_id"] == tenant
            and running[completion]["kind"] == "text_completion"
        )
        assert {each["id"] for each in site.get(f"/v1/responses?tenant={tenant}", admin).json()["data"]} == {
            response,
            completion,
        }
        for name in ("*", tenant):
            [listed] = [
                each for each in site.get(f"/v1/batches?tenant={name}", admin).json()["data"] if each["id"] == batch
            ]
            assert listed["tenant"] == {"id": tenant, "name": "gone"}
        for path in ("/v1/responses", f"/v1/responses?tenant={tenant}", f"/v1/batches?tenant={tenant}"):
            assert error_of(site.get(path, curious)) == (403, "insufficient_permissions"), path
        for path in (f"/v1/responses/{response}", f"/v1/batches/{batch}"):
            assert site.get(path, curious).status_code == 404 and site.get(path, admin).json()["id"] in (
                response,
                batch,
            )
            assert site.post(f"{path}/cancel", {}, curious).status_code == 404
        assert site.post(f"/v1/batches/{batch}/cancel", {}, admin).json()["status"] == "cancelling"
        for each in (response, completion):
            assert site.post(f"/v1/responses/{each}/cancel", {}, admin).json()["status"] == "ended"
        stream.wait_end()
        assert stream.finish_reasons == ["cancelled"] or stream.error is not None
    assert site.get(f"/v1/responses/{response}", admin).json()["status"] == "cancelled"
    assert (
        site.post("/v1/responses", {"model": NAME, "input": "x", "previous_response_id": response}, admin).status_code
        == 400
    ), "it is not the administrator's"
