"""Coding agents, each with a task in a repository of its own: write a file, read it back, say what
it says. The scripted model drives them (tasks.py).
"""

import os
import subprocess
from pathlib import Path

from tests.clients.documented import block, run_with
from tests.clients.install import search_path
from tests.clients.tasks import ANSWER, FILE, MODEL, SECRET, task_of


def claude_code(url: str) -> None:
    told = ["claude", "--print", task_of("claude-code"), "--output-format", "json", "--allowedTools", "Write,Read"]
    drive(block("Claude Code", "sh", url, MODEL), told)


def codex(url: str) -> None:
    home = Path("home/.codex")
    home.mkdir(parents=True)
    (home / "config.toml").write_text(block("Codex CLI", "toml", url, MODEL))
    # it runs in a folder of the test's: a sandbox in a container needs rights that a CI's runner has not
    told = ["codex", "exec", "--json", "--dangerously-bypass-approvals-and-sandbox", task_of("codex")]
    drive(block("Codex CLI", "sh", url, MODEL), told)


def opencode(url: str) -> None:
    Path("opencode.json").write_text(block("opencode", "json", url, MODEL))
    drive(
        "export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1",
        ["opencode", "run", "--format", "json", task_of("opencode")],
    )


def qwen_code(url: str) -> None:
    told = [
        "qwen",
        "--prompt",
        task_of("qwen-code"),
        "--output-format",
        "json",
        "--approval-mode",
        "yolo",
        "--auth-type",
        "openai",
    ]
    drive(block("qwen-code", "sh", url, MODEL), told)


def drive(settings: str, command: list[str]) -> None:
    """Run the agent in this folder; then the file is there, and the answer is what the file says."""
    subprocess.run(["git", "init", "--quiet"], check=True)
    said = run_with(f"export PATH='{search_path()}'\n{settings}", command, home=Path("home").absolute())
    secret = os.environ[SECRET]
    assert Path(FILE).read_text().strip() == secret, Path(FILE).read_text()
    assert f"{ANSWER} {secret}" in said, said[-4000:]
