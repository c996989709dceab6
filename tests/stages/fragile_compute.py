"""`python -m tests.stages.fragile_compute`: a compute replica that dies of a prompt that has a
certain token among its first four, when it is computed.

FRAGILE_TOKEN: the token id. FRAGILE_STEP_S: how much longer a step takes, so that there is time to
disturb it; the steps of a model that drafts take no longer.

FRAGILE_HANGS: of that token it does not die; its step never ends, as on a device that hangs without an error.

FRAGILE_DRAWS: steps are in flight, as on a device that draws, and one draw of so many is wrong. On
SIGUSR1 the process then dies like on SIGKILL when it has launched a step on one that nobody has
read; on SIGUSR2 the device fails there, and computes nothing more.
"""

import os
import random
import signal
import threading
import time
from typing import NoReturn

import torch

from services.compute import __main__ as compute
from services.compute.candidates import reduction
from services.compute.execution.executor import DrawnTokens
from services.compute.execution.model_runner import ModelRunner
from services.compute.loop import engine
from services.compute.loop.engine import Engine, build_engine
from services.compute.ranks.group.ends import Group
from services.compute.sequence.batch import ScheduledBatch
from shared.model.files import ModelFiles
from shared.process.settings import ComputeSettings
from shared.wire import registry
from shared.wire.stage import run_stage
from tests.kernels.drawing import DrawingSearch

TOKEN = int(os.environ.get("FRAGILE_TOKEN", "-1"))
STEP_S = float(os.environ.get("FRAGILE_STEP_S", "0"))
HANGS = "FRAGILE_HANGS" in os.environ
DRAWS = int(os.environ.get("FRAGILE_DRAWS", "0"))
run = ModelRunner.run
told: set[int] = set()  # signals
targets: list[ModelRunner] = []  # the one runner of the model that is served


def fragile(runner: ModelRunner, batch: ScheduledBatch, drawn: DrawnTokens | None = None) -> torch.Tensor:
    if any(TOKEN in row.token_ids[: max(0, 4 - row.num_computed_tokens)] for row in batch.rows):
        if HANGS:
            threading.Event().wait()
        os._exit(9)
    if runner in targets:
        time.sleep(STEP_S)
    hidden: torch.Tensor = run(runner, batch, drawn)
    if drawn is not None and signal.SIGUSR1 in told:
        os.kill(os.getpid(), signal.SIGKILL)
    if drawn is not None and signal.SIGUSR2 in told:
        for name in ("apply_edits", "fill", "ensure_works"):
            assert hasattr(reduction, name)
            setattr(reduction, name, fail)
    return hidden


def fail(*_: object) -> NoReturn:
    """As whatever is asked of a GPU after one of its kernels has failed."""
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def build_fragile(settings: ComputeSettings, files: ModelFiles, group: Group | None) -> Engine:
    built = build_engine(settings, files, group)
    targets.append(built.runner)
    if DRAWS:
        built.runner.row_search = DrawingSearch(built.runner.row_search, random.Random(1), 1 / DRAWS)
    return built


if __name__ == "__main__":
    setattr(ModelRunner, "run", fragile)  # noqa: B010 - a method of a class, in the types' eyes not to be set
    registry.RENEW_EVERY_S = 0.25
    setattr(engine, "build_engine", build_fragile)  # noqa: B010
    if DRAWS:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: told.add(number))
    run_stage(compute.main)
