"""The process that runs cases: `python -m bench.gpu` starts it, and another where it dies or hangs.
Takes the same arguments, and the run's id before them.

Ends with 0 when all that was wanted has been begun, with DEVICE_LOST when a case has taken the
device's context with it.
"""

import gc
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu.cases import Case, make_cases
from bench.gpu.journal import Found, Journal, replace_text
from bench.gpu.options import device_and_versions, parse, wanted_of
from bench.gpu.report import page
from services.compute.backends.buffers import ensure_works

DEVICE_LOST = 3
ORPHANED = 4


def run_case(case: Case, journal: Journal, device: torch.device) -> bool:
    """Returns whether the device still works."""
    began_at, found, error, works = time.perf_counter(), list[Found](), "", True
    journal.begin(case.part, case.name, case.limit_s)
    try:
        for each in case.run():
            found.append(each)
            journal.note(case.name, began_at, found)
        ensure_works(device)
    except Exception as failure:  # whatever it is, the others are measured all the same
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
    if error:
        try:
            ensure_works(device)
        except Exception:  # its context is lost, and with it this process
            works = False
    entry = journal.end(case.name, began_at, found, error)
    print(
        f"{'ok  ' if entry.holds else 'FAIL'} {entry.seconds:7.2f} s  {entry.name}{': ' + error if error else ''}",
        flush=True,
    )
    return works


def main() -> int:
    run, arguments, parent = sys.argv[1], parse(sys.argv[2:]), os.getppid()
    wanted = wanted_of(arguments)
    journal = Journal(arguments.out / "gpu.json", device_and_versions(), run)
    device = torch.device("cpu" if wanted.is_interpreted else "cuda")
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        for case in make_cases(wanted, journal, Path(folder)):
            if journal.is_settled(case.name):
                continue
            if os.getppid() != parent:
                return ORPHANED
            still_works = run_case(case, journal, device)
            replace_text(arguments.out / "gpu.md", page(journal))
            if not still_works:
                return DEVICE_LOST
            if device.type == "cuda" and case.part not in ("kernels", "models"):
                gc.collect()
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
