"""`python -m tests`: all that pytest runs here, a file at a time, in three processes more than there
are cores.

Files that compute and files that mostly wait for other processes begin in turns: together, either
kind would crowd the cores or leave them idle. All fork their stages from the same two processes:
one has imported torch, the other transformers.
`--once-more` is for CI: whatever failed runs again. Other arguments are pytest's, which then runs
what they name.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests import forge

ROOT = Path(__file__).parent.parent
FIRST = "tests/kernels/cuda"  # before all else that imports Triton: its conftest.py sets the interpreter
COMPUTING = ["grammars", "kernels"]
LAST = ["unit", "wire"]  # many short files fill the end
LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"
TESTS_FAILED = 1  # pytest's exit code; those above say that pytest itself did not work
MAX_ONCE_MORE = 10  # more failures than these are no accident of a busy machine


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--once-more", action="store_true", help="run each test that failed again, alone, and list those that then pass"
    )
    options, of_pytest = parser.parse_known_args()
    if of_pytest:
        return pytest(*of_pytest)
    LAST_FAILED.unlink(missing_ok=True)
    os.environ.update({variable: forge.forge(kind) for kind, variable in forge.VARIABLES.items()})
    code = pytest(
        "--numprocesses", str((os.cpu_count() or 1) + 3), "--dist", "loadfile", "--no-loadscope-reorder", *in_order()
    )
    if code != TESTS_FAILED or not options.once_more:
        return code
    return once_more(sorted(json.loads(LAST_FAILED.read_text())))


def pytest(*arguments: str) -> int:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ).returncode


def in_order() -> list[str]:
    """The files of tests, in the order in which they are to begin."""
    files = [str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("tests/**/test_*.py"))]
    room = {file: file.split("/")[1] for file in files}
    first = [file for file in files if file.startswith(FIRST)]
    last = [file for file in files if room[file] in LAST]
    middle = [file for file in files if file not in (*first, *last)]
    computing = [file for file in middle if room[file] in COMPUTING]
    waiting = [file for file in middle if room[file] not in COMPUTING]
    # sorted by how far each is in its own list
    progress = {file: number / len(some) for some in (computing, waiting) for number, file in enumerate(some)}
    return [*first, *sorted(middle, key=progress.__getitem__), *last]


def once_more(failed: list[str]) -> int:
    """Run each test alone. Returns 0 if all pass; their names come last, so that nobody overlooks them."""
    if len(failed) > MAX_ONCE_MORE:
        print(f"{len(failed)} tests failed, more than the {MAX_ONCE_MORE} that may run once more.")
        return TESTS_FAILED
    codes = {test: pytest(test) for test in failed}
    for test, code in codes.items():
        print(f"{'failed twice' if code else 'failed, and passed when run again alone'}: {test}")
    return max(codes.values())


if __name__ == "__main__":
    sys.exit(main())
