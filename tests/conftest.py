"""Fixtures: a real Redis, the demo pipeline, and the check that nothing is left behind."""

import gc
import os
import random
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy
import pytest
import redis
from httpx._transports import default as transports
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from services.operator.redis_server import socket_path, start_server
from shared.wire.streams import CELERY_PREFIX
from tests.deployment import Deployment
from tests.examples import DEFAULT
from tests.pairwise import covering
from tests.waiting import wait_until

gc.disable()  # until all is collected: a third of the time of importing torch, transformers and all tests

# Every client reads the certificates of all authorities: 25 ms of a core for each of thousands of requests.
transports.create_ssl_context = cache(transports.create_ssl_context)

# Keys that may live for ever; every other must have a TTL once its work is done.
PERMANENT = {"replicas", "dead-letter"}

# `make test` draws the same examples on every machine, with CI in the environment or without.
# `make verify SUITE=explore` draws new ones, four times as many, and keeps what failed.
# No property is about time: on a busy machine any example may take seconds.
ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile(
    "fixed", settings.get_profile("default"), max_examples=DEFAULT // 4, derandomize=True, database=None, **ANY_MACHINE
)
settings.register_profile(
    "explore",
    settings.get_profile("default"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    **ANY_MACHINE,
)
settings.load_profile("fixed")


def pytest_runtest_setup() -> None:
    """Seed what a test may draw from. hypothesis knows nothing of torch's generator."""
    random.seed(0)
    numpy.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `more` the cases that a test's mark `sampled` or `pairwise` leaves out."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        if (sampled := cases[0].get_closest_marker("sampled")) is not None:
            chosen: Collection[int] = range(0, len(cases), sampled.args[0])
        elif (pairwise := cases[0].get_closest_marker("pairwise")) is not None:
            factors = list(cases[0].callspec.params)
            chosen = covering(
                [[repr(case.callspec.params[name]) for name in factors] for case in cases],
                [factors.index(name) for name in pairwise.args],
            )
        else:
            continue
        for number in set(range(len(cases))).difference(chosen):
            cases[number].add_marker("more")


def pytest_collection_finish() -> None:
    gc.enable()


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


@pytest.fixture(scope="session")
def redis_binary() -> Path | None:
    """PENSTOCK_TEST_REDIS_SERVER names another server to test against; by default it is the embedded one."""
    path = os.environ.get("PENSTOCK_TEST_REDIS_SERVER")
    return Path(path) if path else None


@contextmanager
def running_redis(folder: Path, binary: Path | None) -> Iterator[str]:
    """A server of our own; yields its URL."""
    process = start_server(folder, binary=binary)
    url = f"unix://{socket_path(folder)}"
    try:
        wait_until(lambda: answers(url), description="redis answers")
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def redis_url(tmp_path: Path, redis_binary: Path | None) -> Iterator[str]:
    """An empty server for one test."""
    with running_redis(tmp_path / "redis", redis_binary) as url:
        yield url


@pytest.fixture(scope="session")
def demo_of_all(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Deployment]:
    """The demo model behind one replica of each stage, started once: that takes seconds of every core."""
    folder = tmp_path_factory.mktemp("demo")
    with running_redis(folder / "redis", redis_binary) as url:
        deployment = Deployment(url, folder)
        try:
            yield deployment.start_all(dtype="float32")
        finally:
            deployment.stop()
        check_keys(url)


@pytest.fixture(scope="module")
def demo(demo_of_all: Deployment) -> Iterator[Deployment]:
    """The demo, for a module that leaves one replica of each stage as it found them; at its end, no
    key may be left without a TTL.
    """
    yield demo_of_all
    wait_until(lambda: not unfinished(demo_of_all), description="every request has ended")
    check_keys(demo_of_all.redis_url)


def unfinished(deployment: Deployment) -> int:
    """Entries that are still in the group streams."""
    with deployment.redis() as client:
        return sum(int(client.xlen(key)) for key in (*client.keys("requests:*"), *client.keys("prompts:*")))


def check_keys(redis_url: str) -> None:
    """That none is left without a TTL; one that a stage has just written may get it with the next command."""
    with suppress(AssertionError):
        wait_until(lambda: not leaked_keys(redis_url), description="every key has a TTL", timeout_s=10)
    assert leaked_keys(redis_url) == []


def leaked_keys(redis_url: str) -> list[str]:
    with redis.Redis.from_url(redis_url) as client:
        keys = [key.decode() for key in client.keys("*")]
        return sorted(
            key
            for key in keys
            if client.ttl(key) == -1
            and key not in PERMANENT
            and not key.startswith(("requests:", "prompts:", CELERY_PREFIX))
        )


@pytest.fixture
def deployment(redis_url: str, tmp_path: Path) -> Iterator[Deployment]:
    """An empty deployment, for a test that starts and stops replicas itself."""
    deployment = Deployment(redis_url, tmp_path)
    yield deployment
    deployment.stop()
