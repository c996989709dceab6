"""The playground's files and headers, the live view's stream, and who may kill: over real gateways,
before a pipeline that the test plays.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.console.recent import RecentRequests
from services.gateway.console.watch import MAX_WATCHERS
from services.gateway.generation.subscription import Subscription
from shared.process.errors import StartupError
from shared.process.settings import GatewaySettings, load_settings
from shared.wire.messages import GenerateRequest, Moments, encode
from shared.wire.streams import WATCHED, response_of, tombstone_key, view_key
from shared.wire.views import ComputeView, SequenceView
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.waiting import wait_until

FOLDER = Path(__file__).parents[2] / "services" / "gateway" / "console" / "playground"
SEQUENCE = SequenceView("chatcmpl-1.0", True, "sampler-1", 0, 9, 0, 12, 3, 0, 0, 1, (5, 1), 100.0, 100.1, 100.2, 100.3)


def view(*sequences: SequenceView, replica_id: str = f"compute-of-{NAME}") -> ComputeView:
    return ComputeView(replica_id, 16, 100, 1, 0, len(sequences), sequences)


@contextmanager
def watching(deployment: Deployment) -> Iterator[Iterator[Any]]:
    """The live view's snapshots, while the `with` lasts."""
    with httpx.stream("GET", f"{deployment.url()}/live", timeout=60, trust_env=False) as reply:
        assert reply.status_code == 200 and reply.headers["Content-Type"].startswith("text/event-stream")
        yield (json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line.startswith("data: "))


def test_every_file_is_served_with_the_policy_and_nothing_else_is(gateways: Deployment) -> None:
    served = {f"/playground/{path.relative_to(FOLDER).as_posix()}" for path in FOLDER.rglob("*") if path.is_file()}
    with httpx.Client(base_url=gateways.url(), timeout=60, trust_env=False) as client:
        for path in ("/", *sorted(served)):
            reply = client.get(path)
            policy = reply.headers["Content-Security-Policy"]
            assert (
                reply.status_code == 200
                and "default-src 'none'; script-src 'self'" in policy
                and "require-trusted-types-for" in policy
            ), path
            assert "unsafe" not in policy and reply.headers["X-Content-Type-Options"] == "nosniff"
        assert client.get("/playground/modules/main.js").headers["Content-Type"].startswith("text/javascript")
        assert (
            client.get(
                "/playground/modules/main.js",
                headers={"If-None-Match": client.get("/playground/modules/main.js").headers["ETag"]},
            ).status_code
            == 304
        )
        for path in (
            "/playground/../app.py",
            "/playground/%2e%2e/app.py",
            "/playground/modules/none.js",
            "/playground/",
        ):
            assert client.get(path).status_code == 404, path


def test_the_page_asks_nobody_else_and_writes_no_html() -> None:
    own = [path for path in FOLDER.rglob("*") if path.suffix in (".js", ".css", ".html") and "vendor" not in path.parts]
    for path in own:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, path
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text, path
        assert len(text.splitlines()) <= 400, path


def test_snapshots_come_while_somebody_watches_and_only_then(gateways: Deployment, backstage: Backstage) -> None:
    client = backstage.client
    wait_until(lambda: not client.exists(WATCHED), description="nobody watches")
    client.set(view_key(f"compute-of-{NAME}"), encode(view(SEQUENCE)), px=60_000)
    started_at = time.monotonic()
    with watching(gateways) as snapshots:
        third = [next(snapshots) for _ in range(3)][-1]
        assert time.monotonic() - started_at > 0.9  # two a second at most
        wait_until(lambda: client.pttl(WATCHED) > 0, description="the replicas know that somebody watches")
    assert {each["stage"] for each in third["replicas"]} == {"gateway", "tokenizer", "compute", "sampler"} and third[
        "can_kill"
    ] is False
    assert third["caches"][0]["sequences"][0]["block_runs"] == [5, 1] and third["caches"][0]["num_held_blocks"] == 1
    request = third["recent_requests"][0]
    assert request["request_id"] == "chatcmpl-1.0" and [span["phase"] for span in request["spans"]] == [
        "tokenizing",
        "waiting",
        "decode",
    ]
    client.delete(view_key(f"compute-of-{NAME}"))
    wait_until(lambda: not client.exists(WATCHED), description="nobody watches any more")


def test_too_many_watchers_are_refused_and_places_come_back(gateways: Deployment) -> None:
    with httpx.Client(base_url=gateways.url(), trust_env=False, timeout=60) as client:
        open_streams = [client.send(client.build_request("GET", "/live"), stream=True) for _ in range(MAX_WATCHERS)]
        refused = client.get("/live")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "server_full"
        for stream in open_streams:
            stream.close()
        wait_until(lambda: is_watched(client), description="places are free again")


def is_watched(client: httpx.Client) -> bool:
    """One more try to watch: whether there was a place."""
    with client.stream("GET", "/live") as reply:
        return reply.status_code == 200


def test_nothing_is_killed_unless_the_operator_said_so(gateways: Deployment) -> None:
    refused = gateways.post("/live/kill", {"replica_id": "gateway-2"})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "chaos_demo_off"


