"""`python -m tests.stages.fragile_compute`: a compute replica that dies of a prompt that has a certain token among its first four, when it is computed.

FRAGILE_TOKEN: the token id. FRAGILE_STEP_S: how much longer a step takes, so that there is time to disturb it. Its leases are short.
"""

import os
import time

import torch

from services.compute import admit
from services.compute.__main__ import main
from services.compute.batch import ScheduledBatch
from services.compute.model_runner import DrawnTokens, ModelRunner
from shared import registry
from shared.stage import run_stage

TOKEN = int(os.environ.get("FRAGILE_TOKEN", "-1"))
STEP_S = float(os.environ.get("FRAGILE_STEP_S", "0"))
run = ModelRunner.run


def fragile(runner: ModelRunner, batch: ScheduledBatch, drawn: DrawnTokens | None = None) -> torch.Tensor:
    if any(row.num_computed_tokens == 0 and TOKEN in row.token_ids[:4] for row in batch.rows):
        os._exit(9)
    time.sleep(STEP_S)
    return run(runner, batch, drawn)


if __name__ == "__main__":
    setattr(ModelRunner, "run", fragile)  # noqa: B010 - a method of a class, in the types' eyes not to be set
    registry.RENEW_EVERY_S = 0.25
    admit.CLAIM_IDLE_MS = 1250
    run_stage(main)
