"""Applications in environments of their own: Open WebUI, and the benchmarks of guidellm and vLLM."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from tests.clients.documented import block, run_with
from tests.clients.frameworks import ANSWER, MODEL, QUESTION
from tests.clients.install import ROOT, environment
from tests.clients.server import free_port

START_TIMEOUT_S = 300.0
NUM_REQUESTS = 10
OFFLINE = (
    "export OFFLINE_MODE=true HF_HUB_OFFLINE=1 BYPASS_EMBEDDING_AND_RETRIEVAL=true RAG_EMBEDDING_ENGINE=ollama "
    "DO_NOT_TRACK=true ANONYMIZED_TELEMETRY=false"
)


def open_webui(url: str) -> None:
    """Its server, as a user of its API sees it: both connections list the model, and a chat comes
    through each, whole and streamed.
    """
    port = free_port()
    settings = (
        f"{block('Open WebUI', 'sh', url, MODEL)}{OFFLINE} WEBUI_SECRET_KEY=a-secret-that-is-32-bytes-long-or-more "
        f"DATA_DIR='{Path('data').absolute()}'"
    )
    program = environment("open-webui") / "bin" / "open-webui"
    with open("log", "wb") as log:
        shell = [
            "bash",
            "-euc",
            f'{settings}\nexec "$@"',
            "bash",
            str(program),
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        process = subprocess.Popen(shell, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            wait_for_health(client, process)
            chat_by(client)
    except BaseException:
        print(Path("log").read_text()[-8000:])
        raise
    finally:
        process.terminate()
        process.wait()


def wait_for_health(client: httpx.Client, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError("Open WebUI did not start")


def chat_by(client: httpx.Client) -> None:
    account = {"name": "Somebody", "email": "somebody@example.org", "password": "A-password-1"}
    token = client.post("/api/v1/auths/signup", json=account).raise_for_status().json()["token"]
    client.headers["Authorization"] = f"Bearer {token}"
    by_openai = [each["id"] for each in client.get("/openai/models").raise_for_status().json()["data"]]
    by_ollama = [each["model"] for each in client.get("/ollama/api/tags").raise_for_status().json()["models"]]
    listed = {each["id"] for each in client.get("/api/models").raise_for_status().json()["data"]}
    assert (
        by_openai == [MODEL] and by_ollama in ([MODEL], [f"{MODEL}:latest"]) and {*by_openai, *by_ollama} <= listed
    ), (by_openai, by_ollama, listed)
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    for path in ("/api/chat/completions", "/ollama/v1/chat/completions"):
        whole = client.post(path, json=body | {"temperature": 0, "stream": False}).raise_for_status().json()
        assert whole["choices"][0]["message"]["content"].startswith(ANSWER), whole
        with client.stream("POST", path, json=body | {"temperature": 0, "stream": True}) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk.get("choices"))
        assert said.startswith(ANSWER) and len(chunks) > 5, lines
    whole = (
        client.post("/ollama/api/chat", json=body | {"options": {"temperature": 0}, "stream": False})
        .raise_for_status()
        .json()
    )
    assert whole["message"]["content"].startswith(ANSWER), whole


def guidellm(url: str) -> None:
    run_shown("guidellm", "guidellm", url, " --disable-console-interactive --output kind=json,path=report.json")
    [run] = json.loads(Path("report.json").read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals


def vllm_bench(url: str) -> None:
    run_shown("vllm", "vLLM's benchmark", url, " --save-result --result-filename report.json")
    report = json.loads(Path("report.json").read_text())
    assert (report["completed"], report["failed"]) == (NUM_REQUESTS, 0), report


def run_shown(package: str, heading: str, url: str, options: str) -> None:
    """Run the command that the page shows, with more options."""
    path = f"{environment(package) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    settings = f"export PATH='{path}' MODEL_FOLDER='{ROOT}/services/demo/model' HF_HUB_OFFLINE=1"
    run_with(
        settings, ["bash", "-euc", block(heading, "sh", url, MODEL).rstrip() + options], home=Path("home").absolute()
    )
