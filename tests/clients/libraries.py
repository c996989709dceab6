"""Libraries at their newest releases, each in an environment of its own: a program of programs/ with the lines that docs/start/clients.md shows."""

import json
import os
import subprocess
from pathlib import Path

from tests.clients.documented import block
from tests.clients.frameworks import MODEL as DEMO
from tests.clients.install import NPM, environment, search_path
from tests.clients.tasks import MODEL, QUESTION, REPORT, WEATHER


def pydantic_ai(url: str) -> None:
    run("pydantic-ai-slim", "pydantic_ai", url)


def openai_agents(url: str) -> None:
    run("openai-agents", "openai_agents", url)


def guidance(url: str) -> None:
    run("guidance", "guidance", url, DEMO)


def openrouter(url: str) -> None:
    run("openrouter", "openrouter", url, DEMO)


def run(package: str, program: str, *arguments: str) -> None:
    python = environment(package) / "bin" / "python"
    subprocess.run([str(python), "-m", f"tests.clients.programs.{program}", *arguments], check=True)


def ai(url: str) -> None:
    """Node looks for packages beside the program."""
    Path("node_modules").symlink_to(NPM / "node_modules")
    program = Path(__file__).parent / "programs" / "ai.mjs"
    Path("check.mjs").write_text(block("Vercel's ai", "js", url, MODEL) + program.read_text())
    told = json.dumps({"question": QUESTION, "report": REPORT, "weather": WEATHER})
    subprocess.run(["node", "check.mjs", told], check=True, env=os.environ | {"PATH": search_path()})
