"""A whole pipeline with keys, for the parts of the suite."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.requests.store.tenants.api_keys import add_key
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.waiting import wait_until

STAGES = ("sampler", "tokenizer", "compute", "gateway", "jobs")


@contextmanager
def running() -> Iterator[Deployment]:
    """The demo model's pipeline, ready, which wants keys."""
    with tempfile.TemporaryDirectory() as name, running_redis((folder := Path(name)) / "redis", None) as url:
        add_key(folder / "keys.json", "first")
        deployment = Deployment(url, folder, programs={})
        try:
            for stage in STAGES:
                # without guesses, which cost a time that varies
                deployment.start(stage, f"{stage}-1", keys_file=folder / "keys.json", dtype="float32", speculate="off")
            deployment.wait_live(*(f"{stage}-1" for stage in STAGES))
            wait_until(lambda: deployment.get("/ready").status_code == 200, description="ready", timeout_s=60)
            yield deployment
        finally:
            deployment.stop()
