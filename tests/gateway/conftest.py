"""Fixtures: gateways with Redis, and a pipeline that the test plays."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.gateway.backstage import Backstage
from tests.waiting import wait_until

PING_S = 0.4  # so that silence is looked into at once


def start_gateways(deployment: Deployment, count: int = 1, **settings: object) -> list[str]:
    ids = [
        deployment.start("gateway", f"gateway-{number}", **({"ping_interval_s": PING_S} | settings))
        for number in range(1, count + 1)
    ]
    deployment.wait_live(*ids)
    for gateway in ids:
        wait_until(
            lambda gateway=gateway: deployment.get("/ready", gateway).status_code == 200,
            description=f"{gateway} is ready",
        )
    return ids


@pytest.fixture(scope="module")
def shared_stage(
    tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None
) -> Iterator[tuple[Deployment, Backstage]]:
    """One Redis and two gateways, for tests that leave them as they were."""
    folder = tmp_path_factory.mktemp("gateway")
    with running_redis(folder / "redis", redis_binary) as url:
        deployment = Deployment(url, folder)
        backstage = Backstage(url)
        try:
            start_gateways(deployment, 2)
            yield deployment, backstage
        finally:
            deployment.stop()
            backstage.close()


@pytest.fixture(scope="module")
def thinking_stage(
    tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None
) -> Iterator[tuple[Deployment, Backstage]]:
    """One Redis and two gateways, before a model that thinks and calls."""
    folder = tmp_path_factory.mktemp("thinking")
    with running_redis(folder / "redis", redis_binary) as url:
        deployment = Deployment(url, folder)
        backstage = Backstage(url, parsers={"tool_calls": "hermes", "reasoning": "qwen3"}, fingerprint="fp_1")
        try:
            start_gateways(deployment, 2, allow_origin="https://chat.example,http://localhost:3000")
            yield deployment, backstage
        finally:
            deployment.stop()
            backstage.close()


@pytest.fixture
def gateways(shared_stage: tuple[Deployment, Backstage]) -> Deployment:
    return shared_stage[0]


@pytest.fixture
def backstage(shared_stage: tuple[Deployment, Backstage]) -> Backstage:
    return shared_stage[1]


@pytest.fixture
def own(deployment: Deployment) -> Iterator[Backstage]:
    """A pipeline for a test that starts its gateways itself, in `deployment`."""
    backstage = Backstage(deployment.redis_url)
    yield backstage
    backstage.close()
