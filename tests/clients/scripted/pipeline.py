"""The pipeline around the scripted model: a gateway, a tokenizer and a sampler as they are served,
and a compute replica that reads the script.
"""

from pathlib import Path

from tests.clients.scripted.model import make_model
from tests.deployment import Deployment

MODEL = "scripted"


def start_scripted(redis_url: str, folder: Path, script: Path) -> Deployment:
    """Start it, and wait until it is ready. folder: for the model, logs and files."""
    make_model(folder / MODEL)
    deployment = Deployment(
        redis_url, folder, environment={"SCRIPT": str(script)}, programs={"compute": "tests.clients.scripted.compute"}
    )
    try:
        return deployment.start_all(
            model=folder / MODEL, dtype="float32", kv_cache_memory="64MiB", max_batched_tokens=8192
        )
    except BaseException:
        deployment.stop()
        raise
