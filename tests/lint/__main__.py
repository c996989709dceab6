"""`python -m tests.lint [NAME …]`: the checks of texts that `make check` runs, one module each. One line a problem; exit code 1 if there is one.

--write writes what is generated, the reference and the contents of long pages, and checks then.
"""

import argparse
import sys
from collections.abc import Callable

from tests.lint import contents, docs_links, named_files, prose, reference, site, yaml_files

CHECKS: dict[str, Callable[[], list[str]]] = {
    module.__name__.rpartition(".")[2]: module.problems for module in (reference, contents, prose, docs_links, named_files, yaml_files, site)
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lint", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *CHECKS], help="checks to run; all by default")
    parser.add_argument("--write", action="store_true", help="write what is generated")
    arguments = parser.parse_args()
    if arguments.write:
        reference.write()
        contents.write()
    found = [f"{name}: {problem}" for name, check in CHECKS.items() if name in (arguments.names or CHECKS) for problem in check()]
    print("\n".join(found) if found else f"{', '.join(arguments.names or CHECKS)}: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
