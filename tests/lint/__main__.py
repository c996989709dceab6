"""`python -m tests.lint [NAME ...]`: checks of what files say; `make check` runs it. Nothing is served.

A module of this folder with a function `problems()` is a check: it returns the problems, each with
its file and line. With names, only these checks run. `--write` first writes what is generated: a
module with a function `write()` does that.
"""

import argparse
import importlib
import sys
from pathlib import Path


def main() -> int:
    modules = {
        path.stem: importlib.import_module(f"tests.lint.{path.stem}")
        for path in sorted(Path(__file__).parent.glob("*.py"))
        if path.stem != "__main__"
    }
    checks = {name: module for name, module in modules.items() if hasattr(module, "problems")}
    parser = argparse.ArgumentParser(
        prog="python -m tests.lint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *checks], help="checks to run; all by default")
    parser.add_argument("--write", action="store_true", help="write what is generated")
    options = parser.parse_args()
    if options.write:
        for module in modules.values():
            if hasattr(module, "write"):
                module.write()
    names = options.names or list(checks)
    found = [(name, problem) for name in names for problem in checks[name].problems()]
    for name, problem in found:
        print(f"{problem} [{name}]")
    print(f"{len(names)} checks, {len(found)} problems")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
