"""`make clients`: Penstock through the clients that applications use, each as its own documentation has it. One line a client; exit code 1 if one fails.

Runs in an environment of the clients' own, and starts the server with the interpreter that is given: `python -m tests.clients .venv/bin/python [name …]`.
"""

import os
import shutil
import sys
import traceback
from collections.abc import Callable

from tests.clients import frameworks, packages
from tests.clients.browser import browser
from tests.clients.server import free_port, server

CLIENTS: tuple[Callable[[str], None], ...] = (
    packages.openai, packages.openai_async, packages.openai_responses, packages.anthropic, packages.ollama,
    frameworks.langchain, frameworks.llama_index, frameworks.instructor, frameworks.litellm, frameworks.httpx_sse,
)  # fmt: skip


def main(python: str, names: list[str]) -> int:
    page_port = free_port()
    checks = {each.__name__: each for each in CLIENTS}
    if shutil.which("chromium") and shutil.which("chromedriver"):
        checks["browser"] = lambda url: browser(url, page_port)
    else:
        print("browser: left out, there is no chromium with its chromedriver")
    if unknown := set(names) - set(checks):
        raise SystemExit(f"there is no client {', '.join(sorted(unknown))}, only {', '.join(checks)}")
    num_failed = 0
    with server(python, f"http://127.0.0.1:{page_port}") as url:
        for name, check in checks.items():
            if names and name not in names:
                continue
            try:
                check(url)
                print(f"{name}: passed", flush=True)
            except Exception:
                num_failed += 1
                traceback.print_exc()
                print(f"{name}: FAILED", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    os.environ |= {"NO_PROXY": "127.0.0.1,localhost", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # the internet is not needed
    sys.exit(main(sys.argv[1], sys.argv[2:]))
