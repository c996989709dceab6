"""Two cells in one Redis Cluster, whose primaries die and whose slots move: a gateway serves both,
and no stream changes a byte.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.crc import key_slot

from services.requests.store.cells import Cell
from shared.wire.streams import inflight_key
from tests.clusters import Clustered, running_cluster
from tests.deployment import MODEL, Deployment
from tests.pipeline.streams import stream_all
from tests.pipeline.test_batches import COMPLETIONS, ended, lines_of, start
from tests.waiting import wait_until

pytestmark = pytest.mark.more  # wire/test_cluster.py and gateway/test_cells.py are not
LAG_S = 0.7  # of the replica that takes over
HOME, OTHER = "home", "b"
PROMPTS = [f"Number {number}: the" for number in range(16)]


@dataclass
class Site:
    cluster: Clustered
    home: Deployment  # with the gateways
    other: Deployment

    def post(self, path: str, body: dict[str, object], key: str = "", gateway: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.post(self.home.url(gateway) + path, json=body, headers=headers, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("cells")
    with running_cluster(folder / "redis", redis_binary) as cluster:
        (folder / "home").mkdir()
        (folder / "other").mkdir()
        home = Deployment(cluster.url(HOME), folder / "home", {"PENSTOCK_CELL": f"{OTHER}={cluster.url(OTHER)}"})
        other = Deployment(cluster.url(OTHER), folder / "other")
        try:
            ids = [other.start(stage, dtype="float32") for stage in ("sampler", "tokenizer", "compute")]
            home.start_all(dtype="float32", gateways=2)
            other.wait_live(*ids)
            wait_until(
                lambda: set(home.get("/ready").json()["replicas"].values()) == {2},
                description="the gateway sees both cells",
            )
            yield Site(cluster, home, other)
        finally:
            home.stop()
            other.stop()


def mark_of(response_id: str) -> str:
    return response_id[-4:]


def test_the_cells_have_different_servers(site: Site) -> None:
    assert len({key_slot(f"{{{cell}}}".encode()) for cell in (HOME, OTHER)}) == 2
    assert site.cluster.primary_of(HOME) != site.cluster.primary_of(OTHER)
    with site.other.redis() as client:
        assert client.hlen(inflight_key(MODEL)) == 0  # by the name that everybody uses


def test_answers_are_the_same_in_both_cells_and_a_beginning_stays_in_one(site: Site) -> None:
    async def ask_all() -> list[tuple[str, str]]:
        async with site.home.async_client() as client:
            asked = [
                client.completions.create(
                    model=MODEL, prompt=each, seed=1, max_tokens=20, extra_body={"ignore_eos": True}
                )
                for each in PROMPTS
            ]
            return [(mark_of(each.id), each.choices[0].text) for each in await asyncio.gather(*asked)]

    answers = asyncio.run(ask_all())

    marks = {Cell(HOME, "").mark, Cell(OTHER, "").mark}
    assert {mark for mark, _ in answers} == marks, "both answer"
    again = [
        site.post("/v1/completions", {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 1}).json()["id"]
        for _ in range(6)
    ]
    assert len(set(map(mark_of, again))) == 1


def test_a_response_is_found_by_its_id_at_any_gateway(site: Site) -> None:
    first, second = site.home.ports
    seen = set()
    for number in range(8):
        made = site.post(
            "/v1/responses",
            {"model": MODEL, "input": f"{number} Hello", "max_output_tokens": 8, "seed": 1},
            gateway=first,
        ).json()
        seen.add(mark_of(made["id"]))
        assert site.home.get(f"/v1/responses/{made['id']}", second).json()["output"] == made["output"]
        body = {"model": MODEL, "input": "And?", "previous_response_id": made["id"], "max_output_tokens": 8, "seed": 1}
        following = site.post("/v1/responses", body, gateway=second).json()
        assert mark_of(following["id"]) == mark_of(made["id"]), "a conversation stays in its cell"
        streamed = httpx.get(
            f"{site.home.url(second)}/v1/responses/{following['id']}?stream=true", timeout=60, trust_env=False
        ).text
        assert following["output"][0]["content"][0]["text"] and "event: response.incomplete" in streamed, (
            "max_output_tokens ended it"
        )
        assert (
            httpx.delete(f"{site.home.url(first)}/v1/responses/{made['id']}", timeout=60, trust_env=False).status_code
            == 200
        )
    assert len(seen) == 2


def test_batches_run_in_the_home_cell(site: Site) -> None:
    site.home.wait_live(site.home.start("jobs"))
    bodies: list[dict[str, Any]] = [
        {"model": MODEL, "prompt": each, "seed": 1, "max_tokens": 8, "ignore_eos": True} for each in PROMPTS
    ]
    with site.home.client() as client:
        batch = start(
            client,
            COMPLETIONS,
            [
                {"custom_id": str(at), "method": "POST", "url": COMPLETIONS, "body": body}
                for at, body in enumerate(bodies)
            ],
        )
        found = ended(client, batch.id)
        answers = {
            int(each["custom_id"]): each["response"]["body"]["choices"][0]["text"]
            for each in lines_of(client, found.output_file_id)
        }
    assert found.status == "completed" and len(answers) == len(bodies)
    assert answers[3] == site.post(COMPLETIONS, bodies[3]).json()["choices"][0]["text"]


@pytest.mark.parametrize("how", ["fail over", "move by key"])
def test_streams_go_on_with_the_same_bytes(site: Site, how: str) -> None:
    disturb: dict[str, Callable[[], Awaitable[None]]] = {
        "fail over": lambda: site.cluster.fail_over(OTHER, LAG_S),
        "move by key": lambda: asyncio.to_thread(site.cluster.move_by_key, OTHER),
    }
    undisturbed = asyncio.run(stream_all(site.home, 8, max_tokens=300))

    assert (
        asyncio.run(stream_all(site.home, 8, max_tokens=300, disturb=disturb[how], in_flight=[site.home, site.other]))
        == undisturbed
    )
    wait_until(site.cluster.is_whole, description="the cluster is whole")
