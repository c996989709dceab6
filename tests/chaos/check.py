"""Judges a run by its history alone: `python -m tests.chaos.check HISTORY`.

It reports what was lost, hung, doubled, missing, different or cancelled by us, the longest pause of
a stream by fault, and growth of memory. The last line is one JSON document. The exit code is 1 if
anything was wrong, 2 if the file is no history.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.judge import Judge


def judged(path: Path) -> Judge:
    """The judge of a history, once it has read it all. Raises ValueError where a line is no record."""
    judge = Judge()
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                judge.take(json.loads(line))
            except (AssertionError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from None
    judge.close()
    return judge


def report(judge: Judge) -> str:
    """The tables of a run."""
    return f"{judge.tally.table()}\n\n{judge.pauses.table(dict(judge.tally.faults))}"


def document(judge: Judge, **more: Any) -> str:
    """The run in one line of JSON."""
    return judge.tally.document(
        seed=judge.run["seed"], **more, pauses={name: asdict(each) for name, each in judge.pauses.longest.items()}
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.check", description=__doc__.splitlines()[0])
    parser.add_argument("history", type=Path)
    path = parser.parse_args().history
    try:
        judge = judged(path)
    except (OSError, ValueError) as error:
        print(f"python -m tests.chaos.check: {error}", file=sys.stderr)
        return 2
    print(f"\n{report(judge)}\n\n{document(judge)}")
    return 1 if judge.tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
