"""The configurations that docs/start/clients.md shows, as the checks use them: what a reader copies is what has run."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.clients.install import ROOT

PAGE = ROOT / "docs" / "start" / "clients.md"
URL, MODEL = "http://127.0.0.1:8000", "my-model"  # on the page
FOREIGN = (
    "XDG_",
    "ANTHROPIC_",
    "OPENAI_",
    "CLAUDE_CODE_",
    "CODEX_",
    "OPENCODE_",
    "QWEN_",
)  # variables that agents read: those of whoever runs this are not theirs


def block(client: str, language: str, url: str, model: str) -> str:
    """The client's block of this language, for our server and model."""
    section = re.search(
        rf"^## {re.escape(client)}$(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert section is not None, f"{PAGE}: no section {client}"
    found = re.search(rf"^```{language}\n(.*?)^```$", section[1], re.DOTALL | re.MULTILINE)
    assert found is not None, f"{PAGE}: {client} shows no {language}"
    return found[1].replace(URL, url).replace(MODEL, model)


def names_of(client: str, url: str, model: str) -> dict[str, Any]:
    """Names that the client's Python block defines."""
    names: dict[str, Any] = {}
    exec(compile(block(client, "python", url, model), str(PAGE), "exec"), names)
    return names


def run_with(settings: str, command: Sequence[str], *, home: Path) -> str:
    """Run a command with the shell lines before it, and a home of its own. Returns its standard
    output. Raises AssertionError if it fails.
    """
    home.mkdir(exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    shell = ["bash", "-euc", f'{settings}\nexec "$@"', "bash", *command]  # a failing line ends it
    done = subprocess.run(
        shell, env=inherited | {"HOME": str(home)}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, (
        f"{command[0]} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout
