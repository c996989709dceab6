"""The priority of a process on a busy machine."""

import os
import time
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
NUM_TRIES = 5  # Linux allows one write by all processes in a tenth of a second
PAUSE_S = 0.1


def run_behind(niceness: int) -> None:
    """Lower this process' priority.

    Linux divides cores among sessions before it looks at niceness (man 7 sched, autogroups). Each stage
    and each helper leads a session, so that session gets the niceness, too.
    """
    os.nice(niceness)
    for _ in range(NUM_TRIES if niceness else 0):
        try:
            AUTOGROUP.write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError:  # another system, or a kernel without such groups
            return
        else:
            return
