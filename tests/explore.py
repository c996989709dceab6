"""`make verify SUITE=explore`: every property test with examples that nobody has drawn before, for
as long as it is told.

`make test` draws the same examples every time. This program runs the files with property tests one
after another, again and again, until the time is up. What fails is kept in `.hypothesis/`, and
comes first in the next run; the output of each failing file is written to the folder `--out`. The
exit code is 1 if any property was refuted.
"""

import argparse
import itertools
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.__main__ import ROOT

PROPERTIES = re.compile(r"@given|RuleBasedStateMachine")
OUTCOME = re.compile(r"^(FAILED|ERROR) (\S+)", re.MULTILINE)
NO_TESTS = 5  # pytest's exit code


@dataclass
class Report:
    """The rounds so far."""

    rounds: Counter[str] = field(default_factory=Counter)  # by file
    refuted: Counter[str] = field(default_factory=Counter)  # by test

    def lines(self) -> list[str]:
        counts = [f"{number} x {file}" for file, number in sorted(self.rounds.items())]
        failed = [f"refuted in {number} rounds: {test}" for test, number in self.refuted.most_common()]
        return [*counts, *(failed or ["no property was refuted"])]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.explore", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long to go on (default 10)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/explore"),
        help="folder of the failing files' output (default build/explore)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of the order of the files; the examples are drawn at random all the same",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report, ends_at = Report(), time.monotonic() + options.minutes * 60
    files = [file for file in sorted(ROOT.glob("tests/*/test_*.py")) if PROPERTIES.search(file.read_text())]
    random.Random(options.seed).shuffle(files)
    try:
        for file in itertools.cycle(files):
            left = ends_at - time.monotonic()
            if left <= 0 or not explore(file, left, options.out, report):
                break
    except KeyboardInterrupt:
        pass  # what has been found so far is reported
    print("\n".join(report.lines()))
    return 1 if report.refuted else 0


def explore(file: Path, seconds: float, out: Path, report: Report) -> bool:
    """One round of a file's property tests. False if the time ran out within it."""
    name = str(file.relative_to(ROOT))
    command = [
        sys.executable,
        "-m",
        "pytest",
        name,
        "-m",
        "hypothesis",
        "--hypothesis-profile=explore",
        "--timeout=0",
        "-q",
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode == NO_TESTS:
        raise SystemExit(f"{name} has properties, but pytest finds none")
    report.rounds[name] += 1
    refuted = [test for _, test in OUTCOME.findall(done.stdout)] or ([name] if done.returncode else [])
    report.refuted.update(refuted)
    if refuted:
        (out / f"{file.stem}.txt").write_text(done.stdout + done.stderr)
    print(f"{name}: {', '.join(refuted) or 'holds'}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
