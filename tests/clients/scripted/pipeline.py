"""The pipeline around the scripted model: a gateway, a tokenizer and a sampler as they are served, and a compute replica that reads the script."""

from pathlib import Path

from tests.clients.scripted.model import make_model
from tests.deployment import Deployment
from tests.waiting import wait_until

MODEL = "scripted"


def start_scripted(redis_url: str, folder: Path, script: Path) -> Deployment:
    """Start it, and wait until it is ready. folder: for the model, logs and files."""
    make_model(folder / MODEL)
    settings = {"model": folder / MODEL, "dtype": "float32", "kv_cache_memory": "64MiB", "max_batched_tokens": 8192}
    deployment = Deployment(redis_url, folder, environment={"SCRIPT": str(script)})
    try:
        replicas = [deployment.start(stage, **settings) for stage in ("gateway", "tokenizer", "sampler")]
        deployment.wait_live(*replicas, deployment.start("compute", module="tests.clients.scripted.compute", **settings))
        wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway is ready")
    except BaseException:
        deployment.stop()
        raise
    return deployment
