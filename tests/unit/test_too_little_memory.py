"""A start without enough memory says so in one line, with figures and what to set, and is not tried again and again."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.compute.backends.host_memory import mapped_zeros
from services.operator.launcher import MAX_KILLS, Child, Launcher
from services.operator.lifeline import Lifeline
from shared.process.errors import StartupError
from shared.process.host_memory import GIB, enough_memory
from shared.process.settings import UpSettings

FREE = "import resource; from shared.process.host_memory import free_host_memory as free; print(free())"


def limited(num_bytes: int) -> Callable[[], None]:
    """Runs in a new process: it may have so many addresses, as after `ulimit -v`."""
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


@pytest.mark.parametrize(
    ("allocate", "asked"),
    [
        (lambda: mapped_zeros(1 << 50), "1048576 GiB"),
        (lambda: torch.empty(1 << 50, dtype=torch.uint8), "1048576 GiB"),
        (lambda: np.empty(1 << 50, np.uint8), "1048576 GiB"),
        (lambda: [0] * (1 << 50), ""),
    ],
)
def test_memory_that_is_not_given_is_told_with_figures_and_advice(allocate: Callable[[], object], asked: str) -> None:
    wanted = f"{asked} more were asked for, and " if asked else ""
    line = rf"^demo: too little memory: {wanted}[\d.]+ [MG]iB are free for this process\. Take a smaller one$"
    with pytest.raises(StartupError, match=line), enough_memory("demo", "Take a smaller one"):
        allocate()


def test_other_errors_pass() -> None:
    for error in (ValueError("a file is broken"), OSError(2, "No such file"), StartupError("no folder")):
        with pytest.raises(type(error), match=re.escape(str(error))), enough_memory("demo", ""):
            raise error


def test_a_limit_on_addresses_is_known() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREE], capture_output=True, text=True, check=True, preexec_fn=limited(GIB)
    )
    assert 0 < int(done.stdout) < GIB


def test_compute_says_in_one_line_that_torch_does_not_fit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.compute", "--model", "demo"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PENSTOCK_REDIS_URL": f"unix://{tmp_path}/none"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, preexec_fn=limited(400 << 20), timeout=100
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "compute: too little memory" in done.stderr.splitlines()[-1] and "ulimit -v" in done.stderr.splitlines()[-1]


def test_a_stage_that_is_killed_at_each_start_ends_the_launcher(tmp_path: Path) -> None:
    """As where the system ends it for want of memory."""
    launcher = Launcher(UpSettings(data_dir=tmp_path))
    launcher.lifeline = Lifeline(tmp_path)
    kill = f"import os; os.kill(os.getpid(), {signal.SIGKILL})"
    launcher.stages.append(child := Child("compute", lambda: subprocess.Popen([sys.executable, "-c", kill]), delay_s=0))
    with pytest.raises(
        StartupError,
        match=f"compute has been ended {MAX_KILLS} times by SIGKILL .* where memory runs out .* --kv-cache-memory",
    ):
        for _ in range(MAX_KILLS + 1):
            launcher._keep_alive()
            assert child.process is not None
            child.process.wait(60)
    for file in (launcher.lifeline._own, launcher.lifeline._shared):
        file.close()
