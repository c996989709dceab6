"""`make check`: format, lint, import contracts, types and the checks of tests/lint, at the same
time. Needs no Redis and no model.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
COMMANDS: dict[str, list[str | Path]] = {  # the longest first
    "mypy": [BIN / "mypy"],
    "lint-imports": [BIN / "lint-imports"],
    "tests.lint": [sys.executable, "-m", "tests.lint"],
    "ruff check": [BIN / "ruff", "check", "."],
    "ruff format": [BIN / "ruff", "format", "--check", "."],
}


def main() -> int:
    running = {
        name: subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, command in COMMANDS.items()
    }
    codes = {}
    for name, process in reversed(running.items()):  # the quickest first
        said, _ = process.communicate()
        codes[name] = process.returncode
        print(
            f"{name}: {'failed' if process.returncode else 'ok'}\n{said if process.returncode else ''}",
            end="",
            flush=True,
        )
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
