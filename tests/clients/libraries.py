"""Libraries at their newest releases, each in an environment of its own: a program of programs/
with the lines that docs/start/clients.md shows.
"""

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


def anthropic_tools(url: str) -> None:
    run("anthropic", "anthropic_tools", url)


def mistralai(url: str) -> None:
    run("mistralai", "mistralai_fim", url)


def anthropic_npm(url: str) -> None:
    run_node("anthropic", "anthropic.mjs", url)


def ai(url: str) -> None:
    run_node("Vercel's ai", "ai.mjs", url)


def run_node(section: str, program: str, url: str) -> None:
    """section: of docs/start/clients.md, whose lines come before the program's. Node looks for packages beside it."""
    Path("node_modules").symlink_to(NPM / "node_modules")
    Path("check.mjs").write_text(
        block(section, "js", url, MODEL) + (Path(__file__).parent / "programs" / program).read_text()
    )
    told = json.dumps({"model": MODEL, "question": QUESTION, "report": REPORT, "weather": WEATHER})
    subprocess.run(["node", "check.mjs", told], check=True, env=os.environ | {"PATH": search_path()})