def test_only_the_own_page_kills_and_only_what_was_started_beside_it(deployment: Deployment, own: Backstage) -> None:
    start_gateways(deployment, chaos_demo=True)
    url, mine = f"{deployment.url()}/live/kill", b'{"replica_id": "gateway-1"}'
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json", "Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "application/json", "Host": "rebound.example"},
    ):
        assert httpx.post(url, content=mine, headers=headers, timeout=60, trust_env=False).status_code == 403, headers
    for body, status in (
        (b"", 400),
        (b"[]", 400),
        (b'{"replica_id": 1}', 400),
        (b'{"replica_id": "none"}', 404),
        (b"{" + b" " * 9999 + b"}", 400),
    ):
        assert (
            httpx.post(
                url, content=body, headers={"Content-Type": "application/json"}, timeout=60, trust_env=False
            ).status_code
            == status
        ), body
    # What the registry says of a process is not enough: its process 1 was not started by our parent
    assert httpx.post(url, json={"replica_id": f"compute-of-{NAME}"}, timeout=60, trust_env=False).status_code == 403
    assert httpx.post(
        url, content=mine, headers={"Content-Type": "application/json"}, timeout=60, trust_env=False
    ).json() == {"killed": "gateway-1"}
    assert deployment.processes["gateway-1"].wait(60) == -9


def test_a_gateway_that_others_reach_never_kills() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.5", ""):
        with pytest.raises(StartupError, match="loopback"):
            load_settings(GatewaySettings, ["--chaos-demo", "--host", host])
    assert load_settings(GatewaySettings, ["--chaos-demo", "--host", "::1"]).chaos_demo


def test_a_client_that_said_so_may_come_back_and_else_is_cancelled_in_time(
    gateways: Deployment, backstage: Backstage
) -> None:
    """Three leave: one comes back and stays, one comes back and leaves again, one does not come back."""
    patience_s = 4.0
    options = {"include_position": True, "resume_within_s": patience_s}
    body: dict[str, Any] = {"model": NAME, "prompt": "Hi", "stream": True, "stream_options": options}

    def left() -> GenerateRequest:
        with httpx.stream(
            "POST", f"{gateways.url('gateway-1')}/v1/completions", json=body, timeout=60, trust_env=False
        ) as reply:
            [request] = backstage.take()
            backstage.write(request, 1, 2)
            assert next(line for line in reply.iter_lines() if line.startswith("id: ")) == "id: 1"
        return request

    @contextmanager
    def resumed(request: GenerateRequest) -> Iterator[None]:
        url = f"{gateways.url('gateway-2')}/v1/streams/{response_of(request.request_id)}"
        with httpx.stream("GET", url, headers={"Last-Event-ID": "1"}, timeout=60, trust_env=False) as reply:
            chunks = (
                json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line.startswith("data: {")
            )
            assert next(chunks)["choices"][0]["text"] == "2 "
            yield  # while `chunks` lives: an iterator that goes takes the connection along

    def is_cancelled(request: GenerateRequest) -> bool:
        return bool(backstage.client.exists(tombstone_key(request.request_id)))

    began_at = time.monotonic()
    back = left()
    with resumed(back):
        again = left()
        with resumed(again):
            pass
        gone = left()
        wait_until(lambda: is_cancelled(gone), description="nobody came back")
        assert time.monotonic() - began_at > patience_s
        assert not is_cancelled(back), (
            "the first gateway's patience was over before, and cancels nothing: another reads"
        )
        wait_until(lambda: is_cancelled(again), description="nobody came back a second time")
        backstage.write(back, 3, finish=3, gateway="gateway-2")
    for request in (again, gone):
        backstage.end(request)


def test_a_request_s_course_has_no_gap_when_its_replica_dies() -> None:
    recent = RecentRequests()
    models = {"compute-1": NAME, "compute-2": NAME}
    recent.see(101.0, [view(SEQUENCE, replica_id="compute-1")], models)
    recent.see(102.0, [], {"compute-2": NAME})
    assert [request.request_id for request in recent.lost()] == ["chatcmpl-1.0"]
    moved = SequenceView("chatcmpl-1.0", True, "sampler-1", 0, 9, 0, 12, 5, 0, 0, 1, (5, 1), 100.0, 100.1, 103.0, 103.5)
    recent.see(104.0, [view(moved, replica_id="compute-2")], {"compute-2": NAME})
    recent.see(105.0, [view(replica_id="compute-2")], {"compute-2": NAME})
    request = recent.shown(106.0)[0]
    told = [(span["phase"], span["replica_id"], span["started_at"], span["ended_at"]) for span in request["spans"]]
    assert told == [
        ("tokenizing", None, 100.0, 100.1),
        ("waiting", "compute-1", 100.1, 100.3),
        ("decode", "compute-1", 100.3, 101.0),
        ("lost", None, 101.0, 103.0),
        ("waiting", "compute-2", 103.0, 103.5),
        ("decode", "compute-2", 103.5, 104.0),
    ]
    assert request["is_over"]


def test_what_came_and_went_between_two_looks_is_known_from_its_gateway() -> None:
    subscription = Subscription("cmpl-2", {"cmpl-2.0": 2}, 0, NAME)
    timeline = subscription.timelines["cmpl-2.0"]
    timeline.submitted_at = 100.0
    timeline.note(Moments("cmpl-2.0", 1, 100.1, 100.2, 100.4, "compute-1"))
    timeline.note(Moments("cmpl-2.0", 2, 100.1, 100.2, 100.5, "compute-1"))
    subscription.unfinished.clear()
    recent = RecentRequests()
    recent.hear([subscription])
    [request] = recent.shown(101.0)
    assert [span["phase"] for span in request["spans"]] == ["tokenizing", "waiting", "prefill", "decode"]
    assert request["is_over"] and request["spans"][-1]["ended_at"] == 100.5
