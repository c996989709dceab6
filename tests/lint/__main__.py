"""`python -m tests.lint [NAME ...]`: checks of what files say; `make check` runs it. Nothing is served.

A module of this folder with a function `problems() -> list[Problem]` is a check. It prints each
problem with its file and line, and ends with 1 if there is one. With names, only these checks run.
With --write it first writes what is generated: docs/reference/, and the contents of long pages.
"""

import importlib
import sys
from pathlib import Path

from tests.lint import contents, reference

NOT_CHECKS = {"__main__", "pages", "problem"}


def main() -> int:
    if "--write" in sys.argv[1:]:
        reference.write()
        contents.write()
    names = [each for each in sys.argv[1:] if each != "--write"] or sorted(
        path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_CHECKS
    )
    found = [(name, problem) for name in names for problem in importlib.import_module(f"tests.lint.{name}").problems()]
    for name, problem in found:
        print(f"{problem} [{name}]")
    print(f"{len(names)} checks, {len(found)} problems")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
