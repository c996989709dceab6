"""Every client: its package, its check, the model that it needs. `python -m tests.clients.table
NAME URL` runs one check, in the folder where it is started.
"""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.clients import agents, applications, browser, frameworks, libraries, packages
from tests.clients.install import Here, Npm, OwnEnvironment


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    package: Here | Npm | OwnEnvironment
    check: Callable[[str], None]  # given the server's address; raises if something is wrong
    model: Literal["demo", "scripted"] = "demo"
    timeout_s: float = 120.0
    num_refused: int = 0  # of its calls, on purpose
    is_weekly: bool = False  # it takes gigabytes, or a quarter of an hour
    is_recorded: bool = False


TORCH = ("torch>=2.11,<=2.13.0",)  # as Penstock itself asks for it
PYDANTIC_AI = OwnEnvironment("pydantic-ai-slim", requirement="pydantic-ai-slim[openai,anthropic]")
CLIENTS = (
    Client("openai", Here("openai"), packages.openai, num_refused=1),
    Client("openai_async", Here("openai"), packages.openai_async),
    Client("openai_responses", Here("openai"), packages.openai_responses),
    Client("anthropic", Here("anthropic"), packages.anthropic),
    Client("anthropic-tools", OwnEnvironment("anthropic"), libraries.anthropic_tools, model="scripted", num_refused=2),
    Client("anthropic-npm", Npm("@anthropic-ai/sdk"), libraries.anthropic_npm, model="scripted", num_refused=2),
    Client("ollama", Here("ollama"), packages.ollama),
    Client("langchain", Here("langchain-openai"), frameworks.langchain),
    Client("llama_index", Here("llama-index-llms-openai-like"), frameworks.llama_index),
    Client("instructor", Here("instructor"), frameworks.instructor),
    Client("litellm", Here("litellm"), frameworks.litellm),
    Client("httpx_sse", Here("httpx-sse"), frameworks.httpx_sse),
    Client("pydantic-ai", PYDANTIC_AI, libraries.pydantic_ai, model="scripted", is_recorded=True),
    Client(
        "openai-agents", OwnEnvironment("openai-agents"), libraries.openai_agents, model="scripted", is_recorded=True
    ),
    Client("guidance", OwnEnvironment("guidance", others=("openai",)), libraries.guidance, is_recorded=True),
    Client("mistralai", OwnEnvironment("mistralai"), libraries.mistralai, model="scripted"),
    Client("openrouter", OwnEnvironment("openrouter"), libraries.openrouter),
    Client(
        "ai",
        Npm("ai", ("@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod")),
        libraries.ai,
        model="scripted",
        is_recorded=True,
    ),
    Client(
        "claude-code",
        Npm("@anthropic-ai/claude-code"),
        agents.claude_code,
        model="scripted",
        timeout_s=300,
        is_recorded=True,
    ),
    Client("codex", Npm("@openai/codex"), agents.codex, model="scripted", timeout_s=300, is_recorded=True),
    Client("opencode", Npm("opencode-ai"), agents.opencode, model="scripted", timeout_s=300, is_recorded=True),
    Client(
        "qwen-code", Npm("@qwen-code/qwen-code"), agents.qwen_code, model="scripted", timeout_s=300, is_recorded=True
    ),
    Client("open-webui", OwnEnvironment("open-webui", TORCH), applications.open_webui, timeout_s=600, is_recorded=True),
    Client("guidellm", OwnEnvironment("guidellm", TORCH), applications.guidellm, timeout_s=600, is_recorded=True),
    Client("vllm", OwnEnvironment("vllm"), applications.vllm_bench, timeout_s=900, is_weekly=True, is_recorded=True),
    *(
        [Client("browser", Here("selenium"), browser.browser, num_refused=1)]
        if shutil.which("chromium") and shutil.which("chromedriver")
        else []
    ),
)


if __name__ == "__main__":
    name, url = sys.argv[1:]
    next(client for client in CLIENTS if client.name == name).check(url)
