"""A page in headless Chromium: of the origin that the operator named, and of one that may not; and
the API's own pages.
"""

import http.server
import os
import shutil
import threading
import time
from typing import Any

from tests.clients.frameworks import ANSWER, MODEL, QUESTION
from tests.clients.server import NAMED_HOST

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


def browser(url: str) -> None:
    """A page of the origin that may, and the same page of one that may not."""
    from selenium import webdriver

    port = int(os.environ["PAGE_PORT"])  # the origin's, which the server was told
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
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-proxy-server"):
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP *.example 127.0.0.1")
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        assert title_of(driver, f"http://{NAMED_HOST}:{port}/").startswith(f"done: {ANSWER}")
        assert title_of(driver, f"http://other.example:{port}/").startswith("failed: ")
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
