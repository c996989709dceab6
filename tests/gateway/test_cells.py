"""A gateway of two cells: who gets a request, limits over both, and what is told of them."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.cells import SURPLUS, beginning_of, chosen, earlier_of
from services.requests.store.cells import Cell, cells_of
from services.requests.store.tenants.api_keys import add_key, read_keys
from shared.process.errors import StartupError
from shared.process.settings import GatewaySettings
from shared.wire.streams import quota_key, running_key
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.waiting import wait_until

HOME, OTHER = Cell("home", "").mark, Cell("b", "").mark
ONLY_THERE = "card"  # a model that the other cell alone has
MOST = 4  # requests in the pipeline of a model


class Site:
    """Two gateways of two cells, and pipelines that the test plays. The other cell also has a model of its own."""

    def __init__(self, folder: Path, url: str, other_url: str) -> None:
        self.other_url = other_url
        self.path = folder / "keys.json"
        self.home, self.other, self.alone = Backstage(url), Backstage(other_url), Backstage(other_url, ONLY_THERE, ())
        self.deployment = Deployment(url, folder, {"PENSTOCK_CELL": f"b={other_url}"})
        self.root = add_key(self.path, "root", is_admin=True)
        self.settings: dict[str, Any] = {"keys_file": self.path, "max_requests": MOST}
        start_gateways(self.deployment, 2, **self.settings)
        self.http = httpx.Client(timeout=60, trust_env=False)

    def key(self, name: str, **limits: Any) -> tuple[str, str]:
        """A new key that the gateways know, and its tenant."""
        key = add_key(self.path, name, **limits)
        headers = {"Authorization": f"Bearer {key}"}
        for gateway in self.deployment.ports:
            url = self.deployment.url(gateway) + "/v1/models"
            wait_until(
                lambda url=url: self.http.get(url, headers=headers).status_code == 200, description="the key is known"
            )
        return key, next(each.tenant_id for each in read_keys(self.path) if each.name == name)

    def ask(self, key: str, text: str, model: str = NAME, number: int = 0) -> httpx.Response:
        """A response in the background, which stays in the pipeline until the test ends it."""
        body = {"model": model, "input": text, "background": True, "max_output_tokens": 10}
        return self.http.post(
            self.deployment.url(list(self.deployment.ports)[number % 2]) + "/v1/responses",
            json=body,
            headers={"Authorization": f"Bearer {key}"},
        )

    def end_all(self) -> None:
        for stage in (self.home, self.other, self.alone):
            while (count := stage.held()) > 0:
                for request in stage.take(count):
                    stage.end(request)

    def close(self) -> None:
        self.http.close()
        self.deployment.stop()
        for stage in (self.home, self.other, self.alone):
            stage.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("two-cells")
    with (
        running_redis(folder / "redis", redis_binary) as url,
        running_redis(folder / "other-redis", redis_binary) as other_url,
    ):
        site = Site(folder, url, other_url)
        try:
            yield site
        finally:
            site.close()


def marks_of(replies: list[httpx.Response]) -> set[str]:
    assert all(reply.status_code == 200 for reply in replies), [reply.text for reply in replies]
    return {reply.json()["id"][-4:] for reply in replies}


def test_models_of_all_cells_are_served_each_where_it_is(site: Site) -> None:
    key, _ = site.key("reader")
    headers = {"Authorization": f"Bearer {key}"}

    def models() -> set[str]:
        return {
            each["id"] for each in site.http.get(site.deployment.url() + "/v1/models", headers=headers).json()["data"]
        }

    wait_until(lambda: models() >= {NAME, ONLY_THERE}, description="models of both cells are listed")
    assert site.http.get(f"{site.deployment.url()}/v1/models/{ONLY_THERE}", headers=headers).status_code == 200
    assert marks_of([site.ask(key, "x", ONLY_THERE)]) == {OTHER}
    assert marks_of([site.ask(key, f"{number} beginnings", number=number) for number in range(MOST)]) == {HOME, OTHER}
    unknown = site.ask(key, "x", "paint")
    assert unknown.status_code == 404 and NAME in unknown.text and ONLY_THERE in unknown.text
    site.end_all()


def test_requests_a_minute_and_at_once_are_bounded_over_cells(site: Site) -> None:
    key, tenant_id = site.key("narrow", max_concurrency=3, requests_per_minute=30)
    replies = [site.ask(key, f"{number} of mine", number=number) for number in range(3)]
    assert len(marks_of(replies)) == 2, "in both cells"
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["29", "28", "27"]
    for number in range(4):
        refused = site.ask(key, f"{number} more", number=number)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
    site.end_all()
    again = [site.ask(key, f"{number} of mine", number=number) for number in range(3)]
    assert len(marks_of(again)) == 2, "places come back with their requests' ends"
    places: Any = site.home.client.hgetall(running_key(tenant_id))
    assert Counter(place.startswith(f"@{OTHER} 0 ".encode()) for place in places.values()) == Counter(
        reply.json()["id"][-4:] == OTHER for reply in again
    )
    site.end_all()


def test_places_in_a_cell_that_is_no_more_and_those_that_never_came_to_theirs_come_back(site: Site) -> None:
    key, tenant_id = site.key("left", max_concurrency=3)
    long_ago = int(time.time()) - 60
    site.home.client.hset(
        running_key(tenant_id),
        mapping={"x.0": f"@dead {long_ago} {NAME}", "y.0": f"@{OTHER} {long_ago} {NAME}", "z.0": f"@{OTHER} 0 {NAME}"},
    )
    assert len(marks_of([site.ask(key, f"{number} of mine", number=number) for number in range(3)])) == 2
    site.end_all()


def test_a_refused_request_is_not_charged(site: Site) -> None:
    key, tenant_id = site.key("many", requests_per_minute=12)
    began = time.monotonic()
    replies = [site.ask(key, f"{number}", ONLY_THERE, number) for number in range(MOST + 3)]
    assert Counter(reply.status_code for reply in replies) == {200: MOST, 429: 3}
    assert "the server is full" in replies[-1].json()["error"]["message"]
    left = float(site.home.client.hget(quota_key(tenant_id), "requests"))
    assert 12 - MOST <= left <= 12 - MOST + (time.monotonic() - began) / 5, "a fifth of one comes back a second"
    site.end_all()


def test_an_item_that_is_named_is_looked_for_in_its_own_cell(site: Site) -> None:
    found = {
        mark: earlier_of(SimpleNamespace(input=[{"type": "item_reference", "id": f"msg_{'0' * 28}{mark}_0"}]))[-4:]
        for mark in (HOME, OTHER)
    }
    assert found == {HOME: HOME, OTHER: OTHER}
    assert earlier_of(SimpleNamespace(input="text")) == "" == earlier_of(SimpleNamespace(input=[{"type": "message"}]))
    assert earlier_of(SimpleNamespace(previous_response_id="resp_1", input=[])) == "resp_1"


def test_one_cell_away_is_that_cells_trouble_alone(site: Site) -> None:
    """The last test of the site: the other cell's Redis does not come back."""
    key, tenant_id = site.key("calm", requests_per_minute=1000)

    def health() -> Any:
        return site.http.get(site.deployment.url() + "/health").json()

    assert health()["status"] == "ok" and len(health()["compute"]) == 3, health()
    site.other.close()
    site.alone.close()
    wait_until(lambda: "b: no compute replica is alive" in health()["problems"], description="it is told")
    site.other = Backstage(site.other_url)
    wait_until(lambda: health()["status"] == "ok", description="the other cell is back")
    site.other.client.shutdown(nosave=True)
    wait_until(
        lambda: any(each.startswith("b: redis can't serve") for each in health()["problems"]), description="it is told"
    )
    assert site.http.get(site.deployment.url() + "/ready").status_code == 200
    assert marks_of([site.ask(key, f"{number} beginnings", number=number) for number in range(MOST)]) == {HOME}
    left: Any = site.home.client.hget(quota_key(tenant_id), "requests")
    assert float(left) >= 1000 - MOST
    late = site.deployment.start("gateway", "gateway-3", **site.settings)
    wait_until(
        lambda: site.deployment.get("/ready", late).status_code == 200,
        description="a gateway starts without the other cell",
    )
    told = site.http.get(site.deployment.url(late) + "/metrics", headers={"Authorization": f"Bearer {site.root}"}).text
    assert f'penstock_requests_in_flight{{model_name="{NAME}"}} {MOST}.0' in told and "penstock_redis_up 0.0" in told


