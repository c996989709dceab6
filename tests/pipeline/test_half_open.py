"""Replies of Redis that get lost on connections nobody closes: a stage hangs up after seconds and
goes on; one that stays cut off loses its lease.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.operator.redis_server import socket_path
from shared.wire.line import REPLY_TIMEOUT_S
from shared.wire.registry import STUCK_AFTER_S
from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment
from tests.half_open import HalfOpenRedis
from tests.waiting import wait_until

STAGES = ("sampler", "compute", "tokenizer")
LOST_S = 2.0
SOON_S = 4 * REPLY_TIMEOUT_S  # a minute passed where a reply was waited for as long as for a start


@dataclass
class Line:
    """Real processes of the demo, each but the gateway behind a proxy of its own."""

    deployment: Deployment
    proxies: dict[str, HalfOpenRedis]

    def texts(self, on_first: str = "") -> tuple[str, float]:
        """A streamed answer's text, and its longest pause in s. The stage `on_first` loses replies
        from the first token on, a tokenizer before it.
        """
        wait_until(lambda: self.deployment.get("/ready").status_code == 200, description="every stage is alive")
        proxy = self.proxies.get(on_first)
        if on_first == "tokenizer":
            lose(proxy)
        began = last = time.monotonic()
        pieces, longest = list[str](), 0.0
        stream = self.deployment.client().completions.create(
            model=MODEL, prompt="The quick brown fox", max_tokens=200, temperature=0, stream=True
        )
        for chunk in stream:
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            if not pieces and on_first not in ("", "tokenizer"):
                lose(proxy)
            pieces.append(chunk.choices[0].text)
        assert last > began
        return "".join(pieces), longest


def lose(proxy: HalfOpenRedis | None) -> None:
    assert proxy is not None
    proxy.loses_all = True
    time.sleep(LOST_S)
    proxy.loses_all = False
    proxy.cut_replies()


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("half-open")
    with running_redis(folder / "redis", redis_binary) as url, ExitStack() as stack:
        server = socket_path(folder / "redis")
        proxies = {stage: stack.enter_context(HalfOpenRedis(server, folder / f"{stage}.sock")) for stage in STAGES}
        deployment = Deployment(url, folder)
        stack.callback(deployment.stop)
        ids = [deployment.start(stage, f"{stage}-1", redis_url=proxies[stage].url) for stage in STAGES]
        gateway = deployment.start("gateway", "gateway-1")
        deployment.wait_live(*ids, gateway)
        wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway is ready")
        yield Line(deployment, proxies)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", STAGES)
def test_replies_that_get_lost_for_two_seconds_stop_a_stage_for_seconds_not_a_minute(stage: str, line: Line) -> None:
    undisturbed, _ = line.texts()
    text, longest = line.texts(on_first=stage)
    assert text == undisturbed
    print(f"{stage}: a pause of {longest:.1f} s")
    assert longest < SOON_S


@pytest.mark.more
def test_a_stage_that_is_cut_off_for_good_loses_its_lease_and_another_takes_over(line: Line) -> None:
    """Its heartbeat has a connection of its own, which is well."""
    proxy = line.proxies["sampler"]
    proxy.loses_loops = True
    for each in proxy.connections:
        each.is_half_open = not each.is_heartbeat
    try:
        other = line.deployment.start("sampler", "sampler-2")
        line.deployment.wait_live(other)

        def is_gone() -> bool:
            return "sampler-1" not in {each.replica_id for each in line.deployment.registry().replicas}

        wait_until(is_gone, description="its lease has run out", timeout_s=3 * STUCK_AFTER_S)
        assert line.deployment.processes["sampler-1"].poll() is None
        assert line.texts()[0]
    finally:
        proxy.loses_loops = False
    line.deployment.wait_live("sampler-1")
