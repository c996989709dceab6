"""The scripted model's tasks and answers: a coding task for each agent, and a question about the
weather for everybody else.
"""

import json
import os
from pathlib import Path
from typing import Any

MODEL = "scripted"
AGENTS = ("claude-code", "codex", "opencode", "qwen-code")
FILE = "fruit.txt"
ANSWER = "The file says:"
SECRET = "CLIENTS_SECRET"  # the variable with the word that an agent writes, and has to find again

QUESTION = "How is the weather in Paris?"
WEATHER = "It rains."  # what the tool says
REPORT = "In Paris: rains"  # and what the model makes of it
OTHERWISE = "Understood."  # what it says to all else


def task_of(agent: str) -> str:
    """The agent's task."""
    return f"{phrase(agent)}: write the agreed word to {FILE}, then read the file and say what it says."


def phrase(agent: str) -> str:
    return f"A task for {agent}"


def make_script(folders: dict[str, Path]) -> str:
    """The script's JSON. folders: where each agent works, which some of their tools want to be told."""
    secret = os.environ[SECRET]
    tasks = [
        {
            "phrase": phrase(agent),
            "turns": [*calls(agent, folder / FILE, secret), {"say": f"{ANSWER} {{found}}"}],
            "find": secret,
        }
        for agent, folder in folders.items()
    ]
    weather = [{"call": "get_weather", "arguments": {"place": "Paris"}}, {"say": "In Paris: {found}"}]
    return json.dumps(
        {"tasks": [*tasks, {"phrase": QUESTION, "turns": weather, "find": "rains"}], "otherwise": OTHERWISE}
    )


def calls(agent: str, file: Path, text: str) -> list[dict[str, Any]]:
    """A call that writes the file and one that reads it, of the agent's own tools."""
    path = str(file)
    return {
        "claude-code": [tool("Write", file_path=path, content=text), tool("Read", file_path=path)],
        "codex": [tool("exec_command", cmd=f"echo {text} > {FILE}"), tool("exec_command", cmd=f"cat {FILE}")],
        "opencode": [tool("write", filePath=path, content=text), tool("read", filePath=path)],
        "qwen-code": [tool("write_file", file_path=path, content=text), tool("read_file", file_path=path)],
    }[agent]


def tool(name: str, **arguments: str) -> dict[str, Any]:
    return {"call": name, "arguments": arguments}
