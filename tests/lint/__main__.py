"""`python -m tests.lint [NAME ...]`: checks of what files say; `make check` runs it. Nothing is served.

A module of this folder with a function `problems() -> list[Problem]` is a check. It prints each
problem with its file and line, and ends with 1 if there is one. With names, only these checks run.
"""

import importlib
import sys
from pathlib import Path

NOT_CHECKS = {"__main__", "problem"}


def main() -> int:
    names = sys.argv[1:] or sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_CHECKS)
    found = [(name, problem) for name in names for problem in importlib.import_module(f"tests.lint.{name}").problems()]
    for name, problem in found:
        print(f"{problem} [{name}]")
    print(f"{len(names)} checks, {len(found)} problems")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
