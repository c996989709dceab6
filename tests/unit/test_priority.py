"""A process that runs behind others does so where sessions share the cores, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process.priority import AUTOGROUP

SAY = """
import os
from shared.process.priority import AUTOGROUP, run_behind
run_behind(7)
print(os.getpriority(os.PRIO_PROCESS, 0), AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else 7)
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this system has no autogroups")
def test_its_session_runs_behind_too() -> None:
    own = Path("/proc/self/autogroup").read_text()
    said = subprocess.run(
        [sys.executable, "-c", SAY], capture_output=True, text=True, check=True, start_new_session=True
    ).stdout
    assert said.split() == [str(min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7))] * 2
    assert Path("/proc/self/autogroup").read_text() == own, "other sessions stay as they are"