def test_cells_have_names_of_their_own() -> None:
    for said, reason in {
        "a=redis://:secret@one/0 a=redis://two/0": "--cell a: another cell has this name",
        "B=redis://:secret@one/0": "--cell: number 1 is no cell",
        "a=redis+cluster://:secret@one/B": "--cell a: not a Redis URL",
        "a=redis://:secret@one/0 b=redis://:secret@one/0": "--cell b: it has the Redis of the cell a",
    }.items():
        with pytest.raises(StartupError, match=reason) as found:
            cells_of(GatewaySettings(cell=said.split()))
        assert "secret" not in str(found.value)
    names = [each.name for each in cells_of(GatewaySettings(cell=["a=redis://one/0", "b=redis+cluster://one,two/b"]))]
    assert names == ["home", "a", "b"]


def context(mark: str, num_computes: int, num_sequences: int) -> tuple[Any, str]:
    """As much of a context as choosing looks at, and a model."""
    stage = SimpleNamespace(registry=SimpleNamespace(of=lambda *_: [None] * num_computes))
    return SimpleNamespace(
        mark=mark, stage=stage, pipeline=SimpleNamespace(subscriptions=SimpleNamespace(num_sequences=num_sequences))
    ), "m"


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 200)), min_size=1, max_size=6), st.text(max_size=8))
def test_a_cell_has_no_more_than_its_share_by_a_quarter(loads: list[tuple[int, int]], beginning: str) -> None:
    contexts = [context(f"{number:04x}", weight, count) for number, (weight, count) in enumerate(loads)]
    taken = chosen(contexts, beginning)
    weight, count = loads[int(taken.mark, 16)]
    total, weights = sum(count for _, count in loads) + 1, sum(weight for weight, _ in loads)
    assert count < SURPLUS * total * weight / weights + 1
    assert chosen(contexts[::-1], beginning).mark == taken.mark, "the order of the cells says nothing"


@given(st.lists(st.text(min_size=4, max_size=8), min_size=64, max_size=64, unique=True), st.integers(2, 4))
def test_one_cell_more_moves_no_beginning_between_the_others(beginnings: list[str], num_cells: int) -> None:
    contexts = [context(f"{number:04x}", 1, 0) for number in range(num_cells + 1)]
    for beginning in beginnings:
        before, after = chosen(contexts[:-1], beginning).mark, chosen(contexts, beginning).mark
        assert after in (before, contexts[-1][0].mark)


def test_prompts_that_begin_alike_have_one_beginning() -> None:
    def body(**fields: Any) -> Any:
        return SimpleNamespace(**fields)

    message = SimpleNamespace(role="user", content="Hello " * 100)
    assert beginning_of(body(messages=[message, message, "later"])) == beginning_of(body(messages=[message, message]))
    assert beginning_of(body(prompt=["x" * 1000])) == "x" * 256 and beginning_of(body(input="words")) == "words"
    assert (
        beginning_of(body(input=[{"type": "message", "content": [{"type": "input_text", "text": "seen"}]}])) == "seen"
    )
    assert beginning_of(body()) == "" == beginning_of(body(prompt=[[1, 2, 3]]))
