"""`python -m tests.audit`: the licence of each package that is installed, and what is known against
it, for which PyPI is asked.

Runs in an environment that has pip-licenses and pip-audit; what it looks at is the one of .venv.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = Path(sys.executable).parent
PYTHON = ROOT / ".venv/bin/python"


def main() -> int:
    subprocess.run([TOOLS / "pip-licenses", "--python", PYTHON, "--from=mixed", "--order=license"], check=True)
    frozen = subprocess.run(
        [PYTHON, "-m", "pip", "freeze", "--exclude-editable"], check=True, capture_output=True, text=True
    ).stdout
    installed = TOOLS.parent / "installed.txt"
    installed.write_text(
        "".join(f"{line.partition('+')[0]}\n" for line in frozen.splitlines())
    )  # PyPI knows no local versions, as torch's +cpu
    return subprocess.run(
        [TOOLS / "pip-audit", "--strict", "--disable-pip", "--no-deps", "--requirement", installed]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
