"""The site builds strictly: every page is in its navigation, and no link or anchor is dead."""

import subprocess
import sys
import tempfile

from tests.lint.problem import ROOT, Problem

CONFIG = ROOT / "mkdocs.yml"


def problems() -> list[Problem]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [
        line.partition("-")[2].strip()
        for line in (done.stderr + done.stdout).splitlines()
        if line.startswith(("WARNING", "ERROR"))
    ]
    said = lines or [f"mkdocs ended with {done.returncode}: {done.stderr[-500:]}"]
    return [Problem(CONFIG, 0, line) for line in said] if done.returncode else []
