"""`make clients`: Penstock through the clients that applications use, each as its own documentation has it. One line a client; exit code 1 if one fails.

Runs in an environment of the clients' own, and starts the server with the interpreter that is given: `python tests/clients/run.py .venv/bin/python [name …]`.
"""

import http.server
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel

MODEL = "penstock-demo"
QUESTION = "What is Penstock?"
ANSWER = "Penstock is a server for large language models."
START_TIMEOUT_S = 180.0


class Forecast(BaseModel):
    """The weather to come."""

    place: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(python: str, origin: str) -> Iterator[str]:
    """The demo model, and who may call it from a page; yields its URL."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "wb") as log:
        command = [
            python,
            "-m",
            "services.cli",
            "up",
            "--model",
            "demo",
            "--dtype",
            "float32",
            "--port",
            str(port),
            "--data-dir",
            folder,
            "--allow-origin",
            origin,
        ]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, Path(folder) / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=120, seed=1)
    reply = model.invoke(QUESTION)
    assert reply.text.startswith(ANSWER) and reply.usage_metadata["output_tokens"] == 37, reply
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == reply.text
    tools = model.bind_tools([Forecast], tool_choice="any", parallel_tool_calls=False)
    called = tools.invoke(QUESTION)
    [call] = called.tool_calls
    assert call["name"] == "Forecast" and Forecast(**call["args"]), called
    chunks = list(tools.stream(QUESTION))
    assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == call["args"]
    after = model.bind_tools([Forecast]).invoke([HumanMessage(QUESTION), called, ToolMessage("rain", tool_call_id=call["id"])])
    assert after.response_metadata["finish_reason"] in ("stop", "length")
    assert isinstance(model.with_structured_output(Forecast, method="function_calling").invoke(QUESTION), Forecast)


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True, temperature=0, max_tokens=120)
    message = ChatMessage(role="user", content=QUESTION)
    whole = model.chat([message]).message.content
    assert whole.startswith(ANSWER), whole
    assert "".join(chunk.delta or "" for chunk in model.stream_chat([message])) == whole

    def forecast(days: Literal[1, 2]) -> str:
        """The weather to come."""
        return f"rain for {days} days"

    tool = FunctionTool.from_defaults(forecast)
    reply = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    [call] = model.get_tool_calls_from_response(reply)
    assert call.tool_name == "forecast" and call.tool_kwargs["days"] in (1, 2), call


def instructor(url: str) -> None:
    import instructor as library
    import openai

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for mode in (library.Mode.TOOLS, library.Mode.TOOLS_STRICT):
        client = library.from_openai(plain, mode=mode)
        messages = [{"role": "user", "content": QUESTION}]
        found = client.chat.completions.create(model=MODEL, messages=messages, response_model=Forecast, temperature=0, max_tokens=120)
        assert isinstance(found, Forecast), mode


def litellm(url: str) -> None:
    import litellm as library

    messages = [{"role": "user", "content": QUESTION}]
    tool = {
        "type": "function",
        "function": {"name": "forecast", "parameters": {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}},
    }
    for name in (f"openai/{MODEL}", f"hosted_vllm/{MODEL}"):
        options: dict[str, Any] = {"model": name, "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
        whole = library.completion(messages=messages, **options)
        assert whole.choices[0].message.content.startswith(ANSWER), whole
        chunks = list(library.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **options))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [37], name
        called = library.completion(messages=messages, tools=[tool], tool_choice="required", max_tokens=100, **options)
        assert called.choices[0].message.tool_calls[0].function.name == "forecast", called
        library.completion(messages=[*messages, called.choices[0].message.model_dump(), {"role": "user", "content": "And?"}], max_tokens=3, **options)


def httpx_sse(url: str) -> None:
    from httpx_sse import connect_sse

    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True, "stream_options": {"include_position": True}}
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        with connect_sse(client, "POST", "/v1/chat/completions", json=body) as source:
            events = list(source.iter_sse())
        assert events[-1].data == "[DONE]" and events[10].id, events
        headers = {"Last-Event-ID": events[10].id}
        with connect_sse(client, "GET", f"/v1/streams/{events[0].json()['id']}", headers=headers) as source:
            rest = list(source.iter_sse())
        assert [event.data for event in rest] == [event.data for event in events[11:]]


PAGE = """<!doctype html><title>waiting</title><script>
(async () => {
  const body = {model: "%(model)s", messages: [{role: "user", content: "%(question)s"}], temperature: 0, stream: true};
  const headers = {"Content-Type": "application/json", "Authorization": "Bearer none"};
  const reply = await fetch("%(url)s/v1/chat/completions", {method: "POST", headers, body: JSON.stringify(body)});
  let text = "", rest = "";
  for await (const piece of reply.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + piece).split("\\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: {")) text += JSON.parse(line.slice(6)).choices[0]?.delta.content ?? "";
  }
  document.title = "done: " + text;
})().catch(error => { document.title = "failed: " + error; });
</script>"""


def browser(url: str, port: int) -> None:
    """A page of the origin that may, and the same page of one that may not."""
    from selenium import webdriver

    page = (PAGE % {"url": url, "model": MODEL, "question": QUESTION}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            """Quietly."""

    pages = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        assert title_of(driver, f"http://127.0.0.1:{port}/").startswith(f"done: {ANSWER}")
        assert title_of(driver, f"http://localhost:{port}/").startswith("failed: ")
        driver.get(f"{url}/docs")
        deadline = time.monotonic() + 60
        while "chat/completions" not in driver.page_source and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "chat/completions" in driver.page_source, "Swagger UI shows nothing"
    finally:
        driver.quit()
        pages.shutdown()


def title_of(driver: Any, url: str) -> str:
    """The page's, once it has changed it."""
    driver.get(url)
    deadline = time.monotonic() + 60
    while driver.title == "waiting" and time.monotonic() < deadline:
        time.sleep(0.2)
    title: str = driver.title
    return title


def main(python: str, names: list[str]) -> int:
    page_port = free_port()
    checks: dict[str, Callable[[str], None]] = {each.__name__: each for each in (langchain, llama_index, instructor, litellm, httpx_sse)}
    if shutil.which("chromium") and shutil.which("chromedriver"):
        checks["browser"] = lambda url: browser(url, page_port)
    else:
        print("browser: left out, there is no chromium with its chromedriver")
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
