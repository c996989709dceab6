"""`python -m tests`: all that pytest runs here, in two parts. `--once-more` is for CI: whatever failed runs again.

The first part computes, and takes a process a core. The second starts processes of its own and
waits for them: it takes three, a file at a time, the folders with the longest files first.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMPUTING = ["architecture", "grammars", "kernels", "unit", "wire"]
LONGEST = ["pipeline", "stages"]
LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"
TESTS_FAILED = 1  # pytest's exit code; those above say that pytest itself did not work
MAX_ONCE_MORE = 10  # more failures than these are no accident of a busy machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once-more", action="store_true", help="run each test that failed again, alone, and list those that then pass")
    options = parser.parse_args()
    LAST_FAILED.unlink(missing_ok=True)
    codes = [computing(), serving()]
    if codes == [0, 0]:
        return 0
    if max(codes) > TESTS_FAILED or not options.once_more:
        return max(codes)
    return once_more(sorted(json.loads(LAST_FAILED.read_text())))


def pytest(*arguments: str, **environment: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=os.environ | environment).returncode


def computing() -> int:
    return pytest("--numprocesses", "auto", *(f"tests/{room}" for room in COMPUTING), OMP_NUM_THREADS="1")


def serving() -> int:
    others = {file.parent.name for file in ROOT.glob("tests/*/test_*.py")} - {*COMPUTING, *LONGEST}
    rooms = [f"tests/{room}" for room in (*LONGEST, *sorted(others))]
    return pytest("--numprocesses", "3", "--dist", "loadfile", "--no-loadscope-reorder", *rooms)


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
